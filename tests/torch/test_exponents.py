"""Counts on the device, against those that NumPy makes of the same values."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep import Exponents
from halfstep.torch._native._kernel import LARGE, kernel
from halfstep.torch._observing import _counting
from halfstep.torch._observing._exponents import Tally


def without_kernel(numbers, row):
    with mock.patch.object(_counting, "kernel_at_hand", return_value=None):
        _counting._count_here(numbers, row)


def with_kernel(numbers, row):
    found = kernel() or pytest.skip("needs a C compiler")
    with mock.patch.object(_counting, "kernel_at_hand", return_value=found):
        _counting._count_here(numbers, row)


COUNTERS = {
    "kernel": with_kernel,
    "operations": without_kernel,
    "elsewhere": _counting._count_anywhere,
}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -3e-40, 1.1754942e-38, 1.17549435e-38, 3.4e38]


@pytest.fixture(params=COUNTERS)
def way(request, monkeypatch):
    """Counts on the CPU in each of the ways that there are."""
    monkeypatch.setitem(_counting._COUNT, "cpu", COUNTERS[request.param])


def counted(*tensors):
    tally = Tally()
    for each in tensors:
        tally.add("key", each)
    return tally.read().get("key")


def every_format(seed):
    numbers = torch.randn(4000, generator=torch.Generator().manual_seed(seed)) * 10
    return numbers.exp2() * numbers.sign()


@pytest.mark.parametrize("values", [SPECIAL, SPECIAL[5:], [0.0] * 5 + [1.0], [1e-45], [np.inf]])
def test_special_values(way, values):
    assert counted(torch.tensor(values)) == Exponents.of(values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_value_of_a_format(way, dtype):
    size = torch.int8 if "8_" in dtype else torch.int16
    values = torch.arange(-(2**15), 2**15).to(size).view(getattr(torch, dtype))
    assert counted(values) == Exponents.of(values.float().numpy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_wider_formats_are_seen_as_float32(way, dtype):
    values = every_format(0).to(dtype) * (1 + 1e-12)
    assert counted(values) == Exponents.of(values.float().numpy())


def test_several_chunks_and_calls_add_up(way, monkeypatch):
    monkeypatch.setattr(_counting, "_CHUNK", 7)
    parts = [torch.tensor(SPECIAL), every_format(1), torch.zeros(20), torch.zeros(0)]
    assert counted(*parts) == Exponents.of(torch.cat(parts).numpy())


@given(st.lists(st.floats(width=32), max_size=50))
def test_any_values(values):
    for count in COUNTERS.values():
        row = torch.zeros(_counting.WIDTH, dtype=torch.int64)
        count(torch.tensor([*values, 1.0]), row)
        assert _counting.exponents_of(row.tolist()) == Exponents.of([*values, 1.0])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_layouts_and_kinds(way):
    dense = torch.eye(6) * 3
    plain = Exponents.of(np.full(6, 3.0))
    assert counted(dense.to_sparse()) == counted(dense.to_sparse_csr()) == plain
    whole = every_format(2).view(40, 100)
    assert counted(whole.t()[::3, ::2]) == Exponents.of(whole.t()[::3, ::2].numpy())
    assert counted(whole[:, :1].expand(40, 9)) == Exponents.of(whole[:, :1].expand(40, 9).numpy())
    assert counted(torch.complex(dense, dense)) == counted(dense, dense)
    assert counted({"a": [dense, None, 3]}, torch.nn.Parameter(dense)) == counted(dense, dense)
    for other in (torch.arange(3), torch.ones(3, dtype=torch.bool), torch.ones(2, device="meta")):
        assert counted(other) is None


def test_more_than_fits_a_block_of_the_kernel(way):
    values = torch.cat([every_format(4), torch.tensor(SPECIAL)] * 3)
    for some in (values, values[:4096], values[: 2 * 4096 + 1]):
        assert counted(some) == Exponents.of(some.numpy())


def test_small_tensors_do_not_lead_to_a_kernel_being_built(undecided):
    assert counted(torch.ones(LARGE - 1)).total == LARGE - 1
    assert not kernel.cache_info().currsize
    assert counted(torch.ones(LARGE)).total == LARGE
    assert kernel.cache_info().currsize


def test_flushed_subnormals_count_as_what_they_are(way):
    values = torch.tensor([1e-40, 1.0])
    torch.set_flush_denormal(True)
    try:
        assert counted(values).lowest == -133
    finally:
        torch.set_flush_denormal(False)


def test_many_keys_get_rows_of_their_own():
    tally = Tally()
    for power in range(-100, 100):
        tally.add(power, torch.tensor([2.0**power]))
    assert tally.read() == {power: Exponents.of([2.0**power]) for power in range(-100, 100)}
    tally.clear()
    assert tally.read() == {}
    tally.add(0, torch.tensor([1.0]))
    assert tally.read() == {0: Exponents.of([1.0])}


def test_autograd_sees_nothing(way):
    values = torch.ones(3, requires_grad=True)
    counted(values)
    assert values._version == 0
    (values * 2).sum().backward()


def test_within_transforms(way):
    tally = Tally()
    torch.func.vmap(lambda each: tally.add("each", each) or each)(torch.ones(3, 2))
    assert tally.read()["each"].numbers == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_nothing_waits_for_the_device():
    values = torch.cat([torch.tensor(SPECIAL), every_format(3)])
    tally, there = Tally(), values.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tally.add("key", there)
        tally.add("key", there.half())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = Exponents.of(values.numpy()) + Exponents.of(values.half().float().numpy())
    assert tally.read()["key"] == expected


def test_what_is_taken_is_read_later_and_leaves_nothing():
    tally = Tally()
    tally.add("first", torch.tensor([1.0, 0.0]))
    taken = tally.take()
    tally.add("second", torch.tensor([2.0]))
    expected = {"first": Exponents.of([1.0, 0.0])}
    assert taken.read() == expected
    taken.pack()
    assert taken.read() == expected
    assert tally.read() == {"second": Exponents.of([2.0])}
