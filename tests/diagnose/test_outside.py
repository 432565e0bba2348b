import dataclasses
import math

from halfstep.core import Ranges, Step
from halfstep.diagnose._asking import Own
from halfstep.launch import RunResult
from tests.diagnose.test_findings import found, look, steps, told, trained
from tests.diagnose.test_writing import REGION

SCALER = Own("torch.amp.GradScaler", "in use", "a.py:3")
OWN = (Own("torch.autocast", "float16", "a.py:8", "cpu"), SCALER)
PLAIN = RunResult(policy="mixed_float16", steps=40, lowered=False, torch_amp=True)


def scaled(scale, *skipped):
    return tuple(dataclasses.replace(step, scale=scale) for step in steps(*skipped))


def back(*skipped, scale=2.0**20, run=PLAIN, asked=OWN):
    """Returns what is found where gradients came back that were not finite already."""
    looks = [look(each, outside=True) for each in skipped]
    return found(
        trained(steps=scaled(scale, *skipped)), *looks, run=run, asked=asked, overrides=False
    )


def test_what_a_scale_finds_its_range_by_is_no_fault():
    assert [severity for severity, _, _ in told(back(1, 2))] == ["note"]


def test_what_goes_on_is_one_and_the_scale_is_told():
    error = back(38, 39, 40).findings[0]
    assert error.severity == "error"
    assert error.text == (
        "At step 40, gradients that are not finite came back from the loss, which is finite, at "
        "loss scale 1.04858e+06: it is too high to begin with."
    )
    assert error.remedy.splitlines()[-1] == (
        "scaler = GradScaler(init_scale=2.0**16)  # in place of the one in a.py:3"
    )


def test_a_usual_scale_is_not_to_blame():
    error = back(38, 39, 40, scale=8.0).findings[0]
    assert "at loss scale 8: look at the derivatives of the code between" in error.text
    assert error.remedy == ""


def test_outside_of_a_region_nothing_is_scaled():
    (error, _) = back(2, run=REGION).findings
    assert error.text.startswith("At step 2, what is not finite was made outside of every model: ")


def test_a_loss_that_is_not_finite_is_of_no_scale():
    seen = dataclasses.replace(look(2, outside=True), line="a.py:9")
    report = found(trained(steps=scaled(2.0**20, 2)), seen, run=PLAIN, asked=OWN, overrides=False)
    assert report.findings[0].severity == "error"
    assert "made outside of every model, before a.py:9" in report.findings[0].text


def test_a_scale_for_nothing():
    (warning,) = told(found(run=PLAIN, asked=(SCALER,), overrides=False))
    text = "The script scales its loss by torch.amp.GradScaler in a.py:3, but asks for no format"
    assert warning == ("warning", "", f"{text} of 16 bits: all of it ran in float32.")
    assert told(found(run=PLAIN, asked=OWN, overrides=False)) == []
    assert told(found(run=REGION, asked=(SCALER,))) == []


def test_steps_before_anything_was_asked_for():
    late = OWN[0]._replace(step=1)
    (note,) = told(found(run=PLAIN, asked=(late,), overrides=False))
    text = "Step 1 ran by mixed_float16, before the script asked for a precision."
    assert note == ("note", "", text)
    assert told(found(asked=(late,), overrides=True)) == []
    assert told(found(run=PLAIN, asked=(late, OWN[0]), overrides=False)) == []


def test_what_the_script_asked_for_took_effect():
    run = dataclasses.replace(PLAIN, torch_amp=False)
    report = trained(steps=(Step(1, 1.0, 1.0),), ranges=Ranges())
    assert told(found(report, run=run, asked=OWN[:1], overrides=False)) == []
    (error,) = told(found(report, run=run, overrides=False))
    assert "did not take effect" in error[2]


def test_a_penalty_on_gradients_that_a_scale_let_overflow_is_no_fault():
    seen = dataclasses.replace(look(2, outside=True), line="a.py:9", derived=True)
    losses = {2: math.inf, 3: math.nan}
    ran = [
        dataclasses.replace(each, loss=losses.get(each.number, 1.0)) for each in scaled(8.0, 2, 3)
    ]
    report = found(trained(steps=tuple(ran)), seen, run=PLAIN, asked=OWN, overrides=False)
    assert [severity for severity, _, _ in told(report)] == ["note", "note"]
    unscaled = [dataclasses.replace(each, scale=1.0) for each in ran]
    report = found(trained(steps=tuple(unscaled)), seen, run=PLAIN, asked=OWN, overrides=False)
    assert report.findings[0].severity == "error"


def test_a_penalty_that_breaks_again_and_again_is_one():
    seen = dataclasses.replace(look(40, outside=True), line="a.py:9", derived=True)
    ran = trained(steps=scaled(8.0, 38, 39, 40))
    error = found(ran, seen, run=PLAIN, asked=OWN, overrides=False).findings[0]
    text = "At step 40, the loss is made of gradients that are not finite, at loss scale 8: "
    assert (error.severity, error.text.startswith(text)) == ("error", True)
