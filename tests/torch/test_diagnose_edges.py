"""Where an operation has no derivative in half precision, what is written keeps off that place."""

import pytest
import torch
from torch import nn

from halfstep.torch import diagnose
from tests.torch.faulty_models import Written, autocasts, inside, mean

EDGES = {
    "acos": lambda h: torch.acos(h),
    "asin": lambda h: torch.asin(h),
    "atanh": lambda h: torch.atanh(h),
    "log1p": lambda h: torch.log1p(-h),
    "log": lambda h: torch.log(1 - h),
    "sqrt": lambda h: torch.sqrt(1 - h),
    "power": lambda h: (1 - h) ** 0.5,
}
# What the operation gets, of h.
TAKEN = {"log1p": lambda h: -h, **dict.fromkeys(("log", "sqrt", "power"), lambda h: 1 - h)}
CALLS = {"log1p": torch.log1p, "log": torch.log, "sqrt": torch.sqrt, "power": lambda h: h**0.5}


class Rounded(Written):
    """Is so close to 1 that half precision rounds to it, in one of its two rows."""

    def __init__(self, name, dtype):
        super().__init__()
        self.layer, self.name, self.dtype = nn.Linear(2, 2), name, dtype
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        close = torch.sin(self.layer(x)).to(self.dtype)
        if not self.text:
            return EDGES[self.name](close)
        taken = self.rewritten("h", TAKEN.get(self.name, lambda h: h)(close))
        return CALLS.get(self.name, EDGES[self.name])(taken)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["ours", "native"])
@pytest.mark.parametrize("name", EDGES)
def test_a_derivative_at_a_rounded_number(name, way, dtype):
    model, batch = nn.Sequential(Rounded(name, dtype)), torch.tensor([[1.5708, 0.5], [0.25, 0.5]])
    loss_fn = inside(autocasts[way], mean, dtype)
    fault = diagnose(model, batch, loss_fn).first
    assert (fault.module, fault.operation) == ("0", name)
    *_, epsilon, placed = fault.remedy.splitlines()
    number = float(epsilon.split()[2])
    assert number >= torch.finfo(dtype).tiny
    assert placed.startswith("h = h.clamp(")
    assert f"# h is what goes into {name}" in placed
    model[0].text = fault.remedy
    assert not diagnose(model, batch, loss_fn)
    loss = loss_fn(model, batch)
    loss.backward()
    assert loss.isfinite()
    assert model[0].layer.weight.grad.isfinite().all()
    assert model[0].layer.weight.grad.any()
