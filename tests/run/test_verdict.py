import math
from dataclasses import replace

import pytest

from halfstep.launch import MetricValue, RunResult, Skip
from halfstep.run import Summary, verdict


def summary(policy, losses=(1.0,), *, speed=10.0, saved=100, skipped=0, accuracy=(), **fields):
    runs = []
    for seed, loss in enumerate(losses):
        metrics = tuple(MetricValue("accuracy", value, 9) for value in accuracy[seed : seed + 1])
        measured = {} if speed is None else {"step_seconds": (1 / speed,) * 2}
        values = {
            "steps": 100,
            "optimizer_steps": 100,
            "losses": (9.0, loss),
            "saved_bytes": saved,
            "metrics": metrics,
        }
        values |= {"skipped": (Skip(1, "gradients held inf"),) * skipped} | measured | fields
        runs.append(RunResult(policy=policy, seed=seed, **values))
    return Summary(policy, tuple(runs))


NOISY = (1.0, 1.1, 1.2)
FIRST = summary("float32", NOISY)
ACCURATE = summary("float32", NOISY, accuracy=(0.970, 0.972, 0.971))


@pytest.mark.parametrize(
    ("first", "other", "text"),
    [
        (
            ACCURATE,
            summary("bf16", NOISY, speed=9.0, saved=62, accuracy=(0.971, 0.971, 0.972)),
            "1.1x slower, 38 % less saved for backward; "
            "accuracy within run-to-run noise (0.2 points over 3 seeds)",
        ),
        (
            FIRST,
            summary("bf16", (1.05, 1.15, 1.25), speed=19.0, saved=50),
            "1.9x faster, 50 % less saved for backward; "
            "final loss within run-to-run noise (18 % over 3 seeds)",
        ),
        (
            FIRST,
            summary("bf16", NOISY, speed=9.0),
            "no gain on this machine: keep float32, because bf16 is 1.1x slower and saves no "
            "memory for backward; final loss within run-to-run noise (18 % over 3 seeds)",
        ),
        (
            FIRST,
            summary("bf16", NOISY, saved=150),
            "no gain on this machine: keep float32, because bf16 is as fast with 50 % more saved "
            "for backward; final loss within run-to-run noise (18 % over 3 seeds)",
        ),
        (
            FIRST,
            summary("fp16", (2.0, 2.0, 2.0), speed=20.0),
            "keep float32: final loss worse by 82 %, beyond run-to-run noise (18 % over 3 seeds); "
            "2x faster, as much saved for backward",
        ),
        (
            FIRST,
            summary("fp16", (0.5, 0.5, 0.5), speed=20.0),
            "2x faster, as much saved for backward; "
            "final loss better by 55 %, beyond run-to-run noise (18 % over 3 seeds)",
        ),
        (
            FIRST,
            summary("fp16", (1.0, math.nan, math.inf), speed=20.0),
            "keep float32: final loss is not finite in 2 of 3 runs; "
            "2x faster, as much saved for backward",
        ),
        (
            summary("float32", (1.0,)),
            summary("bf16", (1.25,), speed=20.0),
            "2x faster, as much saved for backward; "
            "final loss worse by 25 % (noise unknown: run with --seeds 3)",
        ),
        (
            summary("float32", (1.0,)),
            summary("bf16", (1.0,), speed=20.0),
            "2x faster, as much saved for backward; "
            "the same final loss (noise unknown: run with --seeds 3)",
        ),
        (
            summary("float32", (1.0, 1.0)),
            summary("bf16", (1.5, 1.5), speed=20.0),
            "2x faster, as much saved for backward; final loss worse by 50 % (noise unknown: every "
            "seed gives float32 the same final loss; the script may seed itself)",
        ),
        (
            FIRST,
            summary("fp16", NOISY, speed=None, saved=None, skipped=20),
            "speed unknown (too few steps), bytes saved for backward unknown; final loss within "
            "run-to-run noise (18 % over 3 seeds); 60 of 300 steps skipped (gradients held inf)",
        ),
        (
            FIRST,
            summary("bf16", NOISY, speed=None),
            "speed unknown (too few steps), as much saved for backward; "
            "final loss within run-to-run noise (18 % over 3 seeds)",
        ),
        (
            FIRST,
            summary("bf16", NOISY, saved=None),
            "no gain on this machine: keep float32, because bf16 is as fast; "
            "final loss within run-to-run noise (18 % over 3 seeds)",
        ),
        (FIRST, summary("fp16", exit_code=1), "failed in 1 of 1 runs"),
        (FIRST, summary("fp16", steps=0), "no training step was seen"),
        (summary("float32", exit_code=1), FIRST, "nothing to compare with: float32 gave no result"),
    ],
)
def test_words(first, other, text):
    assert verdict(first, other) == text


def test_a_metric_of_unknown_direction_is_never_called_worse_but_keeps_float32():
    def with_metric(policy, values):
        runs = [
            RunResult(policy=policy, seed=i, steps=9, metrics=(MetricValue("width", value, 9),))
            for i, value in enumerate(values)
        ]
        return Summary(policy, tuple(runs))

    text = verdict(with_metric("float32", [1.0, 1.5]), with_metric("bf16", [9.0, 9.0]))
    assert text.startswith("keep float32: width higher by 7.8, beyond run-to-run noise")


BROKEN = (math.nan, 1.0, math.inf)


@pytest.mark.parametrize(
    ("first", "other", "text"),
    [
        (
            summary("float32", BROKEN),
            FIRST,
            "nothing to compare with: final loss is not finite in 2 of 3 runs of float32",
        ),
        (
            summary("float32", BROKEN),
            summary("fp16", BROKEN),
            "nothing to compare with: final loss is not finite in 2 of 3 runs of float32 "
            "and in 2 of 3 here",
        ),
        (
            ACCURATE,
            summary("fp16", BROKEN, accuracy=(0.970, 0.972, 0.971)),
            "accuracy within run-to-run noise (0.2 points over 3 seeds); "
            "final loss is not finite in 2 of 3 runs",
        ),
        (
            summary("float32", BROKEN, accuracy=(0.1, 0.1, 0.1)),
            summary("fp16", BROKEN, accuracy=(0.1, 0.1, 0.1)),
            "the same accuracy; nothing to compare with: final loss is not finite in 2 of 3 "
            "runs of float32 and in 2 of 3 here",
        ),
        (
            summary("float32", NOISY, accuracy=(math.nan,) * 3),
            summary("fp16", NOISY, accuracy=(math.nan,) * 3),
            "nothing to compare with: accuracy is not finite in 3 of 3 runs of float32 "
            "and in 3 of 3 here",
        ),
        (
            FIRST,
            Summary("fp16", tuple(replace(run, losses=(math.nan, *NOISY)) for run in FIRST.runs)),
            "; 3 of 12 losses of fp16 not finite",
        ),
        (
            Summary("float32", tuple(replace(run, losses=(math.inf, 1.0)) for run in FIRST.runs)),
            FIRST,
            "; 3 of 6 losses of float32 not finite",
        ),
        (
            FIRST,
            summary("fp16", BROKEN, exit_code=1),
            "failed in 3 of 3 runs, with a loss that is not finite in 2",
        ),
        (
            summary("float32", exit_code=1),
            Summary("fp16", tuple(replace(run, losses=(math.inf, 1.0)) for run in FIRST.runs)),
            "nothing to compare with: float32 gave no result; 3 of 6 losses of fp16 not finite",
        ),
    ],
)
def test_a_loss_that_is_not_finite_is_named(first, other, text):
    assert text in verdict(first, other)


def test_a_broken_loss_keeps_the_first_policy_whatever_the_metric_says():
    other = summary("fp16", BROKEN, speed=99.0, accuracy=(0.970, 0.972, 0.971))
    assert verdict(ACCURATE, other).startswith("keep float32: ")


def test_some_failed_runs_are_mentioned():
    good, bad = FIRST.runs[:2], summary("float32", (1.0,), exit_code=1).runs
    assert verdict(FIRST, Summary("bf16", good + bad)).endswith("1 of 3 runs failed")


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ((9e11, 9e11 + 32768), "the same final loss to 5 digits (noise"),
        ((0.25, 0.25 + 1e-6), "the same final loss to 5 digits (noise"),
        ((0.25, 0.2501), "final loss worse by 0.04 % (noise"),
        ((-100.0, -101.0), "final loss better by 1 % (noise"),
        ((0.001, 0.5), "final loss worse by 0.5 (noise"),
        ((0.5, -0.5), "final loss better by 1 (noise"),
        ((0.0, 0.0), "the same final loss (noise"),
        ((0.0, 1e-6), "final loss worse by 1e-06 (noise"),
    ],
)
def test_a_difference_comes_in_a_unit_that_says_something(losses, text):
    first, other = losses
    assert f"; {text}" in verdict(summary("float32", (first,)), summary("bf16", (other,), speed=20))


def test_a_difference_that_is_none_in_five_digits_keeps_nobody_from_a_policy():
    first = summary("float32", (1.0, 1.0 + 1e-9, 1.0 - 1e-9))
    text = verdict(first, summary("bf16", (1 + 1e-7,) * 3, speed=20.0))
    assert text == "2x faster, as much saved for backward; the same final loss to 5 digits"
    text = verdict(first, summary("bf16", first.last_losses, speed=20.0))
    assert text.endswith("final loss within run-to-run noise (none in 5 digits over 3 seeds)")


def test_a_policy_that_did_not_take_effect():
    without = summary("mixed_float16", NOISY, lowered=False)
    text = verdict(FIRST, without)
    assert text == (
        "did not take effect, because no model became a region: everything ran in the script's own "
        "formats, as under plain Python"
    )
    assert verdict(without, FIRST) == f"nothing to compare with: mixed_float16 {text}"
    own = summary("mixed_float16", NOISY, lowered=False, regions=1, region_policies=("float32",))
    assert "the script prepares its models with the policy float32" in verdict(FIRST, own)
    for effect in ({"lowered": True}, {"lowered": None}, {"region_policies": ("mixed_bfloat16",)}):
        values = {"lowered": False} | effect
        assert "effect" not in verdict(FIRST, summary("mixed_float16", NOISY, **values))
    assert "effect" not in verdict(FIRST, summary("float32", NOISY, lowered=False))
    scaled = "compute_dtype=float32,scale=static(8.0)"
    assert "effect" not in verdict(FIRST, summary(scaled, NOISY, lowered=False))


def test_nothing_to_judge_agreement_by():
    first, other = (summary(policy, losses=(1.0,)) for policy in ("float32", "bf16"))
    silent = [Summary(each.policy, (replace(each.runs[0], losses=()),)) for each in (first, other)]
    text = verdict(*silent)
    assert text.endswith(
        "; agreement unknown: neither a loss nor a metric was seen; report one with halfstep.metric"
    )


def test_a_loop_of_keras_that_does_not_scale():
    other = summary("mixed_float16", scale=1.0, versions=(("keras", "3.15.1"),))
    assert "; the losses were not scaled, so that small" in verdict(FIRST, other)
    scaled = summary("mixed_float16", scale=2.0, versions=(("keras", "3.15.1"),))
    assert "not scaled" not in verdict(FIRST, scaled)
