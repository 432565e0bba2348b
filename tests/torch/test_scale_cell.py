import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core import LossScale, ScaleState
from halfstep.torch._scaling._scale_cell import FLOAT32_MAX, ScaleCell, next_on_device

POWERS = st.integers(-8, 8).map(lambda power: 2.0**power)


def started(**settings):
    cell = ScaleCell(LossScale(**settings))
    cell.start(torch.device("cpu"))
    return cell


@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([1.0, 2.0, 4.0]),
    POWERS,
)
def test_the_device_counts_like_the_core(outcomes, interval, hysteresis, growth, scale):
    rule = LossScale(
        init_scale=scale,
        growth_interval=interval,
        hysteresis=hysteresis,
        growth_factor=growth,
        min_scale=2.0**-9,
        max_scale=2.0**9,
    )
    state = rule.init()
    tensors = tuple(torch.tensor(value) for value in state)
    for finite in outcomes:
        state = rule.next(state, finite=finite)
        tensors = next_on_device(rule, tensors, torch.tensor(not finite))
        assert ScaleState(*[tensor.item() for tensor in tensors]) == state


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_advancing_on_the_device(hysteresis):
    cell = started(init_scale=8.0, growth_interval=2, hysteresis=hysteresis)
    good, bad = torch.tensor(0.0), torch.tensor(1.0)
    for found in (good, bad, bad, good, good):
        cell.advance_on_device(found, None)
    assert cell.read().scale == {1: 4.0, 2: 8.0}[hysteresis]
    cell.advance_on_device(bad, torch.tensor(True))
    assert cell.read().scale == {1: 4.0, 2: 8.0}[hysteresis]


def test_what_is_not_started_is_read_and_set_without_tensors():
    cell = ScaleCell(LossScale(init_scale=8.0))
    assert cell.read() == ScaleState(8.0)
    cell.put(ScaleState(4.0, 3))
    cell.start(torch.device("cpu"))
    assert (cell.scale.item(), cell.tracker.item()) == (4.0, 3)


def test_writes_from_outside_are_noticed():
    cell = started(init_scale=8.0)
    cell.scale.fill_(2.0)
    cell.tracker = torch.tensor(7)
    assert cell.known() == ScaleState(2.0, 7)


def test_the_host_remembers_only_its_own_writes():
    cell = started(init_scale=8.0)
    assert cell._written == cell._marks()
    cell.scale.fill_(2.0)
    assert cell._written != cell._marks()
    cell._remember(ScaleState(2.0))
    cell.scale = torch.tensor(2.0)
    assert cell._written != cell._marks()


def test_no_overflow_raises_a_scale_below_the_floor():
    cell = started(init_scale=8.0, min_scale=4.0)
    cell.scale.fill_(2.0)
    cell.advance_on_device(torch.tensor(1.0), None)
    assert cell.read().scale == 2.0


def test_the_inverse_is_finite():
    for scale, inverse in ((4.0, 0.25), (1e-42, FLOAT32_MAX), (0.0, FLOAT32_MAX)):
        cell = started()
        cell.scale.fill_(scale)
        assert cell.inverse().item() == inverse


def test_a_cap_lowers_and_never_raises():
    cell = started(init_scale=8.0)
    assert cell.cap(16.0) is None
    assert cell.cap(4.0) == (8.0, 4.0)
    assert cell.read().scale == 4.0


def test_a_copy_starts_from_the_same_state():
    cell = started(init_scale=8.0, hysteresis=2)
    cell.put(ScaleState(4.0, 3, 1))
    again = pickle.loads(pickle.dumps(cell))
    assert (again.rule, again.read()) == (cell.rule, ScaleState(4.0, 3, 1))
    assert again.scale is None
