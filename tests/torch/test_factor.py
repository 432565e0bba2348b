"""The factor of a region: what is chosen without waiting for a device is what the host chooses."""

from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from halfstep.core import LossScale
from halfstep.torch._regions import _factor
from halfstep.torch._regions._factor import choose
from halfstep.torch._regions._state import fresh, settled

CPU = torch.device("cpu")
RULES = st.builds(
    LossScale.dynamic,
    init_scale=st.sampled_from([1.0, 24.0, 2.0**16]),
    growth_factor=st.sampled_from([1.0, 1.5, 2.0]),
    backoff_factor=st.sampled_from([0.75, 0.5]),
    growth_interval=st.integers(1, 3),
    min_scale=st.sampled_from([2.0**-16, 1.0]),
    max_scale=st.sampled_from([2.0**16, 2.0**18, torch.finfo(torch.float32).max]),
    hysteresis=st.integers(1, 3),
) | st.builds(LossScale.static, st.sampled_from([1.0, 1000.0]))
SIZES = st.sampled_from([1e-45, 1e-38, 1e-20, 0.1, 1.0, 1.5, 3e38, torch.inf, torch.nan])
# What enters in a pass, and whether what leaves is finite.
PASSES = st.lists(
    st.tuples(SIZES | st.floats(2.0**-20, 2.0**20, width=32), st.booleans()), max_size=40
)
# Longer than it takes to make a scale a proven one, with overflows before and after.
LONG = [(1.0, False)] * 2 + [(1.0, True)] * 20 + [(1.0, False)] * 3 + [(torch.nan, False)]


def driven(rule, passes, device=CPU, waiting=True):
    """Runs passes, on the host if that may wait for the device; returns all that was chosen."""
    cells, seen = fresh(rule.init(), device), []
    with mock.patch.object(_factor, "is_tracing", return_value=not waiting):
        for size, finite in passes:
            gradients = [torch.tensor([size], device=device), torch.zeros(2, device=device)]
            factors = choose(cells, str(rule), gradients, None)
            cells.found.fill_(0.0 if finite else 1.0)
            seen.append([*map(float, factors), *map(float, cells), *settled(cells, rule)])
    return torch.tensor(seen, dtype=torch.float64)


@given(RULES, PASSES)
@example(LossScale.dynamic(), LONG)
@example(LossScale.dynamic(growth_interval=1), LONG * 2)
@example(LossScale.dynamic(hysteresis=2, min_scale=4096.0), LONG)
def test_the_device_chooses_like_the_host(rule, passes):
    assert torch.equal(driven(rule, passes), driven(rule, passes, waiting=False))


@pytest.mark.parametrize("count", [1, 3])
def test_zeros_are_scaled_as_the_host_would(count):
    passes = [(0.0, True)] * count + [(1.0, True)]
    rule = LossScale.dynamic()
    assert torch.equal(driven(rule, passes), driven(rule, passes, waiting=False))


@given(st.floats(2.0**-90, 2.0**90, width=32), st.sampled_from([1.0, 1000.0, 2.0**16]))
def test_what_enters_is_brought_just_below_the_scale_by_a_power_of_two(size, scale):
    factor, inverse = choose(
        fresh(LossScale.static(scale).init(), CPU),
        f"static({scale})",
        [torch.tensor([size / 2, -size / 2])],
        None,
    )
    assert factor * inverse == 1.0
    assert torch.frexp(factor).mantissa == 0.5
    assert scale / 4 < size * factor < scale


def sparse():
    """Returns a gradient with an index that is there twice, with the values 1, 1 and 2."""
    layer = torch.nn.Embedding(3, 1, sparse=True)
    layer(torch.tensor([0, 0, 1])).backward(torch.tensor([[1.0], [1.0], [2.0]]))
    return layer.weight.grad


@pytest.mark.parametrize("waiting", [True, False])
@pytest.mark.parametrize(
    "gradients",
    [
        [torch.ones(4)],
        [torch.ones(2), -torch.ones(2)],
        [torch.full((4,), 1.0, dtype=torch.float16)],
        [torch.full((4,), 1.0, dtype=torch.float64)],
        [torch.tensor([1 + 1j, -1 - 1j])],
        [sparse()],
        [torch.ones(2, 2), torch.ones(0)],
    ],
    ids=["one", "two", "half", "double", "complex", "sparse", "empty"],
)
def test_the_magnitudes_of_all_that_enters_are_summed(gradients, waiting):
    cells = fresh(LossScale.static(1024.0).init(), CPU)
    with mock.patch.object(_factor, "is_tracing", return_value=not waiting):
        factor, inverse = choose(cells, "static(1024.0)", gradients, None)
    assert (factor.item(), inverse.item()) == (128.0, 1 / 128)


@pytest.mark.parametrize("waiting", [True, False])
def test_half_gradients_are_summed_beyond_half(waiting):
    cells = fresh(LossScale.static(1.0).init(), CPU)
    with mock.patch.object(_factor, "is_tracing", return_value=not waiting):
        factor, _ = choose(cells, "static(1.0)", [torch.full((4,), 6e4).half()], None)
    assert factor.item() == 2.0**-18
    assert not cells.foreign


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rule", [LossScale.dynamic(), LossScale.dynamic(growth_interval=2)], ids=str
)
def test_a_real_device_chooses_like_the_host(rule):
    passes = LONG + [(size, True) for size in (0.0, 1e-45, 1e-38, 1e-20, 1.5, 3e38)] + LONG
    device = torch.device("cuda")
    assert torch.equal(driven(rule, passes), driven(rule, passes, device))
