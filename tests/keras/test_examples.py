"""Runs the examples of the public names; doctest alone overlooks re-exported classes."""

import doctest

import pytest

import halfstep.keras as front_end

NAMES = sorted(front_end.__all__)
FINDER = doctest.DocTestFinder(exclude_empty=False)
WITHOUT = {"SkippedStepsWarning", "UnscaledLossWarning"}


def examples(name):
    value, names = getattr(front_end, name), dict(vars(front_end))
    found = FINDER.find(value, name, module=False, globs=names)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", NAMES)
def test_examples_of_public_names(name):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples(name):
        assert runner.run(test).failed == 0, test.name


@pytest.mark.parametrize("name", sorted(set(NAMES) - WITHOUT))
def test_every_public_name_has_an_example(name):
    assert name in {test.name for test in examples(name)}


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_where_it_is_public(name):
    assert name in front_end.__all__
    assert getattr(front_end, name).__module__ in ("halfstep.keras", "halfstep.core")
