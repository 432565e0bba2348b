from halfstep.launch import MetricValue, RunResult
from halfstep.run import summarise
from halfstep.run._summary import mean, spread

TRAINED = {"steps": 10, "losses": (2.0, 1.0), "step_seconds": (0.5, 0.5)}


def test_runs_are_grouped_by_policy_in_the_order_given():
    runs = [RunResult(policy=name, seed=seed) for seed in (0, 1) for name in ("b", "a")]
    assert [(each.policy, len(each.runs)) for each in summarise(runs)] == [("b", 2), ("a", 2)]


def test_only_runs_that_trained_to_the_end_count():
    bad = {"policy": "a", "losses": (9.0,), "step_seconds": (9.0,)}
    runs = [
        RunResult(policy="a", seed=0, **TRAINED),
        RunResult(seed=1, steps=5, exit_code=1, **bad),
        RunResult(seed=2, steps=0, **bad),
    ]
    (summary,) = summarise(runs)
    assert (summary.last_losses, summary.steps, summary.steps_per_second) == ((1.0,), 10, 2.0)
    assert [run.seed for run in summary.failed] == [1]


def test_what_nobody_measured_is_unknown():
    (summary,) = summarise([RunResult(policy="a", seed=0)])
    assert summary.steps_per_second is summary.saved_bytes is summary.peak_memory is None


def test_metrics_that_some_runs_lack():
    metrics = [(MetricValue("x", 1.0, 1),), (MetricValue("y", 2.0, 1), MetricValue("x", 3.0, 1))]
    runs = [RunResult(policy="a", seed=i, metrics=m, **TRAINED) for i, m in enumerate(metrics)]
    (summary,) = summarise(runs)
    assert summary.metric_names == ("x", "y")
    assert (summary.metric("x"), summary.metric("y")) == ((1.0, 3.0), (2.0,))


def test_mean_and_spread_of_nothing():
    assert mean([]) is None
    assert spread([]) == 0.0
