"""Runs the examples of the public names; doctest alone overlooks re-exported ones."""

import doctest

import pytest

import halfstep.jax as front_end

NAMES = sorted(front_end.__all__)
FINDER = doctest.DocTestFinder(exclude_empty=False)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example_that_runs(name):
    value, names = getattr(front_end, name), dict(vars(front_end))
    found = FINDER.find(value, name, module=False, globs=names)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in found:
        assert runner.run(test).failed == 0, test.name
    assert name in {test.name for test in found if test.examples}


@pytest.mark.parametrize("name", NAMES)
def test_public_names_show_their_public_path(name):
    assert getattr(front_end, name).__module__ == "halfstep.jax"
