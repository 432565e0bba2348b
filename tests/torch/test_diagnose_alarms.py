"""No alarm where inf is meant to be there, where memory is new, or where nothing happens at all."""

import pytest
import torch
from torch import nn

from halfstep.torch import diagnose
from tests.torch.faulty_models import autocasts, inside
from tests.torch.healthy_models import HEALTHY

WAYS = ("mixed_float16", "mixed_bfloat16", "float32", "ours", "native")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HEALTHY)
def test_all_is_well(name, way):
    if (name, way) == ("lstm", "native"):
        pytest.skip("PyTorch has no LSTM in float16 on CPU")
    make, batch, loss = HEALTHY[name]
    model = nn.Sequential(make())
    if way in autocasts:
        diagnosis = diagnose(model, batch, inside(autocasts[way], loss), loss_scale=2.0**10)
    else:
        diagnosis = diagnose(model, batch, loss, policy=way)
    assert str(diagnosis).startswith("no inf and no NaN")


@pytest.mark.parametrize("way", ["ours", "native"])
def test_a_gradient_that_cancels_out(way):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.shift = nn.Linear(8, 8), nn.Parameter(torch.zeros(()))

        def forward(self, x):
            odds = (self.layer(x) + self.shift).softmax(-1)
            return odds * torch.arange(8.0) * 1e-2

    for _ in range(20):
        model, batch = nn.Sequential(Shifted()), torch.randn(2, 8)
        assert not diagnose(model, batch, inside(autocasts[way]))


def test_what_a_batch_leaves_out():
    batch = torch.tensor([1.0, float("nan"), 3.0, float("inf")])

    def loss(model, batch):
        known = batch.isfinite()
        found = model(batch.nan_to_num(0.0, 0.0)[:, None])[:, 0]
        return torch.where(known, found - batch, 0.0)[known].square().mean()

    assert not diagnose(nn.Linear(1, 1), batch, loss, policy="mixed_bfloat16")
