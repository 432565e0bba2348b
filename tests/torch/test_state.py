"""The state of a region's scale: what the device counts is what the host counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core import LossScale
from halfstep.torch._regions._state import (
    PROVEN,
    begin_pass,
    begin_pass_on_device,
    fresh,
    numbers,
    overflowed,
    settled,
    settled_on_device,
)

CPU = torch.device("cpu")
RULES = st.builds(
    LossScale.dynamic,
    init_scale=st.sampled_from([1.0, 24.0, 2.0**16]),
    growth_factor=st.sampled_from([1.0, 1.5, 2.0]),
    backoff_factor=st.sampled_from([0.75, 0.5]),
    growth_interval=st.integers(1, 20),
    min_scale=st.sampled_from([2.0**-16, 1.0]),
    max_scale=st.sampled_from([2.0**16, 2.0**18, torch.finfo(torch.float32).max]),
    hysteresis=st.integers(1, 3),
)
# How many passes in a row end in one way: fine, an overflow, or what entered was not finite.
ENDS = st.sampled_from(["", "found", "foreign"])
ROWS = st.lists(st.tuples(st.sampled_from([1, 2, 5, PROVEN + 1]), ENDS), max_size=5)


def ended(cells, how):
    """Lets a pass end in one way."""
    cells.found.fill_(float(how != ""))
    cells.foreign.fill_(float(how == "foreign"))


@given(RULES, ROWS)
def test_the_device_counts_like_the_host(rule, rows):
    host, device = (fresh(rule.init(), CPU) for _ in range(2))
    for count, how in rows:
        for _ in range(count):
            begin_pass(host, rule, 1.0)
            begin_pass_on_device(device, rule, torch.ones(()))
            for cells in (host, device):
                ended(cells, how)
            assert numbers(host) == numbers(device)
            after = torch.tensor(settled(host, rule))
            assert torch.equal(torch.stack(settled_on_device(device, rule)), after)


@given(RULES, st.integers(1, 8))
def test_the_scale_leaps_until_it_is_proven(rule, overflows):
    cells = fresh(rule.init(), CPU)
    for number in range(overflows):
        begin_pass(cells, rule, 1.0)
        ended(cells, "found")
        lowered = rule.init_scale * rule.backoff_factor ** (4 * (number + 1))
        assert settled(cells, rule).scale == pytest.approx(max(lowered, rule.min_scale))


def test_a_proven_scale_is_lowered_step_by_step():
    rule = LossScale.dynamic()
    cells = fresh(rule.init(), CPU)
    for _ in range(PROVEN + 1):
        begin_pass(cells, rule, 1.0)
    assert settled(cells, rule).proof == PROVEN
    ended(cells, "found")
    assert overflowed(cells)
    assert settled(cells, rule).scale == 32768.0


@pytest.mark.parametrize("size", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("begin", ["host", "device"])
def test_what_enters_and_is_not_finite_is_foreign(begin, size):
    rule = LossScale.dynamic()
    cells = fresh(rule.init(), CPU)
    if begin == "host":
        begin_pass(cells, rule, size)
    else:
        begin_pass_on_device(cells, rule, torch.tensor(size))
    cells.found.fill_(1.0)
    assert not overflowed(cells)
    assert settled(cells, rule).scale == rule.init_scale
