"""Runs the examples of all public names; doctest alone overlooks methods of re-exported classes."""

import doctest
import inspect

import pytest

from halfstep import core


def is_made_of_code(value):
    return inspect.isclass(value) or inspect.isroutine(value)


PUBLIC = {name: getattr(core, name) for name in core.__all__}
PUBLIC = {name: value for name, value in PUBLIC.items() if is_made_of_code(value)}
FINDER = doctest.DocTestFinder(exclude_empty=False)


def examples(name):
    found = FINDER.find(PUBLIC[name], name, module=False, globs=dict(vars(core)))
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_of_public_names(name):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples(name):
        assert runner.run(test).failed == 0, test.name


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_and_method_has_an_example(name):
    have = {test.name for test in examples(name)}
    public = [key for key, value in vars(PUBLIC[name]).items() if is_documented(key, value)]
    assert {name, *(f"{name}.{key}" for key in public)} <= have


def is_documented(key, value):
    method = inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod, property))
    return method and not key.startswith("_")
