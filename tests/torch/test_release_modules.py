"""Gradients that are applied within backward of models of all kinds."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from halfstep.errors import UsageError
from halfstep.torch import prepare
from tests.torch.releasing import (
    OPTIMIZERS,
    SCALED,
    Model,
    batches,
    equal,
    loss_of,
    made,
    state_of,
    train,
)


def test_unused_parameters_do_not_hold_up_the_others():
    ours, plain = made(), made(release=False)
    for model, optimizer, _ in (ours, plain):
        torch.manual_seed(0)
        model.blocks[1].second.bias.requires_grad_(False)
        model.blocks[2].forward.region.remove()
        model.blocks[2].aside = nn.Linear(3, 3)
        optimizer.add_param_group({"params": model.blocks[2].aside.parameters()})
        release = optimizer is ours[1]
        prepare(model.blocks[2], optimizer, "mixed_bfloat16", masters="split", release=release)
        for values in batches(3):
            optimizer.zero_grad()
            loss_of(model, values).backward()
            if release:
                assert all(each.grad is None for each in model.blocks.parameters())
            optimizer.step()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
def test_a_module_that_is_called_twice(policy, whole):
    ours, plain = (made("adamw", policy, release, whole=whole) for release in (True, False))
    for model, optimizer, regions in (ours, plain):
        model.blocks.append(model.blocks[0])
        train(model, optimizer, 3)
        assert not any(each.last_step.skipped for each in regions)
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


def test_a_parameter_in_two_regions():
    ours, plain = made(), made(release=False)
    for release, (model, optimizer, _) in zip((True, False), (ours, plain), strict=True):
        for block in (model.blocks[0], model.blocks[3]):
            block.forward.region.remove()
        model.blocks[3].second.weight = model.blocks[0].second.weight
        for block in (model.blocks[0], model.blocks[3]):
            prepare(block, optimizer, "mixed_bfloat16", masters="split", release=release)
        train(model, optimizer, 3)
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


class Checkpointed(Model):
    reentrant = False

    def forward(self, values):
        for block in self.blocks:
            values = checkpoint(block, values, use_reentrant=self.reentrant)
        return self.head(values)


@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
@pytest.mark.parametrize("around", [False, True])
def test_checkpointing(policy, whole, around):
    def through(model, values):
        if not around:
            return loss_of(model, values)
        first = checkpoint(nn.Sequential(*model.blocks[:2]), values, use_reentrant=False)
        second = checkpoint(nn.Sequential(*model.blocks[2:]), first, use_reentrant=False)
        return functional.cross_entropy(model.head(second), (values.sum(dim=1) > 4).long())

    whole &= not around
    ours, plain = (made("adamw", policy, release, whole=whole) for release in (True, False))
    for model, optimizer, _ in (ours, plain):
        model.__class__ = Model if around else Checkpointed
        for values in batches(3):
            optimizer.zero_grad()
            through(model, values).backward()
            optimizer.step()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


def test_reentrant_checkpointing_of_each_block():
    ours, plain = made(whole=False), made(whole=False, release=False)
    for model, optimizer, _ in (ours, plain):
        model.__class__ = Checkpointed
        model.reentrant = True
        for values in batches(3):
            optimizer.zero_grad()
            loss_of(model, values.requires_grad_()).backward()
            optimizer.step()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


def test_reentrant_checkpoints_inside_of_a_region_are_an_error():
    model = nn.Sequential(Checkpointed(), nn.Linear(2, 2))
    model[0].reentrant = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model[0], optimizer, "mixed_bfloat16", masters="split", release=True)
    loss = loss_of(model, batches()[0].requires_grad_())
    # Each of them has a pass of its own, which would step a part of the region.
    with pytest.raises(UsageError, match="inside of the region, use"):
        loss.backward()
    model[0].reentrant = False
    optimizer.zero_grad()
    loss_of(model, batches()[0]).backward()
    assert all(each.grad is None for each in model[0].parameters())


def test_reentrant_double_use_is_an_error():
    model, _optimizer, _ = made(whole=False)
    model.__class__ = Checkpointed
    model.reentrant = True
    model.blocks.append(model.blocks[0])
    values = batches()[0].requires_grad_()
    with pytest.raises(UsageError) as caught:
        loss_of(model, values).backward()
    assert str(caught.value) == (
        "A region with release=True needs one gradient per parameter in a backward pass, got "
        "another one after they were applied. Use torch.utils.checkpoint(use_reentrant=False), or "
        "release=False."
    )


def test_a_copy_releases_as_well():
    model, optimizer, _ = made()
    copied = copy.deepcopy(model)
    other = OPTIMIZERS["adamw"](copied.parameters())
    for each in (*copied.blocks, copied):
        each.forward.region.attach(other)
    before = state_of(model, optimizer)
    train(copied, other, 3)
    assert all(each.grad is None for each in copied.blocks.parameters())
    assert equal(state_of(model, optimizer), before)
    train(model, optimizer, 3)
    assert equal(state_of(model, optimizer), state_of(copied, other))


def test_a_released_model_is_pickled():
    model, optimizer, _ = made()
    train(model, optimizer, 1)
    loaded = pickle.loads(pickle.dumps(model))
    for one, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert not one._post_accumulate_grad_hooks


# PyTorch before 2.13 asks for it while it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
def test_compiled(policy, whole):
    ours, plain = (made("adamw", policy, release, whole=whole) for release in (True, False))
    for model, optimizer, _ in (ours, plain):
        torch._dynamo.reset()
        called = torch.compile(model, backend="aot_eager")
        for values in batches(3):
            optimizer.zero_grad()
            loss_of(called, values).backward()
            if model is ours[0]:
                assert all(each.grad is None for each in model.blocks.parameters())
            optimizer.step()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))
