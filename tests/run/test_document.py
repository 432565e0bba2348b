import errno
import json
import os
import stat

import pytest

from halfstep.errors import UsageError
from halfstep.run import Comparison, RunResult, check_writable, document, write_json

RUNS = [
    RunResult(policy="float32", seed=0, steps=2, losses=(2.0, 1.0)),
    RunResult(policy="compute_dtype=float16", seed=0, steps=2, losses=(2.0, float("nan"))),
]
COMPARISON = Comparison("train.py", ("--lr", "1"), ("float32", "compute_dtype=float16"), (0,))


def test_the_document_holds_everything(tmp_path):
    write_json(tmp_path / "out.json", document(COMPARISON, RUNS))
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


def _full(source, target):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path, monkeypatch):
    target = tmp_path / "out.json"
    target.write_text("before")
    with pytest.raises(ValueError, match="JSON"):
        write_json(target, {"value": float("nan")})
    monkeypatch.setattr(os, "replace", _full)
    with pytest.raises(UsageError, match=r"--json needs a file that can be written, .* No space"):
        write_json(target, {})
    assert os.listdir(tmp_path) == ["out.json"]
    assert target.read_text() == "before"


def test_the_file_is_as_readable_as_any_other(tmp_path):
    write_json(tmp_path / "out.json", {})
    (tmp_path / "plain").write_text("")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("out.json", "plain")}
    assert len(modes) == 1


@pytest.mark.parametrize("name", ["", "missing/out.json"])
def test_a_bad_path_is_refused_before_anything_runs(tmp_path, name):
    with pytest.raises(UsageError, match="--json needs a file in a folder that exists"):
        check_writable(tmp_path / name)
    check_writable(tmp_path / "out.json")
