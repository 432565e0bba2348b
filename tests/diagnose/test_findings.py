import dataclasses
import math

import pytest

from halfstep.core import Diagnosis, Exponents, Fault, Policy, Range, Ranges, Report, Step
from halfstep.diagnose._findings import findings
from halfstep.diagnose._heard import Evidence, Look
from halfstep.launch import RunResult

FORWARD = Fault("ff", "matmul", "forward", "output", "inf", "float16", (2,), 9.0, remedy="this")
BACKWARD = Fault("ff", "matmul", "backward", "grad_input", "inf", "float16", (2,), 9.0)
UNDERFLOW = Fault("ff", "matmul", "backward", "grad_input", "underflow", "float16", (2,), 9.0)
FINE = tuple(Step(number, 1.0, 8.0) for number in range(1, 41))
SMALL, ONE = Exponents({-40: 3, -4: 1}, largest=0.1), Exponents({0: 4}, largest=1.0)


def steps(*skipped, of=40):
    return tuple(
        Step(n, 1.0, 8.0, n in skipped, "it overflowed" * (n in skipped)) for n in range(1, of + 1)
    )


def look(step, fault=None, *, failed=True, outside=False, sizes=None, **seen):
    diagnosis = Diagnosis((fault,) if fault else ())
    report = Report(script="", policy="", sampled=(step,), diagnosis=diagnosis, **seen)
    known = None if sizes is None else (sizes[0], {"model": sizes[1]})
    return Look(report, failed, outside, sizes=known)


def found(report=None, *looks, run=None, **more):
    report = report or Report(script="a.py", policy="mixed_float16", steps=FINE)
    run = run or RunResult(policy="mixed_float16", steps=40, lowered=True)
    return findings(Evidence(report, run, looks, **more))


def told(report):
    return [(each.severity, each.module, each.text) for each in report.findings]


def trained(*, steps=FINE, **values):
    return Report(script="a.py", policy="mixed_float16", steps=steps, **values)


def test_nothing_to_find():
    assert told(found(None, look(1, failed=False))) == []


def test_what_breaks_in_the_forward_pass_is_decisive_and_the_first_one_counts():
    other = Fault("later", "exp", "forward", "output", "inf", "float16", (2,), 9.0)
    report = found(trained(steps=steps(3, 9)), look(3, BACKWARD), look(9, FORWARD), look(12, other))
    assert report.diagnosis.first == FORWARD
    (error, note) = report.findings
    assert (error.severity, error.module, error.remedy) == ("error", "ff", "this")
    assert error.text.startswith("Matmul made inf in the forward pass, in float16, which ends at")
    assert error.text.endswith("(step 9).")
    assert note.severity == "note"


def test_a_scale_that_finds_its_range_is_no_fault():
    report = found(trained(steps=steps(1, 2)), look(1, BACKWARD), look(2, BACKWARD))
    assert not report.diagnosis
    assert told(report) == [("note", "", "2 of 40 steps were skipped: it overflowed.")]


@pytest.mark.parametrize("skipped", [(38, 39, 40), tuple(range(2, 40, 6))])
def test_what_overflows_again_and_again_is_one(skipped):
    report = found(trained(steps=steps(*skipped)), *(look(each, BACKWARD) for each in skipped))
    assert report.diagnosis.first == BACKWARD
    assert report.findings[0].severity == "error"
    assert report.findings[0].text.endswith(f"(step {skipped[-1]}).")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"in_float32": True}, True),
        ({"remedy": "rules = Rules().with_rule(...)"}, True),
        ({"remedy": "scaler = GradScaler(init_scale=1.0)"}, False),
        (
            {"remedy": 'policy = Policy.parse("mixed_float16, scale=dynamic(init_scale=1.0)")'},
            False,
        ),
        ({"kind": "underflow", "remedy": "rules"}, False),
        ({}, False),
    ],
)
def test_a_way_back_that_no_scale_cures_is_a_fault_even_if_it_is_only_one(changes, told):
    fault = dataclasses.replace(BACKWARD, **changes)
    report = found(trained(steps=steps(7)), look(7, fault))
    assert bool(report.diagnosis) == told
    assert [each.severity for each in report.findings] == ["error", "note"][1 - told :]


def test_what_an_optimizer_has_broken():
    fault = dataclasses.replace(
        FORWARD, module="ff.weight", operation="update", role="weight", source="a step of Adam"
    )
    report = found(trained(steps=steps(7)), look(7, fault))
    error, _ = report.findings
    assert (error.severity, error.module, error.remedy) == ("error", "ff.weight", "this")
    assert error.text.startswith("A step of Adam made the weight inf, in float16")


def test_many_skips_without_a_cause_are_a_warning():
    report = found(trained(steps=steps(*range(2, 40, 6))))
    assert told(report) == [("warning", "", "7 of 40 steps were skipped: it overflowed.")]


def test_what_is_made_outside_of_every_model():
    broken = (*FINE[:-1], Step(40, math.nan, 8.0))
    seen = dataclasses.replace(look(40, outside=True), line="train.py:7")
    (error, note) = found(trained(steps=broken), seen).findings
    text = "At step 40, what is not finite was made outside of every model, before train.py:7: "
    assert error.text.startswith(text)
    assert (note.severity, note.text) == ("note", "1 of 40 losses is not finite.")


def test_a_loss_that_is_not_finite_for_no_known_reason_is_an_error():
    broken = (*FINE[:-2], Step(39, math.inf), Step(40, math.nan))
    assert told(found(trained(steps=broken))) == [("error", "", "2 of 40 losses are not finite.")]


def test_gradients_that_become_zero():
    ranges = Ranges(
        (
            Range("ff", "output", ONE, ONE, "float16", ("matmul",)),
            Range("ff", "grad_output", SMALL, SMALL, "float16", ("matmul",)),
        ),
        entering=4.0,
    )
    report = found(trained(ranges=ranges, power=3), look(1, failed=False))
    (lost,) = report.findings
    assert lost.text == "75 % of the gradients become 0 in float16 at the scale in force, 2^3."
    assert lost.severity == "warning"
    imports, scaler = lost.remedy.splitlines()
    assert imports == "from halfstep.torch import GradScaler"
    assert scaler == f"scaler = GradScaler(init_scale=2.0**{ranges.power})"
    run = RunResult(policy="mixed_float16", steps=40, regions=1)
    (lost,) = found(trained(ranges=ranges, power=3), look(1, failed=False), run=run).findings
    scale = f"dynamic(init_scale={ranges.region_scale})"
    names = {}
    exec(lost.remedy.rpartition("\n")[0], names)
    assert names["policy"] == Policy.named("mixed_float16").with_(scale=scale)
    assert "\nset_global_policy(policy)  # or prepare(" in lost.remedy
    in_jax = trained(ranges=ranges, power=3, versions=(("jax", "0.10"),))
    (lost,) = found(in_jax, look(1, failed=False)).findings
    assert lost.remedy.splitlines() == [
        "import halfstep.jax",
        f"halfstep.jax.autocast(f, policy, scale={ranges.region_scale})",
    ]
    unscaled = dataclasses.replace(in_jax, ranges=dataclasses.replace(ranges, entering=0.0))
    (lost,) = found(unscaled, look(1, failed=False)).findings
    assert f'halfstep.jax.loss_scale("dynamic(init_scale={ranges.scale})")' in lost.remedy
    assert told(found(trained(ranges=ranges, power=ranges.power), look(1, failed=False))) == []


def test_a_module_that_no_scale_suits_gets_a_rule():
    wide = Exponents({-40: 2, 3: 2}, largest=9.0)
    rows = tuple(
        Range(name, "grad_output", values, values, "float16", ("matmul",))
        for name, values in (("wide", wide), ("a", ONE), ("b", ONE))
    )
    report = found(trained(ranges=Ranges(rows, entering=1.0)), look(1, failed=False))
    (warning,) = report.findings
    assert told(report) == [
        (
            "warning",
            "",
            "16.7 % of the gradients become 0 in float16 at the scale in force, 2^0, and the "
            "values of wide need more range than float16 has, at any scale.",
        )
    ]
    assert 'with_rule("matmul", "full", ' in warning.remedy
    few = dataclasses.replace(rows[1], reference=Exponents({0: 400}, largest=1.0))
    report = found(trained(ranges=Ranges((*rows, few), entering=1.0)), look(1, failed=False))
    text = "Its values need more range than float16 has, at any scale."
    assert told(report) == [("warning", "wide", text)]


def test_an_underflow_is_a_warning():
    report = trained(diagnosis=Diagnosis((UNDERFLOW,)))
    (warning,) = found(report, look(10, UNDERFLOW, failed=False)).findings
    assert (warning.severity, warning.module) == ("warning", "ff")


def test_updates_that_round_to_nothing():
    updates = (("a.weight", 0.5), ("b.weight", 0.001))
    wide = Ranges((Range("a", "weight", ONE, ONE, "float32"),), updates=updates)
    assert told(found(trained(ranges=wide), look(1, failed=False))) == []
    ranges = Ranges((Range("a", "weight", ONE, ONE, "bfloat16"),), updates=updates)
    assert told(found(trained(ranges=ranges), look(1, failed=False))) == [
        (
            "warning",
            "a.weight",
            "50 % of its updates change nothing, because they round to nothing.",
        )
    ]


def test_nothing_was_trained():
    report = Report(script="a.py", policy="mixed_float16")
    (error,) = found(report, run=RunResult(policy="mixed_float16")).findings
    assert error.text.startswith("Nothing was trained: neither PyTorch nor Keras was imported. ")
    assert "its own go after --" in error.text
    failed = Report(script="a.py", policy="mixed_float16", error="ValueError: oh")
    assert told(found(failed, run=RunResult(policy="mixed_float16"))) == []


def test_a_script_without_an_optimizer():
    (note,) = found(trained(steps=(Step(1, 1.0), Step(2, 0.5)))).findings
    assert note.severity == "note"
    assert note.text.startswith("No optimizer was seen: each loss counts as a step")


def test_a_policy_that_did_not_take_effect():
    run = RunResult(policy="mixed_float16", steps=40, lowered=False)
    (error,) = found(None, run=run).findings
    assert error.text.startswith("mixed_float16 did not take effect, because no model became a reg")


@pytest.mark.parametrize(
    ("frameworks", "steps", "severity", "instead"),
    [
        (("torch", "keras"), FINE, "note", "halfstep.keras.diagnose(model, x, y)"),
        (("keras", "jax"), FINE, "note", "halfstep.keras.diagnose(model, x, y)"),
        (("jax",), (), "error", "halfstep.jax.diagnose(function, *arguments)"),
    ],
)
def test_what_to_call_for_other_frameworks(frameworks, steps, severity, instead):
    (finding,) = found(trained(steps=steps), frameworks=frameworks).findings
    assert finding.severity == severity
    assert instead in finding.text


def test_what_was_looked_at_needs_no_other_call():
    assert told(found(None, look(1, failed=False), frameworks=("torch", "keras"))) == []


@pytest.mark.parametrize("why", ["UsageError: no copy", "UsageError: no copy."])
def test_a_step_that_could_not_be_looked_at_is_told(why):
    (note,) = found(None, unseen=((1, why), (10, "again"))).findings
    assert note.text == "Step 1 could not be looked at closely: UsageError: no copy."


def test_what_breaks_in_the_backward_pass_of_a_step_that_was_taken_is_decisive():
    report = found(trained(steps=steps(3)), look(3, BACKWARD), look(9, BACKWARD))
    assert report.findings[0].text.endswith("(step 9).")


def test_a_step_that_is_sound_when_it_is_run_again_is_told():
    report = found(trained(steps=steps(3)), look(3))
    assert told(report)[-1] == (
        "note",
        "",
        "Step 3 was run again and made neither inf nor NaN.",
    )


def test_notes_are_told_once_and_only_of_what_was_trained():
    assert told(found(notes=("so", "so"))) == [("note", "", "so")]
    run = RunResult(policy="mixed_float16")
    untrained = found(trained(steps=()), run=run, notes=("so",), frameworks=("jax",))
    assert [each.severity for each in untrained.findings] == ["error"]


@pytest.mark.parametrize(("last", "diverges"), [(math.nan, True), (2.0, False)])
def test_a_loss_that_grew_in_the_step_that_broke_the_next(last, diverges):
    ran = tuple(Step(number, loss, 8.0) for number, loss in enumerate((1.0, 9e3, last), 1))
    report = found(trained(steps=ran), look(2, BACKWARD))
    assert any("The loss grew from 1 to 9e+03" in text for *_, text in told(report)) == diverges
