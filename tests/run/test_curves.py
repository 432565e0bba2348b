"""The test of loss curves: how often it is wrong, what it finds, and where it says nothing."""

import math
import random

import pytest

from halfstep.launch import RunResult
from halfstep.run import Summary, verdict
from halfstep.run._curves import LEVEL, curves_apart

STEPS = 120


def curves(generator, seeds, change=lambda step: 0.0):
    """Falling losses with noise of each step, and of each seed."""
    return [one(generator, change) for _ in range(seeds)]


def one(generator, change):
    own = generator.gauss(0, 0.05)
    steps = range(STEPS)
    return [2 / (1 + n) ** 0.3 + own + change(n) + generator.gauss(0, 0.1) for n in steps]


def told(seeds, change, trials):
    generator = random.Random(3)
    pairs = ((curves(generator, seeds), curves(generator, seeds, change)) for _ in range(trials))
    return sum(curves_apart(*pair).chance <= LEVEL for pair in pairs)


@pytest.mark.parametrize(("seeds", "most"), [(4, 12), (5, 16)])
def test_curves_of_one_kind_are_told_apart_as_rarely_as_it_says(seeds, most):
    # 200 trials at 0.029 and 0.05: more than that has a chance below one in 100.
    assert told(seeds, lambda step: 0.0, 200) <= most


def test_a_shift_of_the_whole_curve_is_found():
    assert told(5, lambda step: 0.2, 20) >= 18


def test_a_bump_on_the_way_is_found_where_it_is():
    generator = random.Random(5)
    bump = curves(generator, 5, lambda step: 0.5 if 48 <= step < 60 else 0.0)
    found = curves_apart(curves(generator, 5), bump)
    assert (found.place, found.chance <= LEVEL) == ("40 to 50 %", True)


def test_the_same_seeds_under_both_are_no_further_apart_than_chance():
    first = curves(random.Random(7), 4)
    other = [[loss + 1e-3 for loss in curve] for curve in first]
    assert curves_apart(first, other).chance > 0.5


def test_many_seeds_are_dealt_out_at_random_but_the_same_each_time():
    generator = random.Random(9)
    first, other = curves(generator, 8), curves(generator, 8, lambda step: 0.3)
    found = curves_apart(first, other)
    assert found == curves_apart(first, other)
    assert found.chance < 0.01


def test_runs_of_different_lengths_are_compared_by_their_parts():
    generator = random.Random(11)
    first = curves(generator, 4)
    assert curves_apart(first, [curve[::2] for curve in curves(generator, 4)]).chance > LEVEL


@pytest.mark.parametrize(
    ("firsts", "others"),
    [
        ([[1.0] * 20] * 4, [[1.0] * 20] * 4),  # it seeds itself
        ([[float(n)] * 20 for n in range(3)], [[9.0] * 20] * 3),
        ([[float(n)] * 9 for n in range(4)], [[9.0] * 9] * 4),
        ([[float(n)] * 20 for n in range(4)], [[math.inf] * 20] * 4),
        ([], []),
    ],
)
def test_where_nothing_can_be_told(firsts, others):
    assert curves_apart(firsts, others) is None


def summary(policy, losses):
    fields = {"steps": STEPS, "optimizer_steps": STEPS, "step_seconds": (0.1, 0.1)}
    runs = [
        RunResult(policy=policy, seed=seed, losses=tuple(each), **fields)
        for seed, each in enumerate(losses)
    ]
    return Summary(policy, tuple(runs))


def test_the_verdict_keeps_a_policy_whose_rival_trains_worse_on_the_way():
    generator = random.Random(5)
    first = summary("float32", curves(generator, 5))
    worse = curves(generator, 5, lambda step: 0.5 if 48 <= step < 60 else 0.0)
    text = verdict(first, summary("bf16", worse))
    assert text.startswith("keep float32: final loss within run-to-run noise")
    assert "loss worse by" in text
    assert "from 40 to 50 % of the run, beyond chance (p = 0.0079, 5 seeds)" in text


def test_the_verdict_says_that_curves_are_alike():
    generator = random.Random(5)
    first, other = (summary(name, curves(generator, 5)) for name in ("float32", "bf16"))
    assert "loss curves no further apart than by chance (p = " in verdict(first, other)
