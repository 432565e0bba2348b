import sys

import pytest

from halfstep.errors import UsageError
from halfstep.run import Target
from tests.launch.scripts import write


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield write(
        tmp_path / "some_model.py",
        """
        class Net:
            @staticmethod
            def small():
                return "small"

        class Module:
            def named_parameters(self): ...
            def __call__(self): ...

        width, net = 3, Module()
        """,
    )
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["some_model.py:Net.small", "./some_model.py:Net.small"])
def test_a_callable_in_a_file(model, name):
    target = Target.of(name)
    assert target.builds
    assert target.load()() == "small"


def test_a_callable_in_a_module(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    target = Target.of("some_model:Net")
    assert target.folder == str(tmp_path)
    assert type(target.load()()).__name__ == "Net"


@pytest.mark.parametrize("name", ["train.py", "package.train", "C:/train.py", "a:b c"])
def test_what_is_no_callable(name):
    assert not Target(name).builds


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("some_model.py:nope", "got 'nope', which some_model.py does not have. Write one that"),
        ("some_model.py:width", "got some_model.py:width, which is a int. Write a function"),
        ("some_model.py:net", "got some_model.py:net, which is a Module. Write a function"),
        ("no_such_module:build", "got 'no_such_module', which is not found. Check the name"),
    ],
)
def test_what_cannot_be_loaded(model, name, text):
    with pytest.raises(UsageError) as raised:
        Target.of(name).load()
    assert text in str(raised.value)


def test_a_module_that_lacks_what_it_needs_is_not_called_missing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path / "needs_more.py", "import no_such_module_either")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_either"):
        Target.of("needs_more:build").load()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": "nope.py"}, "memory needs the path of a Python script, got 'nope.py', which"),
        ({"name": "nope.py:build"}, "memory needs the path of a Python script, got 'nope.py'"),
        (
            {"name": "a:b", "args": ("--epochs", "5")},
            "memory needs no script arguments with a callable, got '--epochs 5'. Leave it out, or",
        ),
        ({"name": "a:b", "module": True}, "memory needs no -m with a callable, got True."),
        (
            {"name": __file__, "optimizer": "SGD"},
            "memory needs no --optimizer with a script, which has its own, got 'SGD'. Leave it",
        ),
    ],
)
def test_wrong_usage(options, text):
    with pytest.raises(UsageError) as raised:
        Target.of(**options)
    assert text in str(raised.value)
