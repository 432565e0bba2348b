"""Calls that take turns, with a clock that they move on themselves."""

import math

import pytest

from halfstep.core import Entry, Race, begun

FORMATS = ("float32", "bfloat16", "float16")


class Clock:
    def __init__(self):
        self.now, self.calls = 0.0, []

    def __call__(self):
        return self.now

    def taking(self, entry, first, *later):
        """Returns a call that takes a time at first, and then others, the last one for good."""
        left = [first, *later]

        def call():
            self.calls.append(entry)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


@pytest.fixture
def clock():
    return Clock()


def entries(*families):
    return [Entry(family, "large", dtype) for family in families for dtype in FORMATS]


def raced(clock, calls, limit=2.0):
    return Race(calls, clock=clock, limit=limit).times()


def test_the_shortest_reading_counts_and_the_first_call_does_not(clock):
    wide, low, half = entries("matmul")
    calls = {
        wide: clock.taking(wide, 0.5, 0.003, 0.001, 0.002),
        low: clock.taking(low, 0.0001, 0.004),
        half: clock.taking(half, 0.2, 0.002),
    }
    (times,) = raced(clock, calls)
    assert (times.family, times.size) == ("matmul", "large")
    assert (times.float32, times.bfloat16, times.float16) == pytest.approx((0.001, 0.004, 0.002))


def test_calls_take_turns(clock):
    calls = {each: clock.taking(each, 0.001) for each in entries("matmul")}
    raced(clock, calls)
    wide, low, half = calls
    rounds = clock.calls.count(low) - 1
    assert rounds >= 3
    assert clock.calls == [wide, *[low, *[wide, low] * rounds], *[half, *[wide, half] * rounds]]


def test_what_is_far_too_slow_is_not_called_again(clock):
    wide, low, half = entries("matmul")
    calls = {
        wide: clock.taking(wide, 0.001),
        low: clock.taking(low, 0.003),
        half: clock.taking(half, 0.05),
    }
    (times,) = raced(clock, calls)
    assert times.ratio("float16") == pytest.approx(50.0)
    assert clock.calls.count(half) == 2
    assert clock.calls.count(low) == 7
    assert clock.calls.count(wide) > 10


def test_something_short_is_not_judged_by_one_reading(clock):
    """It may have been the machine, which did something else."""
    wide, low = entries("matmul")[:2]
    calls = {wide: clock.taking(wide, 0.0001), low: clock.taking(low, 0.001, 0.015, 0.0001)}
    (times,) = raced(clock, calls)
    assert times.ratio("bfloat16") == pytest.approx(1.0)


def test_a_format_without_a_kernel_is_not_known(clock):
    wide, low, half = entries("matmul")

    def fail():
        raise RuntimeError('"addmm_impl_cpu_" not implemented')

    calls = {wide: clock.taking(wide, 0.001), low: fail, half: clock.taking(half, 0.001)}
    (times,) = raced(clock, calls)
    assert math.isinf(times.bfloat16)
    assert times.ratio("float16") == pytest.approx(1.0)


def test_the_limit_holds_for_everything_but_a_call_that_has_begun(clock):
    calls = {each: clock.taking(each, 0.3) for each in entries("matmul", "convolution")}
    found = raced(clock, calls)
    assert clock.now <= 2.0 + 0.3
    assert all(math.isinf(each.ratio("bfloat16")) for each in found)


def test_what_comes_first_leaves_time_for_what_comes_later(clock):
    calls = {each: clock.taking(each, 0.02) for each in entries("matmul", "convolution")}
    found = raced(clock, calls)
    assert [each.ratio("bfloat16") for each in found] == pytest.approx([1.0, 1.0])
    assert clock.now <= 2.0 + 0.02


def test_a_device_is_waited_for(clock):
    """Calls return at once, and what they began is over after the wait."""
    left = []

    def wait():
        clock.now += 0.001 * len(left)
        left.clear()

    calls = {each: lambda: left.append(1) for each in entries("matmul")}
    (times,) = Race(calls, wait, clock).times()
    assert (times.float32, times.float16) == pytest.approx((0.001, 0.001))


def test_what_has_begun_was_called_once_whatever_it_raises():
    called = []

    def fail():
        called.append("fail")
        raise RuntimeError("no kernel")

    wide, low = entries("matmul")[:2]
    calls = {wide: lambda: called.append("wide"), low: fail}
    assert begun(calls) is calls
    assert sorted(called) == ["fail", "wide"]
