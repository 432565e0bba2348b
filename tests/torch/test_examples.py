"""Runs the examples of all public names; doctest alone overlooks methods of re-exported classes."""

import doctest

import pytest
import torch

import halfstep.torch as front_end

FINDER = doctest.DocTestFinder(exclude_empty=False)
# Without behaviour of their own, or made by something that has an example.
WITHOUT = {
    "RoundedStateWarning",
    "ScaleChange",
    "SkippedStepsWarning",
    "UnmatchedRuleWarning",
    "UnusedRegionWarning",
    "WidenedRegionWarning",
    "custom_bwd",
}


def examples(name):
    names = {**vars(front_end), "torch": torch}
    found = FINDER.find(getattr(front_end, name), name, module=False, globs=names)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", front_end.__all__)
def test_examples_of_public_names(name):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples(name):
        assert runner.run(test).failed == 0, test.name


@pytest.mark.parametrize("name", sorted(set(front_end.__all__) - WITHOUT))
def test_every_public_name_has_an_example(name):
    assert name in {test.name for test in examples(name)}


@pytest.mark.parametrize("name", front_end.__all__)
def test_a_public_name_says_where_it_is_public(name):
    assert getattr(front_end, name).__module__ in ("halfstep.torch", "halfstep.core")
