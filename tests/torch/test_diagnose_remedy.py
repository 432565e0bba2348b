"""The text of each remedy is executed, and the model trains with it."""

import contextlib

import pytest
import torch
from torch import nn

import halfstep.torch as hst
from halfstep.torch import diagnose
from tests.torch import faulty_models as faulty
from tests.torch.faulty_models import autocasts, inside, mean
from tests.torch.test_diagnose_edges import made_by

POLICY = "mixed_float16, scale=static(1.0)"


def model_of(kind):
    return nn.Sequential(kind(), nn.Identity())


def batch_of(kind):
    wide = (faulty.Feed, faulty.Norm, faulty.Steep, faulty.Shallow)
    rows = (faulty.TwoMasks, faulty.EmptyRow, faulty.Constant)
    shape = (1, 3, 4) if kind in rows else (2, 8 if kind in wide else 4)
    batch = torch.ones(shape)
    # A row in which nothing goes wrong, which moves the weights.
    rest = {faulty.Focal: -37.0, faulty.Divides: 5.0}
    batch[1:] = rest.get(kind, 1.0)
    return batch


def diagnosis_of(model, batch, way, scale=1.0):
    if way == "policy":
        return diagnose(model, batch, mean, policy=f"mixed_float16, scale=static({scale})")
    return diagnose(model, batch, inside(autocasts[way]), loss_scale=scale)


def names_of(remedy, model, optimizer):
    """Executes a remedy as if it were pasted into a script."""
    names = {"model": model, "optimizer": optimizer}
    exec(remedy, names)
    return names


def trains(model, batch, optimizer, context, scaler=None):
    """Returns whether every step of a short training is finite, and moves the weights."""
    before = [each.detach().clone() for each in model.parameters()]
    for _ in range(4):
        optimizer.zero_grad()
        with context:
            loss = mean(model, batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        assert loss.isfinite()
        assert all(each.grad.isfinite().all() for each in model.parameters())
        optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
    after = [*model.parameters()]
    moved = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    return all(each.isfinite().all() for each in after) and any(moved)


def context_of(way, names=()):
    if "lower" in names:
        return names["lower"]
    if "region" in names:
        return contextlib.nullcontext()
    return hst.autocast("cpu", dtype=torch.float16)


@pytest.mark.parametrize("way", ["policy", "ours", "native"])
@pytest.mark.parametrize(
    ("kind", "target"),
    [(faulty.Feed, "matmul"), (faulty.Norm, "aten::mul"), (faulty.Adds, "aten::add")],
)
def test_rules(kind, target, way):
    model, batch = model_of(kind), batch_of(kind)
    remedy = diagnosis_of(model, batch, way).first.remedy
    assert f'with_rule("{target}", "full"' in remedy
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    names = names_of(remedy, model, optimizer)
    assert trains(model, batch, optimizer, context_of(way, names))


@pytest.mark.parametrize("way", ["policy", "ours", "native"])
@pytest.mark.parametrize("kind", [faulty.Focal, faulty.Divides])
def test_an_epsilon_that_the_format_has(kind, way):
    model, batch = model_of(kind), batch_of(kind)
    *_, epsilon, placed = diagnosis_of(model, batch, way).first.remedy.splitlines()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model[0].epsilon = names_of(epsilon, model, optimizer)["epsilon"]
    assert placed.startswith("h = ")
    assert trains(model, batch, optimizer, context_of(way))


@pytest.mark.parametrize("way", ["policy", "ours", "native"])
@pytest.mark.parametrize("kind", [faulty.TwoMasks, faulty.EmptyRow, faulty.Selected])
def test_a_line_that_is_rewritten(kind, way):
    model, batch = model_of(kind), batch_of(kind)
    model[0].text = diagnosis_of(model, batch, way).first.remedy
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    assert trains(model, batch, optimizer, context_of(way))


@pytest.mark.parametrize("way", ["policy", "ours", "native"])
def test_a_number_that_the_format_has(way):
    model, batch = model_of(faulty.Constant), batch_of(faulty.Constant)
    fault = diagnosis_of(model, batch, way).first
    assert (fault.operation, "-1e+09" in fault.remedy) == ("multiply", True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model[0].low = names_of(fault.remedy, model, optimizer)["instead"]
    assert trains(model, batch, optimizer, context_of(way))


@pytest.mark.parametrize("way", ["policy", "ours", "native"])
@pytest.mark.parametrize(("kind", "scale"), [(faulty.Steep, 2.0**16), (faulty.Shallow, 1.0)])
def test_a_scale(kind, scale, way):
    model, batch = model_of(kind), batch_of(kind)
    fault = diagnosis_of(model, batch, way, scale).first
    assert (fault.operation, fault.phase) == ("matmul", "backward")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    names = names_of(fault.remedy, model, optimizer)
    assert trains(model, batch, optimizer, context_of(way, names), names.get("scaler"))
    assert all(each.grad.any() for each in model.parameters())


def test_autocast_of_ours():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    nn.init.constant_(model[0].bias, 12.0)

    def loss(model, batch):
        return (1 / (1 + torch.exp(model(batch)))).float().mean()

    batch = torch.ones(2, 4)
    fault = diagnose(model, batch, inside(torch.autocast, loss), loss_scale=2.0**20).first
    assert (fault.module, fault.operation) == ("loss_fn", "exp")
    lower = names_of(fault.remedy, model, None)["lower"]
    with lower:
        assert torch.exp(model(batch)).isfinite().all()


def test_bfloat16_where_no_rule_helps():
    class InPlace(nn.Module):
        def forward(self, x):
            for _ in range(16):
                x.mul_(2)
            return x * 1e-5

    model, batch = nn.Sequential(nn.Linear(4, 4), InPlace()), torch.ones(2, 4)
    fault = diagnose(model, batch, inside(autocasts["ours"])).first
    assert (fault.module, fault.operation) == ("1", "multiply")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    names = names_of(fault.remedy, model, optimizer)
    assert names["lower"].fast_dtype is torch.bfloat16
    assert trains(model, batch, optimizer, names["lower"])


class Unit(nn.Module):
    """Divides by a norm that is zero for a row: its gradient is 1e12, which float32 holds."""

    def forward(self, x):
        return nn.functional.normalize(x, dim=-1)


def test_a_scale_that_no_region_reaches_is_no_remedy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), Unit(), nn.Linear(8, 1))
    batch = torch.cat([torch.randn(3, 4), torch.zeros(1, 4)])
    fault = diagnose(model, batch, mean, policy="mixed_float16").first
    assert (fault.module, fault.operation, fault.phase) == ("1", "divide", "backward")
    assert 'with_rule("aten::div", "full"' in fault.remedy
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    names = names_of(fault.remedy, model, optimizer)
    for _ in range(6):
        optimizer.zero_grad()
        mean(model, batch).backward()
        optimizer.step()
    assert not names["region"].last_step.skipped


def test_a_logarithm_is_not_left_out_of_a_loss():
    """Else a prediction that is quite wrong would cost nothing."""
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, 30.0)
    batch = torch.ones(8, 4), (torch.arange(8) % 2).float()

    def entropy(model, batch):
        chances, wanted = torch.sigmoid(model(batch[0])).squeeze(-1), batch[1]
        return -(wanted * torch.log(chances) + (1 - wanted) * torch.log(1 - chances)).mean()

    fault = diagnose(model, batch, entropy, policy="mixed_float16").first
    assert (fault.operation, fault.phase) == ("log", "forward")
    assert made_by(fault.remedy, {"torch": torch, "h": torch.zeros(1)}).item() < -80
