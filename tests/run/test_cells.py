from dataclasses import replace

from halfstep.launch import MetricValue, RunResult, Skip
from halfstep.run import summarise, table_rows
from halfstep.run._cells import _OWN_ROWS

RUNS = [
    RunResult(
        policy=policy,
        seed=seed,
        steps=20,
        optimizer_steps=20,
        losses=tuple(2.0 - 0.05 * step + 0.1 * seed for step in range(20)),
        step_seconds=(0.1 / factor,) * 19,
        scale=1024.0 * factor * (1 + seed),
        skipped=(Skip(1, "inf"),) if factor == 2 else (),
        saved_bytes=4096 // factor,
        peak_memory=2**20,
        metrics=(MetricValue("accuracy", 0.9 + 0.01 * seed, 20),),
    )
    for seed in (0, 1)
    for policy, factor in (("float32", 1), ("mixed_float16", 2))
]


def test_cells_of_the_first_policy_and_of_another_one():
    first, other = table_rows(summarise(RUNS))
    assert dict(first.cells) == {
        "first loss": "2.05",
        "last loss": "1.125 ± 0.05",
        "loss curve": "█▇▇▆▆▅▄▄▃▂▂▁",
        "accuracy": "0.905 ± 0.005",
        "steps/s": "10",
        "peak memory": "1 MiB",
        "saved for backward": "4 KiB",
        "skipped": "0 of 40",
        "last scale": "1024 to 2048",
    }
    assert other.cells["steps/s"] == "20 (2.00x)"
    assert other.cells["saved for backward"] == "2 KiB (0.50x)"
    assert other.cells["skipped"] == "2 of 40"
    assert other.cells["loss curve"] == first.cells["loss curve"]


def test_curves_share_the_first_policys_scale():
    low = RunResult(policy="low", seed=0, steps=2, losses=(1.0, 0.5))
    high = RunResult(policy="high", seed=0, steps=2, losses=(3.0, 2.0))
    curves = [row.cells["loss curve"] for row in table_rows(summarise([low, high]))]
    assert curves == ["█▁", "██"]


def test_a_policy_without_a_result_has_empty_cells():
    rows = table_rows(summarise([RUNS[0], RunResult(policy="other", seed=0, exit_code=1)]))
    assert set(rows[1].cells.values()) == {""}


def test_ascii_only():
    assert all(
        cell.isascii()
        for row in table_rows(summarise(RUNS), ascii_only=True)
        for cell in row.cells.values()
    )


def test_a_metric_that_is_called_like_a_row_gets_a_row_of_its_own():
    names = ("last loss", "last loss (metric)", "policy", "skipped")
    metrics = tuple(MetricValue(name, float(i), 1) for i, name in enumerate(names))
    (row,) = table_rows([*summarise([replace(RUNS[0], metrics=metrics)])])
    own = table_rows(summarise(RUNS[:1]))[0].cells
    assert {name: row.cells[name] for name in own if name != "accuracy"} == {
        name: text for name, text in own.items() if name != "accuracy"
    }
    assert row.cells["last loss (metric) (metric)"] == "0"
    assert row.cells["last loss (metric)"] == "1"
    assert (row.cells["policy (metric)"], row.cells["skipped (metric)"]) == ("2", "3")


def test_the_names_of_the_own_rows_are_all_reserved():
    (row,) = table_rows(summarise([replace(RUNS[0], metrics=())]))
    assert {*row.cells, "policy"} == _OWN_ROWS
