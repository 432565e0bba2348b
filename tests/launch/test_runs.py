import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.launch import MetricValue, RunResult, Skip

FULL = RunResult(
    policy="mixed_float16",
    seed=3,
    exit_code=1,
    error="Traceback",
    steps=3,
    optimizer_steps=4,
    scalers=2,
    losses=(1.0, math.inf),
    step_seconds=(0.5, 0.25),
    measured_step=0,
    skipped=(Skip(2, "gradients held inf"),),
    scale=32768.0,
    metrics=(MetricValue("accuracy", 0.5, 2), MetricValue("accuracy", 0.75, 3)),
    saved_bytes=10,
    peak_memory=20,
    peak_memory_kind="growth of the process",
    seconds=1.5,
    device="cpu",
    date="2026-01-01T00:00:00+00:00",
    versions=(("python", "3.11"), ("torch", "2.13")),
)


@pytest.mark.parametrize("run", [FULL, RunResult(policy="float32", seed=0)])
def test_a_run_comes_back_from_json(run):
    text = json.dumps(run.to_dict(), allow_nan=False)
    assert RunResult.from_dict(json.loads(text)) == run


@given(st.lists(st.floats(allow_nan=False)), st.floats(allow_nan=False) | st.none())
def test_any_numbers_come_back(losses, scale):
    run = RunResult(policy="float32", seed=0, losses=tuple(losses), scale=scale)
    assert RunResult.from_dict(json.loads(json.dumps(run.to_dict(), allow_nan=False))) == run


def test_the_json_is_readable():
    data = FULL.to_dict()
    assert data["losses"] == [1.0, "inf"]
    assert data["skipped"] == [{"step": 2, "reason": "gradients held inf"}]
    assert data["versions"] == {"python": "3.11", "torch": "2.13"}


def test_runs_are_values():
    assert len({FULL, RunResult.from_dict(FULL.to_dict())}) == 1


def test_the_last_value_of_a_metric_counts():
    assert FULL.last_metrics == {"accuracy": 0.75}


@pytest.mark.parametrize(
    ("losses", "last"),
    [((), None), ((3.0,), 3.0), ((3.0, 2.0), 2.0), ((9.0,) * 18 + (2.0, 4.0), 3.0)],
)
def test_the_last_loss_is_the_mean_of_the_last_tenth(losses, last):
    assert RunResult(policy="float32", seed=0, losses=losses).last_loss == last


def test_losses_of_both_infinities_have_no_mean():
    losses = (1.0,) * 18 + (math.inf, -math.inf)
    assert math.isnan(RunResult(policy="float32", seed=0, losses=losses).last_loss)


@pytest.mark.parametrize(
    ("times", "measured", "speed"),
    [
        ((), -1, None),
        ((0.5,), 0, None),
        ((9.0, 0.5), 0, 2.0),
        ((9.0,) * 10 + (0.5, 0.25, 0.125) * 5, -1, 4.0),
        ((0.0, 0.0), -1, None),
    ],
)
def test_speed_leaves_out_the_warm_up_and_the_measured_step(times, measured, speed):
    run = RunResult(policy="float32", seed=0, step_seconds=times, measured_step=measured)
    assert run.steps_per_second == speed


def test_an_error_without_an_exit_code_is_a_failure():
    assert RunResult(policy="float32", seed=0, error="lost").failed
    assert not RunResult(policy="float32", seed=0).failed
