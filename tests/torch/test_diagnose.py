"""What `diagnose` says of a step: which operation, where, in which pass, and with which numbers."""

import json

import pytest
import torch
from torch import nn

from halfstep.torch import diagnose, set_global_policy
from tests.torch import faulty_models as faulty
from tests.torch.faulty_models import autocasts, inside, mean

STATIC = "mixed_float16, scale=static(1.0)"


def named(diagnosis):
    fault = diagnosis.first
    return fault and (fault.module, fault.operation, fault.phase, fault.kind)


@pytest.mark.parametrize("way", ["policy", "ours", "native"])
@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        (faulty.Feed, (2, 8), ("0.sum", "matmul", "forward", "inf")),
        (faulty.Norm, (2, 8), ("0", "multiply", "forward", "inf")),
        (faulty.Adds, (2, 4), ("0", "add", "forward", "inf")),
        (faulty.Focal, (2, 4), ("0", "log", "forward", "inf")),
        (faulty.Hidden, (2, 4), ("0", "log1p", "forward", "inf")),
        (faulty.Divides, (2, 4), ("0", "divide", "forward", "nan")),
        (faulty.TwoMasks, (1, 3, 4), ("0", "add", "forward", "inf")),
        (faulty.EmptyRow, (1, 3, 4), ("0", "softmax", "forward", "nan")),
        (faulty.Selected, (2, 4), ("0", "sqrt", "backward", "nan")),
        (faulty.Shallow, (2, 8), ("0.layers.body", "matmul", "backward", "underflow")),
    ],
)
def test_the_first_fault(kind, shape, expected, way):
    model = nn.Sequential(kind())
    loss_fn, how = (mean, {"policy": STATIC}) if way == "policy" else (inside(autocasts[way]), {})
    assert named(diagnose(model, torch.ones(shape), loss_fn, **how)) == expected


def test_what_is_said():
    diagnosis = diagnose(nn.Sequential(faulty.Feed()), torch.ones(2, 8), mean, policy=STATIC)
    fault = diagnosis.first
    assert (fault.role, fault.dtype, fault.shape, fault.in_float32) == (
        "output",
        "float16",
        (2, 8),
        False,
    )
    assert fault.largest == 800.0
    assert "faulty_models.py:" in fault.source
    assert "(Feed.forward)" in fault.source
    assert json.loads(json.dumps(diagnosis.to_dict()))["faults"][0]["module"] == "0.sum"
    assert str(diagnosis).startswith("0.sum: matmul made inf in the forward pass, in float16")


def test_inf_and_nan_are_told_apart():
    class Both(nn.Module):
        def forward(self, x):
            large = (x * 6e4).half()
            return (large * torch.tensor([2.0, 1.0]).half()) - (large * 2 - large * 2)

    fault = diagnose(nn.Sequential(nn.Identity(), Both()), torch.ones(1, 2), mean).first
    assert (fault.operation, fault.kind) == ("multiply", "inf")

    class NanAndInf(nn.Module):
        def forward(self, x):
            return (x * torch.tensor([1.0, 0.0])) / (x * 0)

    fault = diagnose(nn.Sequential(NanAndInf()), torch.ones(1, 2), mean).first
    assert (fault.operation, fault.kind, fault.in_float32) == ("divide", "inf and nan", True)


@pytest.mark.parametrize(
    ("grow", "word"),
    [
        (lambda h: h + h, "add"),
        (lambda h: h * 3, "multiply"),
        (lambda h: h / 0.25, "divide"),
    ],
)
def test_inf_beside_what_a_mask_holds(grow, word):
    class Scores(nn.Module):
        def forward(self, x):
            scores = (x * 0 + 4e4).half().masked_fill(torch.eye(4, dtype=torch.bool), -torch.inf)
            return grow(scores).softmax(-1)

    model = nn.Sequential(nn.Linear(4, 4), Scores())
    found = named(diagnose(model, torch.ones(4, 4), mean, policy=STATIC))
    assert found == ("1", word, "forward", "inf")


def test_a_step_in_which_all_is_well():
    model = nn.Linear(4, 2)
    diagnosis = diagnose(model, torch.ones(1, 4), mean, policy="mixed_float16")
    assert not diagnosis
    assert (diagnosis.first, str(diagnosis)) == (None, "no inf and no NaN at loss scale 65536")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_fault_that_is_in_the_data(value):
    batch = {"x": torch.ones(2, 4), "y": [torch.ones(2, 4)]}
    batch["y"][0][0, 1] = value
    loss = lambda model, batch: (model(batch["x"]) * batch["y"][0]).mean()  # noqa: E731
    fault = diagnose(nn.Linear(4, 4), batch, loss, policy="mixed_float16").first
    assert (fault.module, fault.operation, fault.role) == ("batch['y'][0]", "data", "input")
    assert fault.in_float32


def test_a_fault_that_is_in_a_parameter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.constant_(model[1].bias, float("nan"))
    fault = diagnose(model, torch.ones(1, 4), mean, policy="mixed_bfloat16").first
    assert (fault.module, fault.operation, fault.role, fault.kind) == (
        "1.bias",
        "data",
        "weight",
        "nan",
    )


def test_a_constant_that_only_float16_cannot_hold():
    class Constant(nn.Module):
        def forward(self, x):
            return torch.tanh(x) * torch.tensor(1e5, dtype=x.dtype)

    model = nn.Sequential(nn.Linear(4, 4), Constant())
    fault = diagnose(model, torch.ones(1, 4), mean, policy=STATIC).first
    assert (fault.module, fault.operation, fault.in_float32) == ("1", "data", False)


def test_a_number_that_is_cast_for_an_operation():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh())
    nn.init.constant_(model[0].bias, 1e5)
    fault = diagnose(model, torch.ones(1, 4), mean, policy=STATIC).first
    assert (fault.module, fault.operation, fault.role, fault.largest) == (
        "1",
        "cast",
        "input",
        1e5,
    )
    assert 'with_rule("matmul", "full"' in fault.remedy
    assert 'where="1"' in fault.remedy


def test_a_result_in_memory_that_was_there():
    class Out(nn.Module):
        def forward(self, x):
            x = x.detach().half()
            out = torch.full_like(x, float("nan"))
            return torch.mul(x, x, out=out).tanh()

    fault = diagnose(nn.Sequential(nn.Identity(), Out()), torch.full((2,), 300.0), mean).first
    assert (fault.module, fault.operation) == ("1", "multiply")


def test_a_weight_that_does_not_fit():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    nn.init.constant_(model[0].weight, 1e5)
    fault = diagnose(model, torch.ones(1, 4), mean, policy=STATIC).first
    assert (fault.module, fault.operation, fault.role) == ("0", "cast", "weight")
    assert 'with_rule("matmul", "full"' in fault.remedy


def test_a_loss_outside_of_the_model():
    def total(model, batch):
        return (model(batch).half() * 1000.0).sum().float()

    model = nn.Linear(4, 4)
    nn.init.constant_(model.bias, 1000.0)
    fault = diagnose(model, torch.ones(1, 4), total, policy="mixed_float16").first
    assert (fault.module, fault.operation) == ("total", "multiply")


def test_a_loss_that_its_scale_takes_out_of_range():
    def half(model, batch):
        return model(batch).half().mean() * 100

    model = nn.Linear(4, 4)
    nn.init.constant_(model.bias, 10.0)
    fault = diagnose(model, torch.ones(1, 4), half, loss_scale=2.0**16).first
    assert (fault.module, fault.operation) == ("half", "multiply")
    assert fault.remedy.splitlines() == [
        "from halfstep.torch import GradScaler",
        "scaler = GradScaler(init_scale=16.0)",
    ]
    assert "skips such a step and halves its scale" in str(fault)


def test_parameters_in_half_precision_are_left_alone_by_a_global_policy():
    model = nn.Sequential(faulty.Feed()).half()
    set_global_policy("mixed_float16")
    try:
        fault = diagnose(model, torch.ones(2, 8).half(), mean).first
    finally:
        set_global_policy("float32")
    assert (fault.module, fault.operation, fault.in_float32) == ("0.sum", "matmul", False)
    assert model[0].sum.weight.dtype is torch.float16


def test_a_dynamic_scale_backs_off_before_anything_is_called_a_fault():
    model = nn.Sequential(faulty.Steep())
    assert named(diagnose(model, torch.ones(2, 8), mean, policy="mixed_float16")) is None
    fixed = "mixed_float16, scale=static(65536.0)"
    assert named(diagnose(model, torch.ones(2, 8), mean, policy=fixed))[2] == "backward"


def test_a_dynamic_scale_grows_back_as_far_as_it_can():
    model = nn.Sequential(faulty.Steep())
    scale = diagnose(model, torch.ones(2, 8), mean, policy="mixed_float16").loss_scale
    fine = f"mixed_float16, scale=static({scale})"
    twice = f"mixed_float16, scale=static({2 * scale})"
    assert not diagnose(model, torch.ones(2, 8), mean, policy=fine)
    assert diagnose(model, torch.ones(2, 8), mean, policy=twice).first.phase == "backward"
