"""What an optimizer has broken is told as that, and a step is looked at as it was before."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep.torch import keep_masters, prepare
from halfstep.torch._looking import Looking


@pytest.fixture
def looking():
    looks = Looking()
    end = looks.start()
    yield looks
    end()


def trained(dtype, kind, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4)).to(dtype)
    return model, kind(model.parameters(), **options)


def loss(model):
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    return F.cross_entropy(model(inputs).float(), torch.arange(64) % 4)


def step(looking, model, optimizer):
    looking.forget()
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()


def test_an_adam_whose_eps_is_zero(looking):
    model, optimizer = trained(torch.float16, torch.optim.Adam, lr=1e-3)
    step(looking, model, optimizer)
    looking.forget()
    loss(model)
    first, *others = looking.faults(1.0).faults
    assert first.operation == "update"
    assert not first.in_float32
    assert str(first).startswith(
        f"{first.module}: a step of Adam (lr=0.001, eps=1e-08) made the parameter {first.kind}, in "
        "float16, which ends at 65504"
    )
    assert "eps=1e-08 is 0 in float16" in first.note
    assert "keep_masters(optimizer)" in first.remedy
    assert not any(each.remedy or each.note for each in others)


@pytest.mark.parametrize("mend", ["eps", "masters"])
def test_what_is_told_mends_it(looking, mend):
    eps = 1e-4 if mend == "eps" else 1e-8
    model, optimizer = trained(torch.float16, torch.optim.Adam, lr=1e-3, eps=eps)
    if mend == "masters":
        keep_masters(optimizer)
    for _ in range(5):
        step(looking, model, optimizer)
    assert not looking.faults(1.0)
    assert all(bool(each.isfinite().all()) for each in model.parameters())


@pytest.mark.parametrize(("dtype", "rate"), [(torch.float16, 6e4), (torch.float32, 3e38)])
def test_a_learning_rate_with_which_parameters_leave_their_format(looking, dtype, rate):
    model, optimizer = trained(dtype, torch.optim.SGD, lr=rate)
    (loss(model) * 1e3).backward()
    optimizer.step()
    looking.forget()
    loss(model)
    first = looking.faults(1.0).first
    assert (first.operation, first.role) == ("update", "weight")
    assert "lower the learning rate" in first.note


def test_gradients_that_nobody_looked_at(looking):
    model, optimizer = trained(torch.float32, torch.optim.SGD, lr=0.1)
    (loss(model) * math.nan).backward()
    optimizer.step()
    looking.forget()
    loss(model)
    first = looking.faults(1.0).first
    assert first.operation == "update"
    assert first.note.startswith("its gradients were not finite")


def test_parameters_that_were_broken_from_the_start_are_data(looking):
    model, _ = trained(torch.float32, torch.optim.SGD, lr=0.1)
    nn.init.constant_(model[0].weight, math.inf)
    loss(model)
    assert looking.faults(1.0).first.operation == "data"


@pytest.mark.parametrize("masters", ["cast", "split"])
def test_a_step_is_looked_at_with_the_parameters_before_it(looking, masters):
    model, optimizer = trained(torch.float32, torch.optim.SGD, lr=1e3)
    prepare(model, optimizer, policy="mixed_bfloat16", masters=masters)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    largest = {name: float(each.abs().max()) for name, each in before.items()}
    norm = math.hypot(*(float(each.norm()) for each in before.values()))
    step(looking, model, optimizer)
    after = [each.detach().clone() for each in model.parameters()]
    rows = {row.module: row for row in looking.ranges(1.0).ranges.rows if row.role == "weight"}
    for name in ("0", "2"):
        both = largest[f"{name}.weight"], largest[f"{name}.bias"]
        assert rows[name].reference.largest == pytest.approx(max(both), rel=0.01)
    assert looking.sizes[1] == {"model": pytest.approx(norm, rel=0.01)}
    assert all(map(torch.equal, after, model.parameters()))
    step(looking, model, optimizer)
    assert all(bool(each.isfinite().all()) for each in model.parameters())


def test_parameters_are_kept_only_where_the_step_is_to_be_looked_at(looking):
    model, optimizer = trained(torch.float32, torch.optim.SGD, lr=1e3)
    step(looking, model, optimizer)
    before = looking.sizes[1]["model"]
    looking.expect(sampled=False)
    step(looking, model, optimizer)
    assert looking.sizes[1]["model"] > 10 * before
    assert not looking._updates.before


def test_the_largest_number_of_the_data(looking):
    encoder, decoder = nn.Linear(8, 8), nn.Linear(8, 8)
    inputs = torch.ones(2, 8)
    inputs[0, 0], inputs[0, 1] = -7.0, math.inf
    decoder(encoder(inputs) * 1e6).sum().backward()
    assert looking.sizes[0] == 7.0
