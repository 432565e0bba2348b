"""Compiled kernels of their own, and other numbers of threads, for single tests."""

import pytest
import torch

from halfstep.torch._native._kernel import kernel


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "halfstep"


@pytest.fixture
def undecided():
    """A process that has not looked for a kernel yet."""
    kernel.cache_clear()
    yield kernel
    kernel.cache_clear()


@pytest.fixture
def compiled(cache, undecided):
    """A kernel built for this test."""
    return undecided() or pytest.skip("needs a C compiler")


@pytest.fixture
def threads():
    """Sets the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
