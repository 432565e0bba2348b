"""What is said of scripts with a scaler of their own, and of other precisions that they ask for."""

import pytest

from tests.cli.doctor_scripts import examined, told
from tests.diagnose.own_scripts import AUTOCASTS, line_of, sound

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

NATIVE, OURS = "torch.amp.GradScaler", "halfstep.torch.GradScaler"
STEEP = """
class Steep(nn.Module):
    def forward(self, x):
        return (x * 3e5).tanh()
"""
NO_SCALER = "torch.amp.GradScaler(enabled=False)"


@pytest.mark.parametrize(("whose", "scaler"), [("ours", OURS), ("native", NATIVE)])
def test_a_scale_that_finds_its_range_is_no_fault(tmp_path, whose, scaler):
    text = sound(AUTOCASTS[whose], f'{scaler}("cpu", init_scale=2.0**22)')
    done, report = examined(tmp_path, text)
    assert 1 <= len(report.skipped) <= 5
    assert (done.returncode, told(report, "error")) == (0, [])
    assert report.steps[0].scale == 2.0**22
    assert f"scaled by {scaler} in train.py:{line_of(text, 'scaler =')}" in report.policy


@pytest.mark.parametrize(("whose", "scaler"), [("ours", OURS), ("native", NATIVE)])
def test_a_scale_that_is_far_too_high(tmp_path, whose, scaler):
    text = sound(AUTOCASTS[whose], f'{scaler}("cpu", init_scale=2.0**90)')
    _, report = examined(tmp_path, text)
    error = next(each for each in report.findings if each.severity == "error")
    assert "gradients that are not finite came back from the loss, which is finite" in error.text
    *_, remedy = error.remedy.splitlines()
    line = line_of(text, "scaler =")
    assert (
        remedy
        == f"scaler = GradScaler(init_scale=2.0**16)  # in place of the one in train.py:{line}"
    )
    done, report = examined(tmp_path, sound(AUTOCASTS[whose], f"None\n{error.remedy}"))
    assert (done.returncode, report.skipped) == (0, ())


@pytest.mark.parametrize("autocast", ["torch.autocast", "halfstep.torch.autocast"])
def test_the_format_of_the_script_is_the_one_that_is_looked_at(tmp_path, autocast):
    done, report = examined(tmp_path, sound(f'{autocast}("cpu", dtype=torch.bfloat16)', NO_SCALER))
    assert report.policy.startswith(f"bfloat16 by {autocast} in train.py:")
    assert "," not in report.policy
    assert (done.returncode, report.findings) == (0, ())
    forms = {row.form for row in report.ranges.rows if row.role == "output"}
    assert "bfloat16" in forms
    assert "float16" not in forms


def test_a_scaler_alone_computes_nothing_in_low_precision(tmp_path):
    text = sound('torch.autocast("cpu", enabled=False)', f'{NATIVE}("cpu")')
    _, report = examined(tmp_path, text)
    assert report.policy.startswith(f"float32, scaled by {NATIVE} in train.py:")
    (warning,) = told(report, "warning")
    assert warning.endswith("but asks for no format of 16 bits: all of it ran in float32.")


def test_a_script_that_switches_its_precision_off_gets_that_of_doctor(tmp_path):
    _, report = examined(tmp_path, sound('torch.autocast("cpu", enabled=False)', NO_SCALER))
    assert report.policy == "mixed_float16 (doctor's choice: the script asks for none)"
    assert {row.form for row in report.ranges.rows if row.role == "output"} >= {"float16"}


def test_a_script_that_asks_late_is_told_what_it_trained_under_before(tmp_path):
    late = 'torch.autocast("cpu", dtype=torch.bfloat16, enabled=step > 3)'
    _, report = examined(tmp_path, sound(late, NO_SCALER))
    assert report.policy.startswith("bfloat16 by torch.autocast in train.py:")
    (note,) = (each for each in told(report, "note") if "before" in each)
    assert note == "Steps 1 to 4 ran by mixed_float16, before the script asked for a precision."


@pytest.mark.parametrize(
    ("prepared", "how"),
    [
        ('halfstep.torch.set_global_policy("mixed_float16")', "set_global_policy"),
        ('halfstep.torch.prepare(model, optimizer, "mixed_float16")', "prepare"),
    ],
)
def test_a_policy_of_the_script_is_mended_where_it_is(tmp_path, prepared, how):
    island = 'torch.autocast("cpu", enabled=False)'
    text = sound(island, NO_SCALER, prepared).replace("nn.ReLU()", "Steep()")
    text = text.replace("\ntorch.manual_seed", f"\n{STEEP}\n\ntorch.manual_seed")
    _, report = examined(tmp_path, text)
    assert (
        report.policy
        == f"mixed_float16 by {how} in train.py:{line_of(text, prepared)} (the script's own)"
    )
    remedy = next(each.remedy for each in report.findings if each.severity == "error")
    assert how in remedy.splitlines()[-1]
    done, report = examined(tmp_path, text.replace(prepared, remedy))
    assert (done.returncode, told(report, "error")) == (0, [])
