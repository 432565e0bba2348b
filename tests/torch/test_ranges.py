"""What float16 would lose, against casts of the gradients of a run in float32."""

import pytest
import torch

from halfstep.torch import GradScaler, autocast, prepare, ranges
from tests.torch.stepping import CASES

UNSCALED = "mixed_float16, scale=none, rules=halfstep-1 + convolution=lower"
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def lost(gradient):
    """Returns how many numbers there are that are not zero, and how many a cast makes zero."""
    there = gradient != 0
    return there.sum().item(), (there & (gradient.half() == 0)).sum().item()


def brute_force(case):
    """Returns the fractions lost of the gradients of parameters and of outputs, by module."""
    model, found = case.model(), {}

    def seen(path, role, gradient):
        before = found.get((path, role), (0, 0))
        found[path, role] = tuple(map(sum, zip(before, lost(gradient), strict=True)))

    def watch(path):
        def hook(_module, _args, output):
            output.register_hook(lambda gradient: seen(path, "grad_output", gradient))

        return hook

    for path, module in model.named_modules():
        module.register_forward_hook(watch(path))
    torch.manual_seed(7)
    case.loss(model, case.batch()).backward()
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            seen(path, "grad_weight", parameter.grad)
    return {key: zero / max(there, 1) for key, (there, zero) in found.items()}


def measured(case, **options):
    model = case.model()
    torch.manual_seed(7)
    return ranges(model, case.batch(), case.loss, **options)


@EVERY
def test_fractions_are_those_of_casts(case):
    found, expected = measured(case, policy=UNSCALED), brute_force(case)
    rows = [row for row in found.rows if row.role in ("grad_output", "grad_weight")]
    for row in rows:
        exact = expected[row.module, row.role]
        assert row.reference.flushed("float16") == pytest.approx(exact, abs=1e-3)
    assert max(expected.values()) > 0.01
    assert len(rows) > len(found.modules)


@EVERY
def test_what_the_step_itself_loses_is_that(case):
    """But for the gradients of weights, which sum up what other losses have changed."""
    found, expected = measured(case, policy=UNSCALED), brute_force(case)
    rows = [row for row in found.rows if row.role == "grad_output" and row.form == "float16"]
    for row in rows:
        assert row.lost == pytest.approx(expected[row.module, row.role], abs=0.01)
    assert len(rows) >= 3


@EVERY
def test_nothing_is_lost_at_the_scale_that_is_recommended(case):
    scale = measured(case).region_scale
    rules = UNSCALED.partition("none")[2]
    found = measured(case, policy=f"mixed_float16, scale=static({scale}){rules}")
    assert all(row.lost < 0.001 for row in found.rows if row.role.startswith("grad"))
    assert all(row.run.infs == row.run.nans == 0 for row in found.rows)
    assert found.lost(found.power) < 0.001 < measured(case, policy=UNSCALED).lost()


@EVERY
def test_neither_is_it_after_some_training(case):
    model, rules = case.model(), UNSCALED.partition("none")[2]
    scale = ranges(model, case.batch(), case.loss).region_scale
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    region = prepare(model, optimizer, f"mixed_float16, scale=static({scale}){rules}")
    for _ in range(20):
        optimizer.zero_grad()
        case.loss(model, case.batch()).backward()
        optimizer.step()
    found = ranges(model, case.batch(), case.loss)
    gradients = [row for row in found.rows if row.role == "grad_weight"]
    assert region.history.skipped == 0
    assert all(row.lost < 0.001 for row in gradients)
    assert found.form == "float16"


@EVERY
def test_neither_is_it_with_a_scaler_of_that_scale(case):
    scaler, model = GradScaler("cpu", init_scale=measured(case).scale), case.model()
    torch.manual_seed(7)
    with autocast("cpu", dtype=torch.float16):
        loss = case.loss(model, case.batch())
    scaler.scale(loss).backward()
    exact = case.model()
    torch.manual_seed(7)
    case.loss(exact, case.batch()).backward()
    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        there = other.grad != 0
        assert (there & (one.grad == 0)).sum() <= 0.001 * there.sum()


@EVERY
def test_a_curve_falls_at_one_end_and_rises_at_the_other(case):
    found = measured(case)
    curve = found.curve(range(-10, 40))
    assert [power for power, *_ in curve] == [*range(-10, 40)]
    flushed, over = [each[1] for each in curve], [each[2] for each in curve]
    assert flushed == sorted(flushed, reverse=True)
    assert over == sorted(over)
    window = found.window()
    assert all(each[2] == 0 for each in curve if each[0] <= window.highest)
