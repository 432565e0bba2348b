"""No alarm where inf is meant to be there, where memory is new, or where nothing happens at all."""

import pytest
import torch
from torch import nn

from halfstep.torch import diagnose
from tests.torch.faulty_models import autocasts, inside, mean
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


class Masked(nn.Module):
    """Has NaN in its backward, which it masks, and gradients that a scale makes overflow."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        hidden = self.layer(x)
        return torch.where(hidden > 0, torch.log(torch.relu(hidden)), 0.0)


@pytest.mark.parametrize(("seed", "width"), [(1, 16), (1, 64), (1, 256), (2, 4), (3, 64)])
def test_a_scale_that_backs_off_behind_a_masked_nan(seed, width):
    torch.manual_seed(seed)
    model, batch = nn.Sequential(Masked(width)), torch.randn(64, width)
    diagnosis = diagnose(model, batch, mean, policy="mixed_float16")
    assert str(diagnosis).startswith("no inf and no NaN")
    assert diagnosis.loss_scale < 2.0**16


def test_a_nan_that_no_scale_takes_away_is_told_where_it_begins():
    class Root(nn.Module):
        def forward(self, x):
            return torch.where(x > 0, torch.sqrt(x * (x > 0)), 0.0)

    model = nn.Sequential(nn.Linear(4, 4), Root())
    diagnosis = diagnose(model, torch.randn(8, 4), mean, policy="mixed_float16")
    assert (diagnosis.first.operation, diagnosis.first.phase) == ("sqrt", "backward")
    assert diagnosis.loss_scale == 2.0**16
