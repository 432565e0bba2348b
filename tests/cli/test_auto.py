"""`halfstep run` and `compare` by `auto`, with a file that says what the device is fast in."""

import json

import pytest

from halfstep.core import Chosen, FamilyTimes
from halfstep.launch import RunResult
from tests.cli.test_run import LOOP, MODEL, PLAIN, SAVE, finished, result, run
from tests.launch.scripts import write

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

PREPARED = """
from halfstep.torch import prepare
prepare(model, optimizer, policy="mixed_float16")
"""


@pytest.fixture
def fast_in(tmp_path, monkeypatch):
    """Writes the file of this processor: how long bfloat16 takes where float32 takes a second."""
    from halfstep.torch._auto import here

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    folder = tmp_path / "caches" / "halfstep"
    folder.mkdir(mode=0o700, parents=True)

    def write_file(seconds):
        times = (FamilyTimes("matmul", "small", 1.0, seconds, 30.0),)
        Chosen(lambda: folder).policy(here(torch.device("cpu")), lambda: times)

    return write_file


def test_it_is_the_default_and_says_what_it_chose(tmp_path, fast_in):
    fast_in(0.5)
    told = run(tmp_path, MODEL + LOOP).stderr
    assert "  policy              auto: mixed_bfloat16 (chosen for this device; --policy" in told
    assert "  why                 auto chose mixed_bfloat16 on " in told
    trained = result(tmp_path, MODEL + LOOP)
    assert (trained.policy, trained.auto) == ("auto", ("mixed_bfloat16",))
    assert (trained.regions, trained.region_policies) == (1, ("mixed_bfloat16",))
    assert trained.lowered


def test_where_nothing_is_gained_it_is_plain_python(tmp_path, fast_in):
    fast_in(2.0)
    done = run(tmp_path, MODEL + LOOP + SAVE, "--policy", "auto", args=["ours.pt"])
    finished([*PLAIN, "train.py", "plain.pt"], tmp_path)
    assert "  policy              auto: float32\n" in done.stderr
    ours, plain = (torch.load(tmp_path / name) for name in ("ours.pt", "plain.pt"))
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_the_policies_of_a_script_count_unless_it_is_asked_for(tmp_path, fast_in):
    fast_in(0.5)
    script = MODEL + PREPARED + LOOP
    assert result(tmp_path, script).region_policies == ("mixed_float16",)
    assert result(tmp_path, script, "--policy", "auto").region_policies == ("mixed_bfloat16",)


def test_it_can_be_compared(tmp_path, fast_in):
    fast_in(0.5)
    write(tmp_path / "train.py", MODEL + LOOP)
    options = ["--policy", "float32", "--policy", "auto", "--json", "out.json"]
    done = finished([*PLAIN, "-m", "halfstep", "compare", *options, "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "out.json").read_text())
    assert [(each["name"], each["policy"]) for each in data["policies"]] == [
        ("float32", "float32"),
        ("auto", "mixed_bfloat16"),
    ]
    assert RunResult.from_dict(data["runs"][1]).auto == ("mixed_bfloat16",)
