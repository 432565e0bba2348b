"""What gradients that are applied within backward do not go together with."""

import functools
import gc

import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch import GradScaler, prepare
from tests.torch.releasing import BLOCKS, batches, equal, loss_of, made, state_of, train


def test_all_that_an_optimizer_trains_is_refused():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError) as caught:
        prepare(model, optimizer, "mixed_bfloat16", release=True)
    assert str(caught.value) == (
        "release=True needs a part of what the optimizer trains, got all 2 parameters of it in one "
        "region. They are stepped together or not at all, so no gradient would be freed before the "
        "last one is there. Prepare parts: for block in model.blocks: prepare(block, optimizer, "
        "..., release=True)."
    )
    assert "forward" not in vars(model)
    assert "step" not in vars(optimizer)
    assert not model.weight._post_accumulate_grad_hooks


class Tamed(torch.optim.LBFGS):
    def step(self, closure):
        return super().step(closure)


class Evaluating(torch.optim.SGD):
    def step(self, *, closure):
        closure()
        super().step()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Tamed, Evaluating])
@pytest.mark.parametrize("later", [False, True])
def test_steps_that_are_taken_as_a_whole_are_refused(kind, later):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer, fine = kind(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"policy": "mixed_bfloat16", "masters": "split", "release": True}
    attach = functools.partial(prepare, model[0], **settings)
    attach = attach(fine).attach if later else attach
    with pytest.raises(UsageError) as caught:
        attach([fine, optimizer])
    assert str(caught.value) == (
        "release=True needs an optimizer that steps some parameters without the others and "
        f"without a closure, got {kind.__name__}. Use release=False, or an optimizer such as AdamW."
    )
    assert "step" not in vars(optimizer)
    assert ("step" in vars(fine)) is later
    model(torch.rand(3, 4)).sum().backward()
    assert (model[0].weight.grad is None) is later


def test_lbfgs_works_where_nothing_is_released():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.LBFGS(model.parameters())
    region = prepare(model[0], optimizer, "mixed_bfloat16", masters="split")
    prepare(model, optimizer, "mixed_bfloat16", masters="split")
    losses = []

    def evaluate():
        optimizer.zero_grad()
        losses.append(model(torch.ones(3, 4)).square().mean())
        losses[-1].backward()
        return losses[-1]

    for _ in range(3):
        optimizer.step(evaluate)
    assert losses[-1] < losses[0]
    assert region.history.steps == 3


SCALERS = {
    "halfstep": lambda: GradScaler(init_scale=1024.0),
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0),
}


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("several", [False, True])
def test_a_scaler_is_refused_before_anything_is_applied(kind, several):
    model, optimizer, _ = made()
    train(model, optimizer, 1)
    before, scaler = state_of(model, optimizer), SCALERS[kind]()
    optimizer.zero_grad()
    loss = loss_of(model, batches()[0])
    loss = scaler.scale([loss, loss])[1] if several else scaler.scale(loss)
    with pytest.raises(UsageError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "GradScaler needs gradients that wait for step(), got a region with release=True: it would "
        "apply them while they are scaled, and before it is known that none overflows. Leave the "
        "scaler out, as a region scales by itself, or use release=False."
    )
    assert equal(state_of(model, optimizer), before)
    train(model, optimizer, 1)


@pytest.mark.parametrize("kind", SCALERS)
def test_a_scaler_of_another_model_works(kind):
    model, optimizer, regions = made()
    other, scaler = nn.Linear(8, 2), SCALERS[kind]()
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    for values in batches(3):
        before = other.weight.detach().clone()
        optimizer.zero_grad()
        second.zero_grad()
        scaler.scale(loss_of(other, values)).backward()
        scaler.step(second)
        scaler.update()
        loss_of(model, values).backward()
        optimizer.step()
        assert not torch.equal(other.weight, before)
    assert [each.history.steps for each in regions] == [3] * 5
    assert not any(each.last_step.skipped for each in regions)


def test_pytorchs_scaler_is_left_alone_when_nothing_is_released():
    gc.collect()
    own = torch.amp.GradScaler.scale
    model, optimizer, regions = made()
    assert torch.amp.GradScaler.scale is not own
    for region in regions:
        region.remove()
    assert torch.amp.GradScaler.scale is own
    model, optimizer, regions = made()
    del model, optimizer, regions, region
    gc.collect()
    assert torch.amp.GradScaler.scale is own


@pytest.mark.parametrize("kind", SCALERS)
def test_a_scaler_that_is_off_works(kind):
    model, optimizer, regions = made()
    scaler = GradScaler(enabled=False)
    if kind == "torch":
        scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(model, batches()[0])).backward()
    scaler.step(optimizer)
    scaler.update()
    # The scaler tells of what it steps.
    assert [each.history.steps for each in regions[:-1]] == [1] * BLOCKS
