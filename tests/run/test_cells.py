from halfstep.run import MetricValue, RunResult, Skip, summarise, table_rows

RUNS = [
    RunResult(
        policy=policy,
        seed=seed,
        steps=20,
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
