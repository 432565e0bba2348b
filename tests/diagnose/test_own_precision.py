"""Scripts with an autocast and a scaler of their own are looked at in these, and mended there."""

import math

import pytest

from tests.cli.doctor_scripts import examined, told
from tests.diagnose.own_scripts import AUTOCASTS, CASES, line_of, script

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("place", "whose"), CASES)
def test_the_remedy_is_for_the_autocast_that_the_script_has(tmp_path, place, whose):
    text = script(place, whose)
    done, report = examined(tmp_path, text)
    where = f"train.py:{line_of(text, AUTOCASTS[whose])}"
    name = "halfstep.torch.autocast" if whose == "ours" else "torch.autocast"
    assert done.returncode == 1
    assert f"float16 by {name} in {where}" in report.policy
    assert report.policy.endswith("(the script's own)")
    assert "mixed_float16" not in done.stdout + done.stderr
    error = next(each for each in report.findings if each.severity == "error")
    assert "outside of every model" not in str(told(report, "error"))
    assert "set_global_policy" not in error.remedy
    assert error.remedy.splitlines()[-1].endswith(where)
    mended = script(place, whose, autocast="lower", remedy=error.remedy)
    done, report = examined(tmp_path, mended)
    assert told(report, "error") == []
    assert all(math.isfinite(step.loss) for step in report.steps)
    assert not report.skipped
