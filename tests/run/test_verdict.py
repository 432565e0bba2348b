import math

import pytest

from halfstep.run import MetricValue, RunResult, Skip, Summary, verdict


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
            "final loss within run-to-run noise (0.2 over 3 seeds)",
        ),
        (
            FIRST,
            summary("bf16", NOISY, speed=9.0),
            "no gain on this machine: keep float32, because bf16 is 1.1x slower and saves no "
            "memory for backward; final loss within run-to-run noise (0.2 over 3 seeds)",
        ),
        (
            FIRST,
            summary("bf16", NOISY, saved=150),
            "no gain on this machine: keep float32, because bf16 is as fast with 50 % more saved "
            "for backward; final loss within run-to-run noise (0.2 over 3 seeds)",
        ),
        (
            FIRST,
            summary("fp16", (2.0, 2.0, 2.0), speed=20.0),
            "keep float32: final loss worse by 0.9, beyond run-to-run noise (0.2 over 3 seeds); "
            "2x faster, as much saved for backward",
        ),
        (
            FIRST,
            summary("fp16", (0.5, 0.5, 0.5), speed=20.0),
            "2x faster, as much saved for backward; "
            "final loss better by 0.6, beyond run-to-run noise (0.2 over 3 seeds)",
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
            "final loss worse by 0.25 (noise unknown: run with --seeds 3)",
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
            "2x faster, as much saved for backward; final loss worse by 0.5 (noise unknown: every "
            "seed gives float32 the same final loss; the script may seed itself)",
        ),
        (
            FIRST,
            summary("fp16", NOISY, speed=None, saved=None, skipped=20),
            "speed unknown (too few steps), bytes saved for backward unknown; final loss within "
            "run-to-run noise (0.2 over 3 seeds); 60 of 300 steps skipped (gradients held inf)",
        ),
        (
            FIRST,
            summary("bf16", NOISY, speed=None),
            "speed unknown (too few steps), as much saved for backward; "
            "final loss within run-to-run noise (0.2 over 3 seeds)",
        ),
        (
            FIRST,
            summary("bf16", NOISY, saved=None),
            "no gain on this machine: keep float32, because bf16 is as fast; "
            "final loss within run-to-run noise (0.2 over 3 seeds)",
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


def test_a_diverged_first_policy_gives_nothing_to_compare_with():
    text = verdict(summary("float32", (math.nan,)), FIRST)
    assert "nothing to compare with: final loss of float32 is not finite" in text


def test_some_failed_runs_are_mentioned():
    good, bad = FIRST.runs[:2], summary("float32", (1.0,), exit_code=1).runs
    assert verdict(FIRST, Summary("bf16", good + bad)).endswith("1 of 3 runs failed")
