"""Threads: the region belongs to the thread, and to what backward does for it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from halfstep.torch import autocast


def _in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def _dtypes(layer):
    return layer(torch.ones(1, 4)).dtype, torch.ones(2).half().exp().dtype


PLAIN = (torch.float32, torch.float16)


def test_another_thread_is_outside_of_the_region(low):
    """A data loader thread must not compute in half because the main thread does."""
    layer = nn.Linear(4, 4)
    with autocast("cpu", dtype=low):
        assert _in_thread(lambda: _dtypes(layer)) == PLAIN
        assert _dtypes(layer) == (low, torch.float32)
    assert _dtypes(layer) == PLAIN


def test_threads_have_dtypes_and_rules_of_their_own():
    """Replicas in threads use the default dtype instead of the one of the region."""
    layer = nn.Linear(4, 4)
    wanted = [
        (autocast("cpu", dtype=torch.float16), (torch.float16, torch.float32)),
        (autocast("cpu", dtype=torch.bfloat16), (torch.bfloat16, torch.float32)),
        (autocast("cpu", dtype=torch.bfloat16, rules="none"), PLAIN),
        (torch.autocast("cpu", dtype=torch.bfloat16), (torch.bfloat16, torch.float16)),
        (autocast("cpu", enabled=False), PLAIN),
    ]

    def run(number):
        region, expected = wanted[number % len(wanted)]
        with region:
            return all(_dtypes(layer) == expected for _ in range(20))

    with ThreadPoolExecutor(5) as pool:
        # One instance of torch.autocast cannot be entered by two threads at once.
        assert all(pool.map(run, range(len(wanted))))


def test_one_instance_serves_many_threads(low):
    """The same region object is entered by several threads at the same time."""
    region, layer = autocast("cpu", dtype=low), nn.Linear(4, 4)

    @region
    def run(_):
        return layer(torch.ones(1, 4)).dtype

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(run, range(50))) == {low}
    assert _dtypes(layer) == PLAIN


def test_backward_in_another_thread(low):
    """Backward runs in a thread of its own, where autocast is off."""
    layer = nn.Linear(4, 4)
    with autocast("cpu", dtype=low):
        loss = layer(torch.randn(3, 4)).exp().sum()
    _in_thread(loss.backward)
    assert layer.weight.grad.isfinite().all()


def test_a_region_that_another_thread_leaves_open_concerns_that_thread(low):
    """A thread dies inside its region."""

    def leave_open():
        autocast("cpu", dtype=low).__enter__()

    _in_thread(leave_open)
    assert _dtypes(nn.Linear(4, 4)) == PLAIN


def test_data_parallel_without_devices(low):
    """nn.DataParallel on a machine without devices passes the call on."""
    model = nn.DataParallel(nn.Linear(4, 4))
    with autocast("cpu", dtype=low):
        assert model(torch.randn(3, 4)).dtype == low


@pytest.mark.parametrize("order", ["before", "after", "in another thread"])
def test_plain_autocast_is_left_as_it_was(order):
    """Another library uses torch.autocast in the same process and must not notice."""
    layer = nn.Linear(4, 4)

    def plain():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = layer(torch.ones(1, 4))
            return [half.dtype, half.exp().dtype, half.softmax(-1).dtype, half.sum().dtype]

    expected = [torch.bfloat16] * 4
    if order == "before":
        assert plain() == expected
    with autocast("cpu", dtype=torch.float16):
        _dtypes(layer)
        if order == "in another thread":
            assert _in_thread(plain) == expected
    assert plain() == expected
