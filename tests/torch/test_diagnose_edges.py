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
        taken = TAKEN.get(self.name, lambda h: h)(close)
        if "returns" in self.text:
            return made_by(self.text, {"torch": torch, "h": taken, "power": 0.5})
        return CALLS.get(self.name, EDGES[self.name])(self.rewritten("h", taken))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["ours", "native"])
@pytest.mark.parametrize("name", EDGES)
def test_a_derivative_at_a_rounded_number(name, way, dtype):
    model, batch = nn.Sequential(Rounded(name, dtype)), torch.tensor([[1.5708, 0.5], [0.25, 0.5]])
    loss_fn = inside(autocasts[way], mean, dtype)
    fault = diagnose(model, batch, loss_fn).first
    assert (fault.module, fault.operation) == ("0", name)
    *_, epsilon, placed = fault.remedy.splitlines()
    if name in ("log", "log1p", "atanh"):
        assert float(epsilon.split()[2]) >= torch.finfo(dtype).tiny
        assert placed.startswith("h = torch.where(")
        assert f"# h is what goes into {name}" in placed
    else:
        assert placed.endswith(f"# in place of what {name} returns")
    model[0].text = fault.remedy
    assert not diagnose(model, batch, loss_fn)
    loss = loss_fn(model, batch)
    loss.backward()
    assert loss.isfinite()
    assert model[0].layer.weight.grad.isfinite().all()
    assert model[0].layer.weight.grad.any()


class Left(nn.Module):
    """Leaves out afterwards where an operation has no value, in float32."""

    def __init__(self, call):
        super().__init__()
        self.layer, self.call = nn.Linear(3, 3, bias=False), call
        nn.init.eye_(self.layer.weight)

    def forward(self, x):
        values = self.call(self.layer(x).float())
        return torch.where(values.isfinite(), values, 0.0)


# What is called, at which numbers, and what else the text names.
KEPT = {
    "whole power": (lambda h: h**-2, 2.0, {"power": -2}),
    "odd power": (lambda h: h**-3, 2.0, {"power": -3}),
    "root": (lambda h: h.square() ** -0.5, 2.0, {"power": -0.5}),
    "acos": (torch.acos, 1.0, {}),
    "asin": (torch.asin, 1.0, {}),
    "dividend": (lambda h: 3 / h, 2.0, {"dividend": 3}),
    "divide": (lambda h: h.cos() / h, 2.0, None),
}


@pytest.mark.parametrize("way", ["mixed_float16", "mixed_bfloat16", "float32"])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_written_keeps_every_value_that_there_is(name, way):
    call, size, names = KEPT[name]
    batch = torch.tensor([[-size, 0.0, size]])
    model = Left(call)
    fault = diagnose(model, batch, mean, policy=way).first
    assert (fault.in_float32, fault.phase) == (True, "backward")
    taken = batch[0].square() if name == "root" else batch[0]
    h = taken.clone().requires_grad_()
    names = {"dividend": h.detach().cos()} if names is None else names
    made = made_by(fault.remedy, {"h": h, "torch": torch, **names})
    made.sum().backward()
    assert h.grad.isfinite().all()
    expected = model(batch)[0]
    torch.testing.assert_close(made, expected, atol=1e-3, rtol=1e-6)


def made_by(text, names):
    """Returns what the last line of a text is, with what the lines before it name."""
    *before, last = text.splitlines()
    exec("\n".join(before), names)
    return eval(last, names)
