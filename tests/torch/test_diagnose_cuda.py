"""The same on an accelerator, where backward runs in a thread of its own."""

import pytest
import torch
from torch import nn

from halfstep.torch import diagnose
from tests.torch import faulty_models as faulty
from tests.torch.faulty_models import mean

pytestmark = pytest.mark.gpu


def on_device(model, batch):
    return model.cuda(), batch.cuda()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (faulty.Feed, ("0.sum", "matmul", "forward", "inf")),
        (faulty.Norm, ("0", "multiply", "forward", "inf")),
        (faulty.Shallow, ("0.layers.body", "matmul", "backward", "underflow")),
    ],
)
def test_the_first_fault(kind, expected):
    model, batch = on_device(nn.Sequential(kind()), torch.ones(2, 8))
    fault = diagnose(model, batch, mean, policy="mixed_float16, scale=static(1.0)").first
    assert (fault.module, fault.operation, fault.phase, fault.kind) == expected


def test_the_way_back_has_its_modules():
    class Steep(nn.Module):
        def forward(self, x):
            x = x.half()
            return (x + (x - x.detach()) * 6e4 * 6e4).float()

    model, batch = on_device(nn.Sequential(nn.Linear(8, 8), Steep()), torch.ones(2, 8))
    fault = diagnose(model, batch, mean, loss_scale=2.0**10).first
    assert (fault.module, fault.operation, fault.phase) == ("1", "multiply", "backward")


def test_random_numbers_and_weights_stay():
    model, batch = on_device(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)), torch.ones(2, 8))
    before, weight = torch.cuda.get_rng_state(), model[1].weight.clone()
    assert not diagnose(model, batch, mean, policy="mixed_float16")
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert torch.equal(weight, model[1].weight)
