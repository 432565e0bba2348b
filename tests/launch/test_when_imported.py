import importlib
import importlib.util
import sys

import pytest

from halfstep.launch._when_imported import when_imported


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "late"
    sys.modules.pop("late", None)


def test_the_callback_comes_after_the_import_and_once(module):
    seen = []
    finders = list(sys.meta_path)
    when_imported(module, lambda: seen.append(sys.modules[module].value))
    assert importlib.util.find_spec(module).loader.get_code(module)  # asked, not imported
    assert seen == []
    late = importlib.import_module(module)
    assert seen == [1]
    assert sys.meta_path == finders
    importlib.reload(late)
    assert seen == [1]


def test_the_module_is_as_it_would_be(module):
    plain = importlib.import_module(module)
    del sys.modules[module]
    when_imported(module, lambda: None)
    late = importlib.import_module(module)
    assert type(late.__loader__) is type(late.__spec__.loader) is type(plain.__loader__)
    assert late.__spec__.origin == plain.__spec__.origin


def test_several_wait_for_the_same_module(module):
    seen = []
    when_imported(module, lambda: seen.append("first"))
    when_imported(module, lambda: seen.append("second"))
    importlib.import_module(module)
    assert seen == ["first", "second"]


def test_a_failing_import_can_be_tried_again(module, tmp_path):
    seen = []
    when_imported(module, lambda: seen.append("there"))
    (tmp_path / "late.py").write_text("raise ImportError('not yet')\n")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(module)
    (tmp_path / "late.py").write_text("value = 22\n")
    importlib.invalidate_caches()
    importlib.import_module(module)
    assert seen == ["there"]


def test_a_module_that_does_not_exist():
    finders = list(sys.meta_path)
    when_imported("halfstep_nowhere", lambda: None)
    assert importlib.util.find_spec("halfstep_nowhere") is None
    sys.meta_path[:] = finders
