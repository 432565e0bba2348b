"""Several regions and autocasts in one step: told is the one in which the operation ran."""

import contextlib

import pytest
import torch
from torch import nn

from halfstep import Policy, Rules
from halfstep.torch import autocast, diagnose, prepare
from tests.torch.test_diagnose_remedy import names_of


class Generator(nn.Module):
    """Makes what a discriminator looks at."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, noise):
        return self.last(torch.relu(self.first(noise)))


class Discriminator(nn.Module):
    """Sums to more than float16 can hold, and hides it."""

    def __init__(self):
        super().__init__()
        self.grow, self.sum = nn.Linear(8, 64), nn.Linear(64, 1)
        for each, value in ((self.grow.weight, 40.0), (self.grow.bias, 100.0)):
            nn.init.constant_(each, value)
        nn.init.constant_(self.sum.weight, 30.0)

    def forward(self, images):
        return torch.tanh(self.sum(torch.relu(self.grow(images))) * 1e-6)


def mean(model, batch):
    return model["looks"](model["makes"](batch)).float().mean()


@pytest.fixture
def pair():
    torch.manual_seed(0)
    return nn.ModuleDict({"makes": Generator(), "looks": Discriminator()})


@pytest.fixture
def noise():
    return torch.randn(4, 8)


def place(fault):
    return fault.module, fault.operation, fault.phase


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=1e-9)


def trained(pair, noise, context=contextlib.nullcontext):
    """Returns whether a few steps of the pair are finite, those of the discriminator wide."""
    optimizer = optimizer_of(pair)
    for _ in range(3):
        optimizer.zero_grad()
        with context():
            loss = mean(pair, noise)
        loss.backward()
        assert all(each.grad.isfinite().all() for each in pair.parameters())
        optimizer.step()
    return True


def test_the_second_of_two_regions(pair, noise):
    optimizers = [optimizer_of(each) for each in pair.values()]
    regions = [prepare(*each) for each in zip(pair.values(), optimizers, strict=True)]
    fault = diagnose(pair, noise, mean).first
    assert place(fault) == ("looks.sum", "matmul", "forward")
    assert 'where="sum"' in fault.remedy
    assert 'prepare(model.get_submodule("looks"), optimizer, policy=policy)' in fault.remedy
    assert "# in place of how the Discriminator was prepared" in fault.remedy
    regions[1].remove()
    names_of(fault.remedy, pair, optimizer_of(pair["looks"]))
    assert not diagnose(pair, noise, mean)
    assert trained(pair, noise)


def test_each_of_two_regions_gets_its_own_rules(pair, noise):
    nn.init.constant_(pair["makes"].first.weight, 3e4)
    optimizers = [optimizer_of(each) for each in pair.values()]
    regions = [prepare(*each) for each in zip(pair.values(), optimizers, strict=True)]

    def apart(model, batch):
        made = model["makes"](batch.abs() + 1)
        return model["looks"](torch.tanh(made).abs()).float().mean()

    fault = diagnose(pair, noise, apart).first
    assert place(fault)[0] == "makes.first"
    assert fault.remedy.count("prepare(model.get_submodule(") == 2
    for each in regions:
        each.remove()
    names_of(fault.remedy, pair, optimizer_of(pair))
    assert not diagnose(pair, noise, apart)


def test_a_model_that_only_the_loss_knows(pair, noise):
    makes, looks = pair.values()
    looks.norm = nn.BatchNorm1d(8)
    looks.forward = lambda x: Discriminator.forward(looks, looks.norm(x))
    region = prepare(looks, optimizer_of(looks))
    before = [each.clone() for each in looks.buffers()]
    fault = diagnose(makes, noise, lambda model, batch: looks(model(batch)).mean()).first
    assert place(fault) == ("looks.sum", "matmul", "forward")
    assert 'where="sum"' in fault.remedy
    assert fault.remedy.endswith("  # model: looks")
    assert all(map(torch.equal, before, looks.buffers()))
    assert all(each.grad is None for each in looks.parameters())
    assert (region.scale, region.history.skipped) == (65536.0, 0)
    region.remove()
    names_of(fault.remedy, looks, optimizer_of(looks))
    assert not diagnose(makes, noise, lambda model, batch: looks(model(batch)).mean())


def bfloat16_and(context):
    """Returns a loss of which only the discriminator computes in float16."""

    def loss(model, batch):
        with autocast("cpu", dtype=torch.bfloat16):
            made = model["makes"](batch)
        with context("cpu", dtype=torch.float16):
            return model["looks"](made).float().mean()

    return loss


def nested(model, batch):
    with autocast("cpu", dtype=torch.bfloat16):
        made = model["makes"](batch)
        with autocast("cpu", dtype=torch.float16):
            return model["looks"](made).float().mean()


@pytest.mark.parametrize("loss", [bfloat16_and(autocast), bfloat16_and(torch.autocast), nested])
def test_the_autocast_in_force_and_not_the_first(pair, noise, loss):
    fault = diagnose(pair, noise, loss).first
    assert (place(fault)[0], fault.dtype) == ("looks.sum", "float16")
    assert 'lower = autocast("cpu", dtype=torch.float16, rules=rules)' in fault.remedy
    lower = names_of(fault.remedy, pair, None)["lower"]

    def mended(model, batch):
        with autocast("cpu", dtype=torch.bfloat16):
            made = model["makes"](batch)
        with lower:
            return model["looks"](made).float().mean()

    assert not diagnose(pair, noise, mended)


def test_an_island_in_which_nothing_is_cast(pair, noise):
    def island(model, batch):
        with autocast("cpu", dtype=torch.float16):
            made = model["makes"](batch)
            with autocast("cpu", enabled=False):
                return model["looks"](made.float()).mean()

    assert not diagnose(pair, noise, island)


def test_a_scale_is_that_of_the_region_with_the_fault(pair, noise):
    steep = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    for layer in steep:
        nn.init.constant_(layer.weight, 60.0)
    both = nn.ModuleDict({"makes": pair["makes"], "looks": steep})
    prepare(both["makes"], policy="mixed_float16, scale=static(2.0)")
    region = prepare(both["looks"], policy="mixed_float16, scale=static(65536.0)")

    def loss(model, batch):
        return (model["looks"](model["makes"](batch) * 1e-4) * 1e-3).mean()

    fault = diagnose(both, noise, loss).first
    assert (fault.module.partition(".")[0], fault.phase) == ("looks", "backward")
    assert diagnose(both, noise, loss).loss_scale == 65536.0
    region.remove()
    names_of(fault.remedy, both, optimizer_of(steep))
    assert not diagnose(both, noise, loss)


def test_a_part_that_a_checkpoint_computes_again(pair, noise):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.looks = Discriminator()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.looks, x, use_reentrant=False)

    model = nn.Sequential(pair["makes"], Again())
    fault = diagnose(model, noise, lambda m, b: m(b).mean(), policy="mixed_float16").first
    assert place(fault) == ("1.looks.sum", "matmul", "forward")
    assert 'where="1.looks.sum"' in fault.remedy


@pytest.mark.parametrize("located", [False, True])
def test_an_autocast_within_a_region(noise, located):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.looks = nn.Linear(8, 8), Discriminator()
            self.lower = autocast("cpu", dtype=torch.float16)

        def forward(self, x):
            x = self.enter(x)
            with self.lower:
                return self.looks(x)

    rules = Rules().with_rule("softmax", "keep", where="looks", reason="-") if located else Rules()
    model = Mixed()
    optimizer = optimizer_of(model)
    prepare(model, optimizer, Policy.named("mixed_bfloat16").with_(rules=rules))
    fault = diagnose(model, noise, lambda model, batch: model(batch).mean()).first
    assert f'where="{"looks.sum" if located else "sum"}"' in fault.remedy
    model.lower = names_of(fault.remedy, model, None)["lower"]
    assert not diagnose(model, noise, lambda model, batch: model(batch).mean())
    assert model(noise).isfinite().all()
