"""What is to be pasted is whole, once, and other than what the script has."""

import dataclasses
import math

import pytest

from halfstep import Policy, Rules
from halfstep.core import Diagnosis, Exponents, Moment, Range, Ranges, Step
from halfstep.diagnose._asking import Own
from halfstep.launch import RunResult
from tests.diagnose.test_findings import BACKWARD, FORWARD, UNDERFLOW, found, look, told, trained

ONE = Exponents({0: 4}, largest=1.0)
WIDE = Exponents({-40: 2, 3: 2}, largest=9.0)
SMALL = Exponents({-40: 3, -4: 1}, largest=0.1)
REGION = RunResult(policy="mixed_float16", steps=40, regions=1, region_policies=("mixed_float16",))


def rows(*names, values=WIDE, form="float16", role="grad_output", **more):
    return tuple(Range(name, role, values, values, form, ("matmul",), **more) for name in names)


def policy_in(remedy, last):
    """Executes all lines but the last one, which is expected to be that, and returns the policy."""
    before, _, use = remedy.rpartition("\n")
    assert use.startswith(last)
    names = {}
    exec(before, names)
    return names["policy"]


def ranged(run=REGION, rows=(), **report):
    return found(
        trained(ranges=Ranges(rows, entering=1.0), **report), look(1, failed=False), run=run
    )


def test_a_rule_for_a_module_in_a_model_of_several():
    known = rows("Net.a[0]", path="a[0]") + rows("Net.b", "Net.c", values=ONE)
    (warning,) = ranged(rows=known).findings
    policy = policy_in(warning.remedy, "set_global_policy(policy)  # or prepare(")
    assert [each.where for each in policy.rules.edits] == ["a[[]0]"]


def test_a_script_that_prepares_its_models_itself():
    own = dataclasses.replace(REGION, region_policies=("mixed_float16, rules=torch-2.13",))
    (warning,) = ranged(own, rows("wide") + rows("a", "b", values=ONE)).findings
    policy = policy_in(warning.remedy, "region = prepare(model, optimizer, policy=policy)")
    assert (policy.rules.base, len(policy.rules.edits)) == ("torch-2.13", 1)


def test_a_script_with_an_autocast_of_its_own():
    own = RunResult(policy="mixed_float16", steps=40, lowered=True, torch_amp=True)
    (warning,) = ranged(own, rows("wide") + rows("a", "b", values=ONE)).findings
    lines = warning.remedy.splitlines()
    assert lines[:2] == ["import torch", "from halfstep import Rules"]
    names = {}
    exec("\n".join(line for line in lines if "Rules" in line), names)
    assert names["rules"] == Rules().with_rule(
        "matmul", "full", where="wide", reason="Its values do not fit float16."
    )
    lower = "lower = autocast(dtype=torch.float16, rules=rules)  # in place of the script's own"
    assert lower in lines


def test_a_scaler_comes_with_what_it_takes_the_place_of():
    scaler = "from halfstep.torch import GradScaler\nscaler = GradScaler(init_scale=65536.0)"
    fault = dataclasses.replace(UNDERFLOW, remedy=scaler)
    autocast = Own("torch.autocast", "float16", "train.py:8", "cpu")
    own = Own("torch.amp.GradScaler", "in use", "train.py:7")
    for asked, comment in (
        ((), ""),
        ((autocast,), "  # with scaler.scale(loss), scaler.step(optimizer) and scaler.update()"),
        ((autocast, own), "  # in place of the one in train.py:7"),
    ):
        report = trained(diagnosis=Diagnosis((fault,)))
        report = found(report, look(10, UNDERFLOW, failed=False), asked=asked)
        assert report.findings[0].remedy == f"{scaler}{comment}"
        assert report.diagnosis.first.remedy == report.findings[0].remedy


@pytest.mark.parametrize(
    ("own", "device", "place"),
    [
        (
            Own("torch.autocast", "float16", "train.py:8", "cpu"),
            '"cpu", ',
            "of halfstep.torch, in place of torch.autocast in train.py:8",
        ),
        (
            Own("halfstep.torch.autocast", "float16", "a.py:2", "cuda", "torch-2.13"),
            '"cuda", ',
            "in place of the one in a.py:2",
        ),
    ],
)
def test_a_rule_for_the_autocast_that_the_script_has(own, device, place):
    run = RunResult(policy="mixed_float16", steps=40, lowered=True)
    ranges = Ranges(rows("wide") + rows("a", "b", values=ONE), entering=1.0)
    report = found(trained(ranges=ranges), look(1, failed=False), run=run, asked=(own,))
    remedy = report.findings[0].remedy
    last = f"lower = autocast({device}dtype=torch.float16, rules=rules)  # {place}"
    assert remedy.splitlines()[-1] == last
    names = {}
    exec("\n".join(line for line in remedy.splitlines() if "lower" not in line), names)
    base = Rules.parse(own.rules) if own.rules else Rules()
    edit = {"where": "wide", "reason": "Its values do not fit float16."}
    assert names["rules"] == base.with_rule("matmul", "full", **edit)


def test_the_other_lines_with_such_an_autocast_are_told():
    first = Own("torch.autocast", "float16", "a.py:2", "cpu")
    asked = (first, first._replace(source="a.py:9", step=3), first._replace(form="bfloat16"))
    fault = dataclasses.replace(FORWARD, remedy="lower = autocast()  # in place of it in a.py:2")
    report = found(trained(), look(2, fault), asked=asked)
    also = "; also in a.py:9, if the same model is called there"
    assert report.findings[0].remedy == f"{fault.remedy}{also}"
    ranges = Ranges(rows("wide") + rows("a", "b", values=ONE), entering=1.0)
    run = RunResult(policy="mixed_float16", steps=40, lowered=True)
    report = found(trained(ranges=ranges), look(1, failed=False), run=run, asked=asked)
    assert report.findings[0].remedy.endswith(f" in a.py:2{also}")


def test_a_policy_of_the_script_is_replaced_where_it_is():
    for how, last in (
        ("prepare", "region = prepare(model, optimizer, policy=policy)  # in place of how it was"),
        ("set_global_policy", "set_global_policy(policy)  # in place of the one in a.py:2"),
    ):
        ranges = Ranges(rows("wide") + rows("a", "b", values=ONE), entering=1.0)
        asked = (Own(how, "mixed_float16", "a.py:2"),)
        report = found(trained(ranges=ranges), look(1, failed=False), run=REGION, asked=asked)
        policy_in(report.findings[0].remedy, last)


def test_what_is_in_use_is_not_offered():
    ranges = Ranges(rows("ff", values=ONE, role="output") + rows("ff", values=SMALL), entering=4.0)
    scale = f"dynamic(init_scale={ranges.region_scale!r})"
    asked = str(Policy.named("mixed_float16").with_(scale=scale))
    for policies, offered in ((("mixed_float16",), "scale=dynamic("), ((asked,), "bfloat16")):
        run = dataclasses.replace(REGION, policy=policies[0], region_policies=policies)
        report = found(trained(ranges=ranges, power=3), look(1, failed=False), run=run)
        assert offered in report.findings[0].remedy


def test_many_modules_are_for_bfloat16():
    for count, others in ((7, 3), (9, 80)):
        known = rows(*map(str, range(count)))
        many = ranged(rows=known + rows(*(f"{each}b" for each in range(others)), values=ONE))
        (finding,) = many.findings
        names = f"values of 0, 1, 2, 3, 4 and {count - 5} more modules need more range"
        assert names in finding.text
        policy = policy_in(finding.remedy, "set_global_policy(policy)")
        assert policy == "mixed_bfloat16"


def test_a_few_modules_share_the_policy_and_its_scale():
    known = rows("a", "b") + rows("c", "d", values=Exponents({-30: 1}, largest=2.0**-30))
    (finding,) = ranged(rows=known).findings
    policy = policy_in(finding.remedy, "set_global_policy(policy)")
    assert [each.where for each in policy.rules.edits] == ["a", "b"]
    assert policy.scale.init_scale > Policy.named("mixed_float16").scale.init_scale


def test_small_gradients_of_a_step_and_of_the_training_have_one_remedy():
    small = Exponents({-30: 1}, largest=2.0**-30)
    fault = dataclasses.replace(UNDERFLOW, remedy="scaler = GradScaler(init_scale=8.0)")
    report = trained(
        diagnosis=Diagnosis((fault,)), ranges=Ranges(rows("a", values=small), entering=1.0)
    )
    report = found(report, look(10, fault, failed=False), run=REGION)
    (finding,) = report.findings
    assert finding.text.endswith(
        "(step 10). 100 % of the gradients become 0 in float16 at the scale in force, 2^0."
    )
    assert finding.remedy == report.diagnosis.first.remedy == report.remedies.text
    wide = Ranges(rows("a", values=small) + rows("b", "c", values=small) + rows("w"), entering=1.0)
    both = trained(diagnosis=Diagnosis((fault,)), ranges=wide, power=26)
    (both,) = found(both, look(10, fault, failed=False), run=REGION).findings
    assert both.module == "ff"
    assert both.text.endswith("The values of w need more range than float16 has, at any scale.")
    assert policy_in(finding.remedy, "set_global_policy(policy)").scale.init_scale == 2.0**26
    assert report.remedies.later == ()


def test_a_remedy_is_told_once():
    known = rows("a", "b", values=ONE, form="bfloat16", role="weight")
    ranges = Ranges(known, updates=(("a.weight", 0.5), ("b.weight", 0.4)))
    first, second = found(trained(ranges=ranges), look(1, failed=False)).findings
    assert first.remedy.splitlines() == [
        "from halfstep.torch import keep_masters",
        "keep_masters(optimizer)  # once the optimizer is made",
    ]
    assert (second.module, second.remedy) == ("b.weight", "")


SQUARES = Exponents({-40: 3, -4: 1}, largest=0.1)


def half(form="float16", eps=1e-8):
    """Returns the ranges of a model that trains parameters in half precision with Adam."""
    moments = (Moment("a.weight", form, eps, SQUARES),)
    return Ranges(rows("a", values=ONE, form=form, role="weight"), form=form, moments=moments)


def test_what_an_adam_loses_in_half_precision():
    report = found(trained(ranges=half()), look(1, failed=False))
    assert told(report) == [
        (
            "warning",
            "a.weight",
            "eps=1e-08 of its optimizer is 0 in float16, so that steps divide by 0.",
        ),
        (
            "warning",
            "a.weight",
            "75 % of the squares of its gradients become 0 in float16, where Adam keeps them.",
        ),
    ]
    assert [bool(each.remedy) for each in report.findings] == [True, False]
    masters = dataclasses.replace(half(), moments=half("float32").moments)
    assert told(found(trained(ranges=masters), look(1, failed=False))) == []


def test_an_eps_that_has_broken_the_parameters_is_an_error():
    broken = dataclasses.replace(FORWARD, operation="data", role="weight", module="a.weight")
    report = found(trained(ranges=half()), look(2, broken), look(1, failed=False))
    assert [each.severity for each in report.findings] == ["error", "error", "warning"]


def test_parameters_in_half_precision_are_no_policy_without_effect():
    run = RunResult(policy="mixed_float16", steps=40, lowered=False)
    report = found(trained(ranges=half(eps=1.0)), look(1, failed=False), run=run, overrides=False)
    assert "did not take effect" not in str(told(report))
    (error, _) = found(trained(ranges=half(eps=1.0)), look(1, failed=False), run=run).findings
    assert error.text == (
        "mixed_float16 did not take effect, because the script trains parameters in float16 "
        "itself, which are left alone."
    )


@pytest.mark.parametrize("fault", [FORWARD, BACKWARD])
def test_what_diverges_gets_no_rule(fault):
    losses = [2.0, 1.0, 50.0, 3e4, math.inf, math.inf]
    steps = tuple(Step(number, loss, 8.0) for number, loss in enumerate(losses, 1))
    report = found(trained(steps=steps), look(5, fault))
    assert report.diagnosis.first.remedy == ""
    assert not any(each.remedy for each in report.findings)
    assert "The loss grew from 1 to 3e+04 in the 2 steps before" in report.findings[0].text


def test_a_fault_that_is_hidden_is_an_error_and_one_of_small_gradients_a_warning():
    for fault, severity in ((FORWARD, "error"), (UNDERFLOW, "warning")):
        report = trained(diagnosis=Diagnosis((fault,)))
        (finding,) = found(report, look(1, fault, failed=False), look(10, failed=False)).findings
        assert finding.severity == severity
        assert finding.text.endswith("(step 1).")
