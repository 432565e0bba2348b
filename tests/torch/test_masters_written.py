"""Masters follow whatever else happens to their parameters."""

import pytest
import torch
from torch import nn

from halfstep.torch import keep_masters, prepare
from halfstep.torch._masters._kept import master_of, true_value
from tests.torch.split_models import IN_FLOAT16, POLICIES, exact, losses, made, perceptron


def zeroed(parameter):
    with torch.no_grad():
        parameter.zero_()


def masked(parameter):
    mask = torch.rand(parameter.shape) > 0.5
    parameter.data.mul_(mask)


def clamped(parameter):
    with torch.no_grad():
        parameter.clamp_(-0.01, 0.01)


def without_end(parameter):
    with torch.no_grad():
        parameter.view(-1)[0] = float("inf")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("change", [zeroed, masked, clamped, without_end])
def test_masters_follow_what_else_is_written(change, policy):
    model, optimizer, _ = made(policy=policy)
    losses(model, optimizer, 5)
    for each in model.parameters():
        change(each)
        assert not true_value(each).isnan().any()
        # A remainder is at most half of a unit in the last place, of what is on either side.
        gap = (true_value(each) - each.detach().float()).nan_to_num(0.0).abs()
        room = each.detach().float().abs() * torch.finfo(each.dtype).eps
        room += torch.finfo(each.dtype).smallest_normal
        assert (gap <= room).all()
        if change is zeroed:
            assert true_value(each).abs().max() < 1e-4
    if change is without_end:
        return
    found = losses(model, optimizer, 5)
    assert all(value == value for value in found)
    assert not any(each.isnan().any() for each in exact(model).values())


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_parameter_is_replaced_by_another_one(policy):
    model, optimizer, _ = made(policy=policy)
    losses(model, optimizer, 2)
    model[2].weight = nn.Parameter(torch.zeros(2, 32, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [model[2].weight]})
    losses(model, optimizer, 3)
    assert optimizer.state[model[2].weight]["exp_avg"].dtype is torch.float32
    assert master_of(model[2].weight) is not None
    assert (true_value(model[2].weight) != model[2].weight).any()


def test_a_parameter_is_replaced_before_an_optimizer_knows_it():
    model, _, region = made()
    model[2].weight = nn.Parameter(torch.zeros(2, 32, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-13)
    region.attach(optimizer)
    losses(model, optimizer, 3)
    assert (true_value(model[2].weight) != 0).any()


def test_frozen_parameters_stay_as_they_are():
    torch.manual_seed(0)
    model = perceptron()
    model[0].requires_grad_(False)
    model[0].bias.data = model[0].bias.data.half()
    before = [each.detach().clone() for each in model[0].parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    region = prepare(model, optimizer, "mixed_bfloat16", masters="split")
    losses(model, optimizer, 3)
    region.remove()
    for each, old in zip(model[0].parameters(), before, strict=True):
        assert each.dtype is old.dtype
        assert torch.equal(each, old)


@pytest.mark.parametrize(
    ("policy", "grad_dtype", "kept"),
    [
        ("mixed_bfloat16", None, torch.bfloat16),
        ("mixed_bfloat16", "float32", torch.float32),
        (IN_FLOAT16, None, torch.float32),
        (IN_FLOAT16, "bfloat16", torch.bfloat16),
    ],
)
def test_gradients_that_are_there_stay(policy, grad_dtype, kept):
    torch.manual_seed(0)
    model = perceptron()
    gradients = [torch.randn_like(each) * 1e-9 for each in model.parameters()]
    for each, gradient in zip(model.parameters(), gradients, strict=True):
        each.grad = gradient.clone()
    region = prepare(model, policy=policy, masters="split", grad_dtype=grad_dtype)
    for each, gradient in zip(model.parameters(), gradients, strict=True):
        assert each.grad.dtype is kept
        assert torch.equal(each.grad, gradient.to(kept))
    region.remove()
    for each, gradient in zip(model.parameters(), gradients, strict=True):
        assert each.grad.dtype is torch.float32
        assert torch.equal(each.grad, gradient.to(kept).float())


def no_negatives(parameter):
    parameter.clamp_(min=0.0)


def pruned(parameter):
    parameter.mul_(torch.rand(parameter.shape) > 0.5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("settings", [{}, {"bucket_bytes": 128}])
@pytest.mark.parametrize("change", [no_negatives, pruned])
def test_zeros_that_are_written_are_zeros(change, settings, policy):
    model, optimizer, _ = made(policy=policy, **settings)
    losses(model, optimizer, 3)
    before = exact(model)
    for name, each in model.named_parameters():
        with torch.no_grad():
            change(each)
        zeros = each == 0
        assert zeros.any()
        assert torch.equal(true_value(each) == 0, zeros)
        assert torch.equal(true_value(each)[~zeros], before[name][~zeros])
        each.grad = torch.zeros_like(each, dtype=each.grad_dtype)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for each in model.parameters():
        assert torch.equal(true_value(each) == 0, each == 0)


def test_the_smallest_numbers_are_kept_as_long_as_nobody_writes():
    weight = nn.Parameter(torch.tensor([1e-45, -3e-41, 1.0, -0.0]))
    before = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=0.0)
    keep_masters(optimizer, param_dtype="bfloat16")
    assert torch.equal(true_value(weight).view(torch.int32), before.view(torch.int32))
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.equal(true_value(weight).view(torch.int32), before.view(torch.int32))
