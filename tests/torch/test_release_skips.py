"""Gradients that are applied within backward: regions are stepped as wholes, or left."""

import pytest
import torch
from torch import nn

from halfstep.torch import prepare
from tests.torch.releasing import (
    BLOCKS,
    OPTIMIZERS,
    SCALED,
    all_changed,
    batches,
    equal,
    loss_of,
    made,
    state_of,
    train,
)


@pytest.mark.parametrize("masters", ["split", "cast"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("spoiled", range(BLOCKS))
@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
def test_regions_are_stepped_as_wholes(kind, policy, whole, spoiled, masters):
    model, optimizer, regions = made(kind, policy, whole=whole, masters=masters)
    train(model, optimizer, 2)
    before = [state_of(each, optimizer) for each in model.blocks]
    steps = [each.history.steps for each in regions]
    model.blocks[spoiled].spoils = True
    optimizer.zero_grad()
    loss_of(model, batches()[2]).backward()
    for number, block in enumerate(model.blocks):
        record, history = regions[number].last_step, regions[number].history
        assert history.steps == steps[number] + 1
        if number <= spoiled:
            assert equal(state_of(block, optimizer), before[number])
            assert record.skipped
            assert history.skipped == 1
            assert "finite" in record.reason or "inf" in record.reason or "nan" in record.reason
        else:
            assert all_changed(block, before[number], optimizer)
            assert not record.skipped
            assert history.skipped == 0
    assert all(each.grad is None for each in model.blocks.parameters())
    model.blocks[spoiled].spoils = False
    optimizer.step()
    train(model, optimizer, 1)
    assert not any(each.last_step.skipped for each in regions)


@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
def test_what_backward_reaches_after_a_bad_gradient_is_left_although_it_is_finite(policy, whole):
    model, optimizer, regions = made(policy=policy, whole=whole)
    train(model, optimizer, 2)
    before = [state_of(each, optimizer) for each in model.blocks]
    bad = model.blocks[2].second.bias.register_hook(lambda gradient: gradient * float("nan"))
    optimizer.zero_grad()
    loss_of(model, batches()[2]).backward()
    bad.remove()
    for number, block in enumerate(model.blocks):
        if number <= 2:
            assert equal(state_of(block, optimizer), before[number]), number
            assert regions[number].last_step.skipped
            assert regions[number].last_step.reason
        else:
            assert all_changed(block, before[number], optimizer)
    assert regions[2].last_step.nonfinite == (("second.bias", "nan"),)
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, batches()[2]).backward()
    optimizer.step()
    assert not any(each.last_step.skipped for each in regions)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_leaves_all(kind, policy, whole, value):
    model, optimizer, regions = made(kind, policy, whole=whole)
    train(model, optimizer, 2)
    before = state_of(model, optimizer)
    optimizer.zero_grad()
    (loss_of(model, batches()[2]) * value).backward()
    optimizer.step()
    assert equal(state_of(model, optimizer), before)
    assert all(each.last_step.skipped for each in regions)
    assert all(each.history.steps == 3 for each in regions)
    if policy == SCALED:
        assert "reached the model was not finite" in regions[0].last_step.reason
        assert all(each.scale == 1024.0 for each in regions)


def test_an_overflow_inside_a_region_lowers_its_scale_only():
    model, _optimizer, regions = made(policy=SCALED, whole=False)
    model.blocks[1].spoils = True
    loss_of(model, batches()[0]).backward()
    assert regions[1].scale < 1024.0
    assert [each.scale for each in (regions[0], *regions[2:])] == [1024.0] * 3


def test_a_backward_that_fails_leaves_the_next_one_right():
    model, optimizer, _ = made()
    failing = model.blocks[1].first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batches()[0]).backward()
    failing.remove()
    before = [state_of(each, optimizer) for each in model.blocks]
    optimizer.zero_grad()
    loss_of(model, batches()[1]).backward()
    assert all(
        all_changed(each, old, optimizer) for each, old in zip(model.blocks, before, strict=True)
    )
    assert all(each.grad is None for each in model.blocks.parameters())


def test_the_rest_is_left_where_a_released_gradient_was_bad():
    torch.manual_seed(0)
    first, block = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(first, block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(block, optimizer, "mixed_bfloat16", masters="split", release=True)
    outer = prepare(model, optimizer, "mixed_bfloat16", masters="split")
    hook = block.weight.register_hook(lambda gradient: gradient * torch.inf)
    before = [each.detach().clone() for each in model.parameters()]
    model(torch.rand(2, 4)).sum().backward()
    assert first.weight.grad.isfinite().all()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert outer.last_step.skipped
    assert outer.last_step.reason == "a gradient that backward had reached before was not finite"
    hook.remove()
    optimizer.zero_grad()
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    assert not outer.last_step.skipped
    assert not torch.equal(first.weight, before[0])
