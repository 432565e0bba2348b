"""Gradients are applied within backward once between two steps, whatever the loop looks like."""

import contextlib

import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch import accumulate, prepare
from halfstep.torch._masters._kept import true_value
from tests.torch.releasing import (
    BLOCKS,
    SCALED,
    Model,
    batches,
    equal,
    loss_of,
    made,
    state_of,
    train,
)

ANOTHER = (
    "A region with release=True needs one backward pass between two steps of its optimizer, got "
    "another one after its gradients were applied. Wrap all but the last backward in "
    "accumulate(optimizer), or call optimizer.step() after each; inside of the region, use "
    "torch.utils.checkpoint(use_reentrant=False)."
)


@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("accumulating", [False, True])
def test_another_backward_before_the_step_is_an_error(policy, whole, bad, accumulating):
    model, optimizer, regions = made(policy=policy, whole=whole)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    model.blocks[-1].spoils = bad
    loss_of(model, batches()[0]).backward()
    model.blocks[-1].spoils = False
    before = state_of(model.blocks, optimizer)
    second = loss_of(model, batches()[1])
    within = accumulate(optimizer) if accumulating else contextlib.nullcontext()
    with pytest.raises(UsageError) as caught, within:
        second.backward()
    assert str(caught.value) == ANOTHER
    assert equal(state_of(model.blocks, optimizer), before)
    assert [each.history.steps for each in regions[:BLOCKS]] == [2] * BLOCKS
    optimizer.zero_grad()
    train(model, optimizer, 1)


@pytest.mark.parametrize("masters", ["split", "cast"])
def test_a_graph_that_was_retained(masters):
    model, optimizer, _ = made(masters=masters)
    loss = loss_of(model, batches()[0])
    loss.backward(retain_graph=True)
    before = state_of(model.blocks, optimizer)
    with pytest.raises(UsageError) as caught:
        loss.backward()
    assert str(caught.value) == ANOTHER
    assert equal(state_of(model.blocks, optimizer), before)


def test_gradients_of_inputs_in_a_retained_graph():
    model, optimizer, _ = made(masters="cast")
    values = batches()[0].requires_grad_()
    loss = loss_of(model, values)
    loss.backward(retain_graph=True)
    before, first = state_of(model, optimizer), values.grad.clone()
    assert torch.equal(torch.autograd.grad(loss, values, retain_graph=True)[0], first)
    loss.backward(inputs=[values])
    assert torch.equal(values.grad, 2 * first)
    assert equal(state_of(model, optimizer), before)


def test_a_graph_that_is_retained_while_gradients_add_up():
    ours, plain = made(), made(release=False)
    for model, optimizer, _ in (ours, plain):
        for values in batches(3):
            optimizer.zero_grad()
            output = model(values)
            with accumulate(optimizer):
                output.square().mean().backward(retain_graph=True)
            output.abs().mean().backward()
            optimizer.step()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


def test_retained_graphs_that_need_no_weights():
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    region = prepare(first, optimizer, "mixed_bfloat16", masters="split", release=True)
    output = first(batches()[0])
    output.square().mean().backward(retain_graph=True)
    optimizer.step()
    before = true_value(first.weight).clone()
    output.square().mean().backward()
    assert not torch.equal(true_value(first.weight), before)
    assert region.history.steps == 2


@pytest.mark.parametrize("order", ["zero first", "zero last", "model", "closure"])
@pytest.mark.parametrize("several", [False, True])
def test_usual_loops(order, several):
    ours, plain = made(), made(release=False)
    for model, optimizer, regions in (ours, plain):
        for values in batches(4):
            losses = [loss_of(model, part) for part in (values.split(8) if several else [values])]
            loop(order, model, optimizer, losses)
        assert [each.history.steps for each in regions] == [4] * len(regions)
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


def loop(order, model, optimizer, losses):
    def backward():
        torch.autograd.backward(losses)
        return losses[0]

    if order == "zero first":
        optimizer.zero_grad()
    if order == "closure":
        optimizer.step(backward)
    else:
        backward()
        optimizer.step()
    if order == "model":
        model.zero_grad()
    elif order != "zero first":
        optimizer.zero_grad()


def test_steps_that_are_left_out():
    model, optimizer, _ = made()
    for number, values in enumerate(batches(4)):
        optimizer.zero_grad()
        loss_of(model, values).backward()
        if number % 2:
            optimizer.step()
    optimizer.zero_grad()
    assert all(state["step"] == 4 for state in map(optimizer.state.get, model.blocks.parameters()))


def test_each_optimizer_of_a_region_has_turns_of_its_own():
    model = Model()
    parts = list(model.blocks.parameters()), list(model.head.parameters())
    first, second = (torch.optim.SGD(each, lr=0.1) for each in parts)
    for block in model.blocks:
        prepare(block, first, "mixed_bfloat16", release=True)
    loss_of(model, batches()[0]).backward()
    second.step()
    with pytest.raises(UsageError) as caught:
        loss_of(model, batches()[1]).backward()
    assert str(caught.value) == ANOTHER
    first.step()
    loss_of(model, batches()[1]).backward()


class Pair(nn.Module):
    def __init__(self, release):
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.judge = Model(), Model()
        self.maker.head = nn.Linear(8, 8)
        self.judges = torch.optim.AdamW(self.judge.parameters(), lr=1e-2)
        self.makes = torch.optim.AdamW(self.maker.parameters(), lr=1e-2)
        for model, optimizer in ((self.maker, self.makes), (self.judge, self.judges)):
            for block in model.blocks:
                prepare(block, optimizer, "mixed_bfloat16", masters="split", release=release)

    def play(self, values, around):
        made_up = self.maker(values)
        self.judges.zero_grad()
        with accumulate(self.judges):
            self.judge(values).square().mean().backward()
        self.judge(made_up.detach()).abs().mean().backward()
        self.judges.step()
        self.makes.zero_grad()
        with around(self):
            self.judge(made_up).square().mean().backward()
        self.makes.step()


@contextlib.contextmanager
def frozen(pair):
    pair.judge.requires_grad_(False)
    yield
    pair.judge.requires_grad_(True)


@pytest.mark.parametrize("around", [frozen, lambda pair: accumulate(pair.judges)])
def test_a_discriminator(around):
    ours, plain = Pair(release=True), Pair(release=False)
    for pair in (ours, plain):
        for values in batches(3):
            pair.play(values, around)
    assert equal(state_of(ours.judge, ours.judges), state_of(plain.judge, plain.judges))
    assert equal(state_of(ours.maker, ours.makes), state_of(plain.maker, plain.makes))


def test_a_discriminator_that_its_generator_would_train_is_noticed():
    pair, first, second = Pair(release=True), *batches(2)
    pair.play(first, lambda _: contextlib.nullcontext())
    with pytest.raises(UsageError) as caught:
        pair.play(second, lambda _: contextlib.nullcontext())
    assert str(caught.value) == (
        "zero_grad() needs gradients that were not applied yet, got some that a region with "
        "release=True has applied since the latest step(). Where a backward is not to train the "
        "region, as that of a generator through its discriminator, wrap it in "
        "accumulate(optimizer), or freeze the region with requires_grad_(False); else call "
        "optimizer.step() after it."
    )
    pair.play(second, frozen)
