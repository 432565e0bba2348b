"""Regions around, inside and below what computes a part of them again or otherwise."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.torch import prepare
from tests.torch.test_region_boundary import compare, gradients
from tests.torch.test_region_loops import FLOAT16, FLOAT32, HALF, batches, network, off, on


def inside(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = network(0, outputs=6), network(1)
            self.drop = nn.Dropout(0.4)

        def forward(self, values):
            hidden = checkpoint(self.first, values, use_reentrant=reentrant)
            return checkpoint(self.later, hidden, use_reentrant=reentrant)

        def later(self, values):
            return self.second(self.drop(values))

    return Checkpointed


@pytest.mark.parametrize("policy", [FLOAT32, *HALF])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("around", [True, False])
def test_activation_checkpointing(reentrant, around, policy):
    def run(enclose, keep):
        torch.manual_seed(0)
        model = network() if around else inside(reentrant)()
        enclose(model)
        values = batches(1)[0].requires_grad_()
        call = checkpoint if around and not keep else lambda function, *args, **_: function(*args)
        torch.manual_seed(5)
        call(model, values, use_reentrant=reentrant).square().mean().mul(1e-5).backward()
        return [values.grad, *(parameter.grad for parameter in model.parameters())]

    compare(run(off, True), run(on(policy), False), policy)


class Checkpointing(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = network(0, outputs=6)

    def forward(self, values):
        return checkpoint(self.part, values, use_reentrant=False)


@pytest.mark.parametrize("policy", [FLOAT32, *HALF])
def test_a_region_whose_inner_region_is_checkpointed(policy):
    def run(enclose):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Checkpointing(), nn.Linear(6, 2))
        enclose(model[1].part)
        enclose(model)
        model(batches(1)[0]).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    compare(run(off), run(on(policy)), policy)


OUTER_AND_INNER = [
    (FLOAT16, "float32"),
    (FLOAT16, FLOAT32),
    (FLOAT16, "mixed_bfloat16"),
    ("mixed_bfloat16", FLOAT16),
    (FLOAT32, FLOAT16),
    ("float32", FLOAT16),
    (FLOAT16, FLOAT16),
]


@pytest.mark.parametrize("factor", [1.0, 1e-6])
@pytest.mark.parametrize(("outer", "inner"), OUTER_AND_INNER)
def test_a_region_in_a_region(outer, inner, factor):
    seen = []

    class Probe(nn.Module):
        def forward(self, values):
            seen.append(values.dtype)
            return values

    def make():
        inner = network(1, outputs=6).append(Probe())
        return nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 2))

    def enclose(model):
        prepare(model[1], policy=inner)
        prepare(model, policy=outer)

    expected = gradients(off, make, factor)
    seen.clear()
    compare(expected, gradients(enclose, make, factor), FLOAT16)
    low = {FLOAT16: torch.float16, "mixed_bfloat16": torch.bfloat16}
    assert seen == [low.get(inner, torch.float32)]
