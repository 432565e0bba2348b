"""Several backward passes where gradients are applied within backward."""

import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch import accumulate
from tests.torch.releasing import BLOCKS, SCALED, batches, equal, loss_of, made, state_of


@pytest.mark.parametrize("policy", ["mixed_bfloat16", SCALED])
def test_micro_batches_add_up(policy):
    ours, plain = (made("adamw", policy, release, whole=False) for release in (True, False))
    for values in batches(3):
        model, optimizer, _ = ours
        optimizer.zero_grad()
        with accumulate(optimizer):
            for part in values.split(4)[:-1]:
                loss_of(model, part).backward()
            assert all(each.grad is not None for each in model.parameters())
        loss_of(model, values.split(4)[-1]).backward()
        assert all(each.grad is None for each in model.blocks.parameters())
        optimizer.step()
        model, optimizer, _ = plain
        optimizer.zero_grad()
        for part in values.split(4):
            loss_of(model, part).backward()
        optimizer.step()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


def test_accumulating_is_nested_and_ends_with_an_error():
    model, optimizer, _ = made()

    def fails():
        with accumulate(optimizer):
            with accumulate(optimizer):
                pass
            loss_of(model, batches()[0]).backward()
            assert model.blocks[0].first.weight.grad is not None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    loss_of(model, batches()[0]).backward()
    assert model.blocks[0].first.weight.grad is None


def test_what_was_accumulated_can_be_stepped_without_another_backward():
    ours, plain = made(), made(release=False)
    for model, optimizer, _ in (ours, plain):
        with accumulate(optimizer):
            loss_of(model, batches()[0]).backward()
        optimizer.step()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))
    assert [each.history.steps for each in ours[2]] == [1] * 5


def test_accumulate_needs_an_optimizer():
    with pytest.raises(UsageError) as caught, accumulate(nn.Linear(1, 1)):
        pass
    assert str(caught.value) == (
        "accumulate() needs an optimizer, got Linear. Pass the torch.optim.Optimizer whose "
        "parameters were in backward()."
    )


def test_accumulate_leaves_an_optimizer_without_regions_as_it_was():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with accumulate(optimizer):
        pass
    assert "step" not in vars(optimizer)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # it is cleared
@pytest.mark.parametrize("policy", ["mixed_bfloat16", SCALED])
def test_a_graph_of_gradients_leaves_them_for_the_step(policy):
    ours, plain = (made("adamw", policy, release, whole=False) for release in (True, False))
    for model, optimizer, regions in (ours, plain):
        for values in batches(2):
            optimizer.zero_grad()
            loss_of(model, values).backward(create_graph=True)
            assert all(each.grad is not None for each in model.parameters())
            optimizer.step()
            assert not any(each.last_step.skipped for each in regions)
            model.zero_grad()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))
    assert [each.history.steps for each in ours[2]] == [2] * BLOCKS


@pytest.mark.parametrize("policy", ["mixed_bfloat16", SCALED])
def test_gradient_penalties(policy):
    ours, plain = (made("sgd", policy, release, whole=False) for release in (True, False))
    for model, optimizer, _ in (ours, plain):
        for values in batches(2):
            optimizer.zero_grad()
            values.requires_grad_()
            (slope,) = torch.autograd.grad(model(values).sum(), values, create_graph=True)
            slope.square().mean().backward()
            optimizer.step()
    one, other = state_of(*ours[:2]), state_of(*plain[:2])
    assert equal(one, other)


def test_autograd_grad_applies_nothing():
    model, optimizer, regions = made()
    before = state_of(model, optimizer)
    found = torch.autograd.grad(loss_of(model, batches()[0]), [*model.parameters()])
    assert all(each is not None for each in found)
    assert equal(state_of(model, optimizer), before)
    assert regions[0].history.steps == 0
