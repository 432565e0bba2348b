"""Activation checkpointing: what is computed again has the dtypes of the first time."""

import copy
import functools
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointFunction,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from halfstep.torch import autocast


class Block(nn.Module):
    """Two layers with a softmax and an exponential, which notes its dtypes."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(4, 4), nn.Linear(4, 4), []

    def forward(self, x):
        hidden = self.first(x)
        weights = hidden.softmax(-1)
        powers = weights.exp()
        # Noted before the last layer, since computing again stops when nothing more is needed.
        self.seen.append((hidden.dtype, weights.dtype, powers.dtype))
        return self.second(powers)


FORMS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
RULES = pytest.mark.parametrize(
    "rules", ["halfstep-1", "halfstep-1 + softmax=full", "halfstep-1 + matmul=full", "torch-2.13"]
)


def _inputs():
    return torch.randn(3, 4, requires_grad=True)


def _run(form, region, *, backward_region=None):
    """Runs a block in a region through checkpoint; returns what it saw and the gradients."""
    torch.manual_seed(0)
    block, inputs = Block(), _inputs()
    with region:
        outputs = form(block, inputs)
    if backward_region is None:
        outputs.float().pow(2).sum().backward()
    else:
        with backward_region:
            outputs.float().pow(2).sum().backward()
    return block.seen, [weight.grad for weight in block.parameters()]


def _same(form, region, **options):
    expected, gradients = _run(lambda block, x: block(x), region)
    seen, others = _run(form, region, **options)
    assert seen == expected * 2
    # Backward itself follows the region in which it is called, as in PyTorch.
    exact = not options
    for one, other in zip(gradients, others, strict=True):
        assert torch.equal(one, other) if exact else torch.allclose(one, other, rtol=0.1, atol=0.1)


@FORMS
@RULES
def test_what_is_computed_again_has_the_same_dtypes(reentrant, rules, low):
    """Recomputed values for the following tensors have different metadata."""
    form = functools.partial(checkpoint, use_reentrant=reentrant)
    _same(form, autocast("cpu", dtype=low, rules=rules))


@FORMS
@RULES
def test_backward_may_run_in_another_region(reentrant, rules, low):
    """Backward is called inside of a region with other rules or another dtype."""
    form = functools.partial(checkpoint, use_reentrant=reentrant)
    other = autocast("cpu", dtype=torch.float16, rules="halfstep-1 + softmax=refuse")
    _same(form, autocast("cpu", dtype=low, rules=rules), backward_region=other)


@FORMS
@pytest.mark.parametrize(
    "region",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", enabled=False),
        lambda: autocast("cpu", enabled=False),
    ],
    ids=["plain autocast", "plain autocast disabled", "disabled"],
)
def test_a_forward_outside_of_the_rules_is_computed_again_outside(reentrant, region):
    """A part with plain torch.autocast is checkpointed, backward runs in one of our regions."""
    form = functools.partial(checkpoint, use_reentrant=reentrant)
    rules = "halfstep-1 + softmax=full"
    _same(form, region(), backward_region=autocast("cpu", dtype=torch.bfloat16, rules=rules))


@FORMS
def test_backward_may_run_in_another_thread(reentrant, low):
    """Pipeline stages call backward from a thread of their own."""
    block = Block()
    with autocast("cpu", dtype=low, rules="halfstep-1 + softmax=full"):
        outputs = checkpoint(block, _inputs(), use_reentrant=reentrant)
    thread = threading.Thread(target=outputs.float().sum().backward)
    thread.start()
    thread.join()
    assert len(block.seen) == 2
    assert block.seen[0] == block.seen[1]


@FORMS
def test_a_region_or_an_island_inside_is_entered_again(reentrant, low):
    """The checkpointed function has a region of its own, or one with enabled=False."""
    for enabled in (True, False):
        block = Block()

        def part(x, block=block, enabled=enabled):
            with autocast("cpu", dtype=low, enabled=enabled, rules="halfstep-1 + softmax=full"):
                return block(x)

        with autocast("cpu", dtype=low):
            outputs = checkpoint(part, _inputs(), use_reentrant=reentrant)
        outputs.float().sum().backward()
        assert block.seen[0] == block.seen[1]
        assert (block.seen[0][0] == low) is enabled


@FORMS
def test_checkpoints_may_be_nested_and_in_sequence(reentrant, low):
    """Checkpoints within a checkpoint, and checkpoint_sequential."""
    blocks = nn.Sequential(*(Block() for _ in range(4)))

    def inner(x):
        return checkpoint(blocks[0], x, use_reentrant=reentrant)

    with autocast("cpu", dtype=low):
        nested = checkpoint(inner, _inputs(), use_reentrant=reentrant)
        chain = checkpoint_sequential(blocks, 2, _inputs(), use_reentrant=reentrant)
    (nested.float().sum() + chain.float().sum()).backward()
    for block in blocks:
        assert len(set(block.seen)) == 1


def test_selective_checkpointing_works(low):
    """Products are saved, everything else is computed again."""
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    form = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
    _same(form, autocast("cpu", dtype=low))


def test_the_function_behind_checkpoint_works(low):
    """Libraries call CheckpointFunction themselves."""
    from torch.utils import checkpoint as module

    for function in {CheckpointFunction, module.CheckpointFunction}:
        block = Block()
        with autocast("cpu", dtype=low):
            outputs = function.apply(block, True, _inputs())
        outputs.float().sum().backward()
        assert block.seen[0] == block.seen[1]


def test_a_checkpointed_copy_of_a_model_trains_alike(low):
    """Turning checkpointing on must not change the gradients."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    other, inputs = copy.deepcopy(model), torch.randn(3, 4)
    with autocast("cpu", dtype=low):
        model(inputs).float().pow(2).sum().backward()
        checkpoint(other, inputs, use_reentrant=False).float().pow(2).sum().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
