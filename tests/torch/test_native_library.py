"""The compiled kernel is built once, from nothing that others can write to, or does without."""

from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from unittest import mock

import pytest
import torch

from halfstep.torch._masters import _bits
from halfstep.torch._masters._bits import merge, split
from halfstep.torch._native import _kernel, _library
from halfstep.torch._native._kernel import LARGE
from halfstep.torch._scaling import _norms
from halfstep.torch._scaling._norms import norms_on_cpu
from tests.torch.processes import command, process


def tensors(count):
    return (
        torch.randn(count),
        torch.empty(count, dtype=torch.bfloat16),
        torch.empty(count, dtype=torch.int16),
    )


def round_trip(count):
    master, low, remainder = tensors(count)
    split(master, low, remainder)
    out = torch.empty(count)
    merge(low, remainder, out)
    return torch.equal(out, master)


# Building.


def test_the_source_is_installed_with_the_package():
    assert files("halfstep.torch._native").joinpath("kernel.c").is_file()


def test_a_library_is_all_that_is_left_and_nobody_else_can_write_to_it(compiled, cache):
    (library,) = cache.iterdir()
    assert library.suffix == ".so"
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_library_that_is_there_is_not_built_again(compiled, monkeypatch):
    monkeypatch.setattr(_library, "_build", None)
    assert _library.load()._name == compiled.library._name


@pytest.mark.parametrize(
    "change",
    [
        {"_FLAGS": ("-O2", "-fPIC")},
        {"_SOURCE": Path("other.c")},
        {"_compilers": lambda: iter([("cc", "-DOTHER")])},
        {"_run": lambda *command: b"#define __VERSION__ other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_build_has_another_name(change, compiled, tmp_path, monkeypatch):
    flags = change.get("_FLAGS", _library._FLAGS)
    (tmp_path / "other.c").write_bytes(_library._SOURCE.read_bytes() + b"\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_library, "_build", lambda stem, *_: stem)
    monkeypatch.setattr(_library, "_is_whole", lambda path: False)
    before = _library._library(_library._FLAGS)
    for name, value in change.items():
        monkeypatch.setattr(_library, name, value)
    assert _library._library(flags) != before


def test_several_may_build_at_once(compiled, cache):
    (library,) = cache.iterdir()
    library.unlink()
    with ThreadPoolExecutor(8) as pool:
        flags = [(*_library._FLAGS, "-fopenmp") if compiled.is_threaded else _library._FLAGS] * 8
        assert {*pool.map(_library._library, flags)} == {library}
    assert [*cache.iterdir()] == [library]


def cut_short(library):
    """Replaces a library by its first half, at a place that this process has not mapped."""
    half = library.read_bytes()[: library.stat().st_size // 2]
    library.unlink()
    library.write_bytes(half)


def named_otherwise(library):
    library.rename(library.with_stem(f"{library.stem[:-1]}{'01'[library.stem[-1] == '0']}"))


def emptied(library):
    library.unlink()
    library.touch()


FRESH = """
import torch
from halfstep.torch._masters._bits import merge, split
from halfstep.torch._native._kernel import kernel

count = 10**5
master, out = torch.randn(count), torch.empty(count)
low, remainder = torch.empty(count).bfloat16(), torch.empty(count).short()
split(master, low, remainder)
merge(low, remainder, out)
print(torch.equal(out, master), kernel().library._name, sep="\\n")
"""


@pytest.mark.parametrize("harm", [cut_short, emptied, named_otherwise])
def test_a_library_that_is_not_what_it_was_is_built_again(harm, compiled, cache):
    (library,) = cache.iterdir()
    content = library.read_bytes()
    harm(library)
    assert process(FRESH) == ["True", compiled.library._name]
    assert [*cache.iterdir()] == [library]
    assert library.read_bytes() == content


def test_libraries_of_other_releases_stay_as_they_are(compiled, cache):
    (library,) = cache.iterdir()
    older = cache / f"{library.stem.rpartition('-')[0]}.so"
    older.write_text("none")
    assert _library.load()._name == compiled.library._name
    assert older.read_text() == "none"


# Doing without.


def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(_library.sysconfig, "get_config_var", lambda name: None)
    monkeypatch.delenv("CC", raising=False)


def failing_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", command(tmp_path / "cc", "exit 1"))


def hanging_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(_library, "_LIMIT_SECONDS", 0.1)
    monkeypatch.setenv("CC", command(tmp_path / "cc", "exec sleep 60"))


def library_that_is_none(monkeypatch, tmp_path):
    def build(stem, *_):
        stem.write_text("none")
        return stem

    monkeypatch.setattr(_library, "_build", build)


def folder_others_write_to(monkeypatch, tmp_path):
    (tmp_path / "halfstep").mkdir()
    (tmp_path / "halfstep").chmod(0o720)


def folder_of_another(monkeypatch, tmp_path):
    monkeypatch.setattr(_library.os, "geteuid", lambda: -1)


def folder_elsewhere(monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "halfstep").symlink_to(tmp_path / "elsewhere")


def no_folder(monkeypatch, tmp_path):
    (tmp_path / "halfstep").write_text("")


def other_system(monkeypatch, tmp_path):
    monkeypatch.delattr(_library.os, "geteuid")


OBSTACLES = [
    no_compiler,
    failing_compiler,
    hanging_compiler,
    library_that_is_none,
    folder_others_write_to,
    folder_of_another,
    folder_elsewhere,
    no_folder,
    other_system,
]


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_without_a_kernel_the_result_is_the_same(obstacle, cache, undecided, monkeypatch, tmp_path):
    obstacle(monkeypatch, tmp_path)
    assert round_trip(LARGE)
    assert undecided() is None


@pytest.fixture
def changed(cache, undecided, monkeypatch, tmp_path):
    """Builds a kernel from a source in which a text is another one."""

    def build(old, new):
        source = _library._SOURCE.read_text()
        assert old in source
        (tmp_path / "kernel.c").write_text(source.replace(old, new))
        monkeypatch.setattr(_library, "_SOURCE", tmp_path / "kernel.c")
        return undecided() or pytest.skip("needs a C compiler")

    return build


def test_a_kernel_that_splits_in_another_way_does_the_rest(changed):
    other = changed("0x8000u", "0x7fffu")
    assert not _bits._agrees(other)
    assert round_trip(LARGE)
    assert _norms._kernel_for([torch.ones(LARGE)]) is other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_adds_up_in_another_order_does_the_rest(dtype, changed):
    other = changed("LANES = 8", "LANES = 16")
    assert not _norms._adds_up_alike(other)
    values = torch.randn(2**17).to(dtype)
    (norm,) = norms_on_cpu([values])
    assert torch.equal(norm, torch.linalg.vector_norm(values.float()))
    assert _bits.splitting_kernel(LARGE) is other


def test_it_is_decided_once(cache, undecided, monkeypatch, tmp_path):
    no_compiler(monkeypatch, tmp_path)
    with mock.patch.object(_kernel, "load", wraps=_kernel.load) as load:
        assert all(round_trip(LARGE) for _ in range(3))
    load.assert_called_once()


def test_small_tensors_are_no_reason_to_look_for_a_kernel(cache, undecided):
    assert round_trip(LARGE - 1)
    assert not undecided.cache_info().currsize
    assert not cache.exists()
    assert round_trip(LARGE)
    assert undecided.cache_info().currsize


def test_the_cache_is_in_the_home_folder_unless_it_is_said_where(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for elsewhere in ["", "relative"]:
        monkeypatch.setenv("XDG_CACHE_HOME", elsewhere)
        assert _library.cache_folder() == tmp_path / ".cache" / "halfstep"
