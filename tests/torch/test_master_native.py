"""The compiled kernel is built once, from nothing that others can write to, or does without."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from unittest import mock

import pytest
import torch

from halfstep.torch._masters import _bits, _native
from halfstep.torch._masters._bits import _agrees, merge, split

LARGE = _native.LARGE


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "halfstep"


@pytest.fixture
def kernel(cache):
    """A kernel built for this test."""
    return _native.load(_agrees) or pytest.skip("needs a C compiler")


@pytest.fixture
def undecided(monkeypatch):
    """A process that has not looked for a kernel yet."""
    fresh = _bits.functools.cache(_bits._kernel.__wrapped__)
    monkeypatch.setattr(_bits, "_kernel", fresh)
    return fresh


@pytest.fixture
def threads():
    """Sets the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


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


def process(code):
    """Returns the words that a new process prints."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.split()


def command(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


# Building.


def test_the_source_is_installed_with_the_package():
    assert files("halfstep.torch._masters").joinpath("split.c").is_file()


def test_a_library_is_all_that_is_left_and_nobody_else_can_write_to_it(kernel, cache):
    (library,) = cache.iterdir()
    assert library.suffix == ".so"
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_library_that_is_there_is_not_built_again(kernel, monkeypatch):
    monkeypatch.setattr(_native, "_build", None)
    assert _native.load(_agrees).library._name == kernel.library._name


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
def test_another_build_has_another_name(change, kernel, tmp_path, monkeypatch):
    flags = change.get("_FLAGS", _native._FLAGS)
    (tmp_path / "other.c").write_bytes(_native._SOURCE.read_bytes() + b"\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_native, "_build", lambda stem, *_: stem)
    monkeypatch.setattr(_native, "_is_whole", lambda path: False)
    before = _native._library(_native._FLAGS)
    for name, value in change.items():
        monkeypatch.setattr(_native, name, value)
    assert _native._library(flags) != before


def test_several_may_build_at_once(kernel, cache):
    (library,) = cache.iterdir()
    library.unlink()
    with ThreadPoolExecutor(8) as pool:
        flags = [(*_native._FLAGS, "-fopenmp") if kernel.is_threaded else _native._FLAGS] * 8
        assert {*pool.map(_native._library, flags)} == {library}
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
from halfstep.torch._masters import _bits

count = 10**5
master, out = torch.randn(count), torch.empty(count)
low, remainder = torch.empty(count).bfloat16(), torch.empty(count).short()
_bits.split(master, low, remainder)
_bits.merge(low, remainder, out)
print(torch.equal(out, master), _bits._kernel().library._name, sep="\\n")
"""


@pytest.mark.parametrize("harm", [cut_short, emptied, named_otherwise])
def test_a_library_that_is_not_what_it_was_is_built_again(harm, kernel, cache):
    (library,) = cache.iterdir()
    content = library.read_bytes()
    harm(library)
    assert process(FRESH) == ["True", kernel.library._name]
    assert [*cache.iterdir()] == [library]
    assert library.read_bytes() == content


def test_libraries_of_other_releases_stay_as_they_are(kernel, cache):
    (library,) = cache.iterdir()
    older = cache / f"{library.stem.rpartition('-')[0]}.so"
    older.write_text("none")
    assert _native.load(_agrees).library._name == kernel.library._name
    assert older.read_text() == "none"


# Doing without.


def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(_native.sysconfig, "get_config_var", lambda name: None)
    monkeypatch.delenv("CC", raising=False)


def failing_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", command(tmp_path / "cc", "exit 1"))


def hanging_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(_native, "_LIMIT_SECONDS", 0.1)
    monkeypatch.setenv("CC", command(tmp_path / "cc", "exec sleep 60"))


def library_that_is_none(monkeypatch, tmp_path):
    def build(stem, *_):
        stem.write_text("none")
        return stem

    monkeypatch.setattr(_native, "_build", build)


def other_bits(monkeypatch, tmp_path):
    other = tmp_path / "split.c"
    other.write_text(_native._SOURCE.read_text().replace("0x8000u", "0x7fffu"))
    monkeypatch.setattr(_native, "_SOURCE", other)


def folder_others_write_to(monkeypatch, tmp_path):
    (tmp_path / "halfstep").mkdir()
    (tmp_path / "halfstep").chmod(0o720)


def folder_of_another(monkeypatch, tmp_path):
    monkeypatch.setattr(_native.os, "geteuid", lambda: -1)


def folder_elsewhere(monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "halfstep").symlink_to(tmp_path / "elsewhere")


def no_folder(monkeypatch, tmp_path):
    (tmp_path / "halfstep").write_text("")


def other_system(monkeypatch, tmp_path):
    monkeypatch.delattr(_native.os, "geteuid")


OBSTACLES = [
    no_compiler,
    failing_compiler,
    hanging_compiler,
    library_that_is_none,
    other_bits,
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


def test_a_kernel_that_adds_up_in_another_order_does_the_rest(
    cache, undecided, monkeypatch, tmp_path
):
    other = tmp_path / "split.c"
    other.write_text(_native._SOURCE.read_text().replace("LANES = 8", "LANES = 16"))
    monkeypatch.setattr(_native, "_SOURCE", other)
    kernel = undecided() or pytest.skip("needs a C compiler")
    assert not _bits._adds_up_alike(kernel)
    values = torch.randn(2**17).bfloat16()
    (norm,) = _bits.bfloat16_norms([values])
    assert torch.equal(norm, torch.linalg.vector_norm(values.float()))
    assert _bits._kernel_for(*of(values)) is kernel


def test_it_is_decided_once(cache, undecided, monkeypatch, tmp_path):
    no_compiler(monkeypatch, tmp_path)
    with mock.patch.object(_native, "load", wraps=_native.load) as load:
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
        assert _native._folder() == tmp_path / ".cache" / "halfstep"


# Threads.


def test_the_threads_are_those_of_pytorch(kernel, threads):
    if not kernel.is_threaded:
        pytest.skip("needs a compiler and a PyTorch with one OpenMP")
    for count in (1, 2, 3):
        assert kernel.library.halfstep_threads(_native.ctypes.c_int64(count)) == count


@pytest.mark.parametrize(("count", "expected"), [(LARGE, 3), (LARGE - 1, 1), (0, 1)])
def test_only_large_tensors_use_them(count, expected, threads):
    threads(3)
    function = mock.Mock()
    _native._call(function, torch.empty(count))
    assert function.call_args.args[-2:] == (count, expected)


def test_without_openmp_one_thread_does_all(cache, threads, monkeypatch, tmp_path):
    compiler = next(_native._compilers(), None) or pytest.skip("needs a C compiler")
    script = f'case "$*" in *fopenmp*) exit 1;; esac; exec {" ".join(compiler)} "$@"'
    monkeypatch.setenv("CC", command(tmp_path / "cc", script))
    kernel = _native.load(_agrees)
    assert not kernel.is_threaded
    threads(64)
    assert kernel.is_worthwhile(LARGE - 1)
    assert not kernel.is_worthwhile(LARGE)
    threads(2)
    assert kernel.is_worthwhile(LARGE)


ALONE = """
import torch
from halfstep.torch._masters import _bits

def loaded():
    lines = open("/proc/self/maps").read().splitlines()
    return {line.split()[-1] for line in lines if ".so" in line}

torch.set_num_threads(2)
torch.randn(10**6).exp().bfloat16().float().sum()
before = loaded()
count = 10**6
master = torch.randn(count)
low, remainder = torch.empty(count).bfloat16(), torch.empty(count).short()
_bits.split(master, low, remainder)
_bits.merge(low, remainder, master)
print(*sorted(loaded() - before), sep="\\n")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_nothing_but_the_kernel_is_loaded(kernel, cache):
    assert process(ALONE) == [kernel.library._name]


# What is taken.


def of(low, remainder=None, wide=None):
    remainder = torch.empty_like(low, dtype=torch.int16) if remainder is None else remainder
    return low, remainder, torch.empty_like(low, dtype=torch.float32) if wide is None else wide


MATRIX = torch.ones(4, 6, dtype=torch.bfloat16)
TAKEN = {
    "vectors": of(torch.ones(3).bfloat16()),
    "parameters": of(torch.nn.Parameter(torch.ones(3).bfloat16())),
    "no elements": of(torch.ones(0).bfloat16()),
    "transposed": of(MATRIX.T),
    "a part that is whole": of(MATRIX[1:]),
    "one row": of(MATRIX[:1, :]),
}
REFUSED = {
    "other types": of(torch.ones(3).half()),
    "other remainders": of(torch.ones(3).bfloat16(), torch.ones(3).int()),
    "wide masters": of(torch.ones(3).bfloat16(), wide=torch.ones(3).double()),
    "other shapes": of(torch.ones(3).bfloat16(), wide=torch.ones(1)),
    "other strides": of(MATRIX.T, wide=torch.ones(6, 4)),
    "gaps": of(MATRIX[:, ::2], MATRIX.short()[:, ::2], MATRIX.float()[:, ::2]),
    "repeats": of(*[torch.ones(1, dtype=each.dtype).expand(3) for each in tensors(1)[1:]]),
    "other devices": of(torch.ones(3, device="meta").bfloat16()),
    "other layouts": tuple(
        torch.eye(3, dtype=each).to_sparse() for each in (torch.bfloat16, torch.int16, torch.float)
    ),
    "subclasses": of(torch.ones(3).bfloat16().as_subclass(type("Sub", (torch.Tensor,), {}))),
}


@pytest.mark.parametrize("case", TAKEN)
def test_memory_without_gaps_is_taken(case):
    assert _native.takes(*TAKEN[case])


@pytest.mark.parametrize("case", REFUSED)
def test_everything_else_is_not(case):
    assert not _native.takes(*REFUSED[case])
