"""Runs the examples of the public names; doctest alone overlooks re-exported classes."""

import doctest
from importlib import import_module

import pytest

PACKAGES = ("halfstep.jax", "halfstep.jax.jmp")
FINDER = doctest.DocTestFinder(exclude_empty=False)
NAMES = [(package, name) for package in PACKAGES for name in import_module(package).__all__]
# A union of the three classes.
WITHOUT = {("halfstep.jax.jmp", "LossScale")}


def examples(package, name):
    module = import_module(package)
    found = FINDER.find(getattr(module, name), name, module=False, globs=dict(vars(module)))
    return [test for test in found if test.examples]


@pytest.mark.parametrize(("package", "name"), NAMES)
def test_examples_of_public_names(package, name):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples(package, name):
        assert runner.run(test).failed == 0, test.name


@pytest.mark.parametrize(("package", "name"), [each for each in NAMES if each not in WITHOUT])
def test_every_public_name_has_an_example(package, name):
    assert name in {test.name for test in examples(package, name)}


@pytest.mark.parametrize(("package", "name"), [each for each in NAMES if each not in WITHOUT])
def test_a_public_name_says_where_it_is_public(package, name):
    assert getattr(import_module(package), name).__module__ in (*PACKAGES, "halfstep.core")
