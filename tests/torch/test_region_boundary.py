"""What a program sees of gradients and outputs at the boundary of a region: true values."""

import contextlib

import pytest
import torch
from torch import nn

from halfstep.torch import prepare
from tests.torch.test_region_loops import FLOAT32, HALF, batches, network, off, on, sgd


def gradients(enclose, make=network, factor=1.0):
    torch.manual_seed(0)
    model = make()
    enclose(model)
    inputs = batches(1)[0].requires_grad_()
    (factor * model(inputs).square().mean()).backward()
    return [inputs.grad, *(parameter.grad for parameter in model.parameters())]


def compare(expected, got, policy):
    for wanted, value in zip(expected, got, strict=True):
        if policy in HALF:
            # Relative to the largest of the tensor, because sums of rounded numbers cancel.
            assert ((value - wanted).abs().max() / wanted.abs().max()).item() < 0.05
        else:
            torch.testing.assert_close(value, wanted, atol=0, rtol=2e-6)


@pytest.mark.parametrize("factor", [1e-7, 1.0, 1e7])
@pytest.mark.parametrize("policy", [FLOAT32, *HALF])
def test_gradients_by_autograd_grad_are_true(policy, factor):
    def run(enclose):
        model, values = network(), batches(1)[0].requires_grad_()
        enclose(model)
        loss = model(values).square().mean() * factor
        return torch.autograd.grad(loss, [values, *model.parameters()])

    compare(run(off), run(on(policy)), policy)


def test_only_what_is_asked_for_is_computed():
    model, values = network(), batches(1)[0].requires_grad_()
    prepare(model, policy=FLOAT32)
    torch.autograd.grad(model(values).sum(), values)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert values.grad is None
    torch.autograd.grad(model(values).sum(), model[2].weight)
    model(values).sum().backward(inputs=[model[0].bias])
    assert model[0].bias.grad is not None
    assert model[0].weight.grad is None


def hooked(enclose):
    model = network(outputs=6)
    enclose(model)
    told = {}

    def note(name):
        return lambda gradient: told.update({name: gradient.clone()})

    model.register_forward_pre_hook(lambda module, given: told.update(given=given[0]))
    model.register_forward_hook(lambda module, given, out: told.update(out=out))
    model.register_full_backward_hook(lambda module, back, came: told.update(back=back, came=came))
    model.register_full_backward_pre_hook(lambda module, came: told.update(first=came))
    for name, parameter in model.named_parameters():
        parameter.register_hook(note(name))
        parameter.register_post_accumulate_grad_hook(
            lambda each, name=name: told.update({f"{name} after": each.grad.clone()})
        )
    values = batches(1)[0].requires_grad_()
    values.register_hook(note("inputs"))
    out = model(values)
    out.register_hook(note("outputs"))
    out.retain_grad()
    out.square().mean().mul(1e-4).backward()
    told["retained"] = out.grad
    flat = {}
    for name, value in told.items():
        for place, each in enumerate(value if isinstance(value, tuple) else (value,)):
            flat[name, place] = each.detach()
    return flat


@pytest.mark.parametrize("policy", [FLOAT32, *HALF])
def test_hooks_see_true_values(policy):
    expected, got = hooked(off), hooked(on(policy))
    # Not their order: what crosses the boundary crosses together.
    assert got.keys() == expected.keys()
    assert len(got) == 16
    compare(expected.values(), [got[name] for name in expected], policy)
    assert {each.dtype for each in got.values()} == {torch.float32}


def test_a_hook_that_changes_a_gradient_has_its_say():
    def run(enclose):
        model = network()
        enclose(model)
        model[0].weight.register_hook(lambda gradient: gradient * 3)
        out = model(batches(1)[0])
        out.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        out.square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    compare(run(off), run(on(FLOAT32)), FLOAT32)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("evaluating", [True, False])
@pytest.mark.parametrize("policy", [FLOAT32, *HALF, "mixed_float16,output_dtype=bfloat16"])
def test_outputs_have_the_output_dtype(policy, evaluating, mode):
    model = network()
    region = prepare(model, policy=policy)
    model.train(not evaluating)
    with mode():
        out = model(batches(1)[0])
        expected = network()(batches(1)[0])
    assert str(out.dtype) == f"torch.{region.policy.output_dtype}"
    assert out.requires_grad is (mode is contextlib.nullcontext)
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)


class Same(nn.Module):
    """Returns what it holds or was given, or views of it."""

    def __init__(self, which):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 6))
        self.which = which

    def forward(self, values):
        made = self.weight * values
        return {"made": made, "view": made.view(-1)[:10].view(5, 2), "slice": made[1:, :3]}[
            self.which
        ]


@pytest.mark.parametrize("policy", [FLOAT32, "mixed_float16", "mixed_bfloat16", "float32"])
@pytest.mark.parametrize("which", ["made", "view", "slice"])
def test_outputs_may_be_changed_in_place(which, policy):
    def run(enclose):
        model = Same(which)
        enclose(model)
        out = model(batches(1)[0])
        out += 1
        out[out < 0.5] = 0
        out[0].mul_(3)
        loss = out.square().mean()
        loss /= 2
        loss.backward()
        return [model.weight.grad]

    compare(run(off), run(on(policy)), policy)


def test_a_loss_computed_inside_may_be_changed_in_place():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, values):
            return self.inner(values).square().mean()

    def run(enclose):
        model = Loss()
        enclose(model)
        loss = model(batches(1)[0])
        loss /= 2
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    compare(run(off), run(on(FLOAT32)), FLOAT32)


def test_zero_gradients_stay_zero():
    model = network()
    region = prepare(model, sgd(model), "mixed_float16")
    (model(batches(1)[0]) * 0).sum().backward()
    assert all(not parameter.grad.any() for parameter in model.parameters())
    model(batches(1)[0]).sum().backward()
    assert model[0].weight.grad.any()
    assert region.scale == 65536.0


def test_the_smallest_gradients_arrive():
    model = nn.Linear(1, 1, bias=False)
    prepare(model, policy="mixed_float16")
    (model(torch.ones(1, 1)) * 2.0**-120).sum().backward()
    assert model.weight.grad.item() == 2.0**-120


def test_a_graph_that_is_kept_is_gone_through_again():
    model = network()
    prepare(model, policy=FLOAT32)
    loss = model(batches(1)[0]).square().mean()
    every = [[*model.parameters()]] * 3
    first, second, third = (
        torch.autograd.grad(loss, each, torch.tensor(factor), retain_graph=True)
        for each, factor in zip(every, (1.0, 2.0**-30, 2.0**30), strict=True)
    )
    for one, small, large in zip(first, second, third, strict=True):
        assert torch.equal(one * 2.0**-30, small)
        assert torch.equal(one * 2.0**30, large)
