"""What is said besides the place: which parameter, what a scaler does, what diverges; and names."""

import pytest
import torch
from torch import nn

from halfstep.torch import GradScaler, diagnose, prepare
from tests.torch import faulty_models as faulty
from tests.torch.faulty_models import autocasts, inside, mean
from tests.torch.test_diagnose_remedy import names_of

STATIC = "mixed_float16, scale=static(1.0)"


class Classifier(nn.Module):
    """Has two parameters that may not fit, in a module with a name."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(torch.tanh(self.fc(x)))


@pytest.mark.parametrize("name", ["fc.weight", "fc.bias"])
def test_a_parameter_that_does_not_fit_is_named(name):
    model = Classifier()
    nn.init.constant_(model.get_parameter(name), 1e5)
    fault = diagnose(model, torch.randn(3, 4), mean, policy=STATIC).first
    assert (fault.module, fault.operation, fault.role) == ("fc", "cast", "weight")
    assert fault.parameter == name
    assert str(fault).startswith(f"fc: {name} became inf in the forward pass, in the cast to floa")
    assert f"\n  {name} of shape " in str(fault)


@pytest.mark.parametrize("name", ["fc.weight", "fc.bias", "norm.running_mean"])
def test_what_is_broken_from_the_start_is_named(name):
    model = Classifier().eval()
    model.state_dict()[name].fill_(torch.nan)
    fault = diagnose(model, torch.randn(3, 4), mean, policy=STATIC).first
    assert (fault.module, fault.parameter) == (name, name)
    held = "buffer" if "running" in name else "parameter"
    assert str(fault).startswith(f"{name}: the {held} holds nan before the model computes anythi")


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize(
    ("name", "size", "factor"), [("0.weight", 300.0, 60.0), ("0.bias", 1e-3, 3e4)]
)
def test_the_gradient_of_a_parameter_is_named(name, size, factor, outputs):
    model = nn.Sequential(nn.Linear(4, outputs), nn.Identity())
    nn.init.constant_(model[0].weight, 1e-3)

    def summed(model, batch):
        return (model(batch) * factor).float().sum()

    fault = diagnose(model, torch.full((4, 4), size), inside(autocasts["native"], summed)).first
    assert (fault.phase, fault.role, fault.parameter) == ("backward", "grad_weight", name)
    assert f"\n  the gradient of {name} of shape " in str(fault)


@pytest.mark.parametrize("way", ["ours", "native"])
def test_a_scale_that_a_scaler_begins_with(way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    batch = 3 * torch.randn(32, 16), torch.randint(10, (32,))

    def entropy(model, batch):
        return 8 * nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    loss_fn = inside(autocasts[way], entropy)
    fault = diagnose(model, batch, loss_fn, loss_scale=GradScaler().get_scale()).first
    assert fault.phase == "backward"
    assert "skips such a step and halves its scale by itself" in fault.note
    assert fault.note in str(fault)
    assert "with_rule" not in fault.remedy
    scaler = names_of(fault.remedy, model, None)["scaler"]
    assert not diagnose(model, batch, loss_fn, loss_scale=scaler.get_scale())


def regressing(rate, steps):
    """Returns a model after so many steps of a regression, and the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model.append(nn.Linear(64, 1))
    batch = torch.randn(64, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        squared(model, batch).backward()
        optimizer.step()
    return model, batch


def squared(model, batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def test_weights_that_diverge():
    model, batch = regressing(0.9, 3)
    fault = diagnose(model, batch, squared, policy=STATIC).first
    assert (fault.phase, fault.in_float32) == ("forward", False)
    assert "then lower the learning rate, for no format helps" in fault.note
    assert "in float32 the loss is 2.07e+13" in fault.note


@pytest.mark.parametrize("kind", [faulty.Feed, faulty.Norm, faulty.Adds])
def test_what_only_leaves_the_format_is_not_said_to_diverge(kind):
    width = 4 if kind is faulty.Adds else 8
    fault = diagnose(nn.Sequential(kind()), torch.ones(2, width), mean, policy=STATIC).first
    assert fault.remedy
    assert fault.note == ""


def test_a_constant_is_no_weight():
    class Hard(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.layer(x) * torch.tensor(1e6))

    torch.manual_seed(0)
    fault = diagnose(nn.Sequential(Hard()), torch.randn(4, 4), mean, policy=STATIC).first
    assert (fault.operation, fault.phase, fault.note) == ("multiply", "forward", "")


@pytest.mark.parametrize("factor", [50.0, 500.0])
@pytest.mark.parametrize("seed", range(3))
def test_what_hands_on_zeros_has_lost_nothing(seed, factor):
    """A softmax that is sure of itself has no gradient, and what is before it gets none."""
    torch.manual_seed(seed)
    batch = torch.randn(4, 8, 16)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    with torch.no_grad():
        model.self_attn.in_proj_weight.mul_(factor)
    fault = diagnose(model, batch, lambda m, b: m(b).square().mean(), policy="mixed_float16").first
    assert fault is None or fault.operation not in ("view", "select", "add")


class Sure(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.Linear(16, 48)

    def forward(self, x):
        query, key, value = self.all(x).view(4, 8, 3, 16).permute(2, 0, 1, 3)
        return (query @ key.transpose(-1, -2) / 4).softmax(-1) @ value


def test_a_gradient_that_was_zero_before_is_not_lost():
    torch.manual_seed(5)
    batch, model = torch.randn(4, 8, 16), Sure()
    with torch.no_grad():
        model.all.weight.mul_(40.0)
    assert not diagnose(model, batch, lambda m, b: m(b).square().mean(), policy="mixed_float16")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ['a"b', "a'b", "a\\b\\n", "a[0]", "a*?", " a ", "é\n\U0001f600"])
def test_names_that_patterns_and_quotes_are_made_of(name):
    model = nn.ModuleDict({name: faulty.Feed(), "other": nn.Identity()})

    def loss(model, batch):
        return mean(model, batch)

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts[name](x)

    whole, batch = Calls(), torch.ones(2, 8)
    fault = diagnose(whole, batch, loss, policy=STATIC).first
    assert fault.module == f"parts.{name}.sum"
    optimizer = torch.optim.SGD(whole.parameters(), lr=1e-3)
    names_of(fault.remedy, whole, optimizer)
    assert not diagnose(whole, batch, loss)
    loss(whole, batch).backward()
    optimizer.step()
    assert all(each.isfinite().all() for each in whole.parameters())


def test_a_region_below_a_name_with_quotes():
    model = nn.ModuleDict({'a"\\': faulty.Feed()})
    region = nn.Sequential(model['a"\\'], nn.Identity())
    made = prepare(model['a"\\'], policy=STATIC)
    fault = diagnose(model, torch.ones(2, 8), lambda model, batch: region(batch).mean()).first
    assert 'model.get_submodule("a\\"\\\\")' in fault.remedy
    made.remove()
    names_of(fault.remedy, model, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert not diagnose(model, torch.ones(2, 8), lambda model, batch: region(batch).mean())
