"""Which tensors the compiled kernel takes, in how many threads."""

import ctypes
import sys
from unittest import mock

import pytest
import torch

from halfstep.torch._native import _kernel, _library
from halfstep.torch._native._kernel import LARGE, takes

# Threads.
from tests.torch.processes import command, process


def test_the_threads_are_those_of_pytorch(compiled, threads):
    if not compiled.is_threaded:
        pytest.skip("needs a compiler and a PyTorch with one OpenMP")
    for count in (1, 2, 3):
        assert compiled.library.halfstep_threads(ctypes.c_int64(count)) == count


@pytest.mark.parametrize(("count", "expected"), [(LARGE, 3), (LARGE - 1, 1), (5, 1)])
def test_only_large_tensors_use_them(count, expected, threads):
    threads(3)
    function = mock.Mock()
    _kernel._call(function, [torch.empty(count - 5), torch.empty(5)])
    assert function.call_args.args[-2:] == (2, expected)


def test_without_openmp_one_thread_does_all(cache, undecided, threads, monkeypatch, tmp_path):
    compiler = next(_library._compilers(), None) or pytest.skip("needs a C compiler")
    script = f'case "$*" in *fopenmp*) exit 1;; esac; exec {" ".join(compiler)} "$@"'
    monkeypatch.setenv("CC", command(tmp_path / "cc", script))
    alone = undecided()
    assert not alone.is_threaded
    threads(64)
    assert alone.is_worthwhile(LARGE - 1)
    assert not alone.is_worthwhile(LARGE)
    threads(2)
    assert alone.is_worthwhile(LARGE)


ALONE = """
import torch
from halfstep.torch._masters._bits import merge, split

def loaded():
    lines = open("/proc/self/maps").read().splitlines()
    return {line.split()[-1] for line in lines if ".so" in line}

torch.set_num_threads(2)
torch.randn(10**6).exp().bfloat16().float().sum()
before = loaded()
count = 10**6
master = torch.randn(count)
low, remainder = torch.empty(count).bfloat16(), torch.empty(count).short()
split(master, low, remainder)
merge(low, remainder, master)
print(*sorted(loaded() - before), sep="\\n")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_nothing_but_the_kernel_is_loaded(compiled, cache):
    assert process(ALONE) == [compiled.library._name]


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
    "repeats": of(MATRIX[0, :1].expand(3), MATRIX[0, :1].short().expand(3)),
    "other devices": of(torch.ones(3, device="meta").bfloat16()),
    "other layouts": tuple(
        torch.eye(3, dtype=each).to_sparse() for each in (torch.bfloat16, torch.int16, torch.float)
    ),
    "subclasses": of(torch.ones(3).bfloat16().as_subclass(type("Sub", (torch.Tensor,), {}))),
}


@pytest.mark.parametrize("case", TAKEN)
def test_memory_without_gaps_is_taken(case):
    assert takes(*TAKEN[case])


@pytest.mark.parametrize("case", REFUSED)
def test_everything_else_is_not(case):
    assert not takes(*REFUSED[case])
