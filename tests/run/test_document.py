import json

from halfstep.launch import RunResult
from halfstep.report import write_json
from halfstep.run import Comparison, document

RUNS = [
    RunResult(policy="float32", seed=0, steps=2, losses=(2.0, 1.0)),
    RunResult(policy="compute_dtype=float16", seed=0, steps=2, losses=(2.0, float("nan"))),
]
COMPARISON = Comparison("train.py", ("--lr", "1"), ("float32", "compute_dtype=float16"), (0,))


def test_the_document_holds_everything(tmp_path):
    write_json(str(tmp_path / "out.json"), document(COMPARISON, RUNS))
    data = json.loads((tmp_path / "out.json").read_text())
    assert (data["format"], data["script"], data["args"]) == (
        "halfstep-compare-1",
        "train.py",
        ["--lr", "1"],
    )
    assert [RunResult.from_dict(run).policy for run in data["runs"]] == list(COMPARISON.policies)
    first, other = data["policies"]
    assert (first["name"], first["policy"], first["verdict"]) == ("float32", "float32", "")
    assert (other["name"], other["policy"]) == ("compute_dtype=float16", "mixed_float16")
    assert "not finite" in other["verdict"]
