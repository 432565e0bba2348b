"""Scripts in which it is not the format of one model, or not that alone, that is to blame."""

import pytest

from tests.cli.doctor_scripts import examined, told

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

LOOP = """
import torch
from torch import nn

torch.manual_seed(0)


class Root(nn.Module):
    def forward(self, x):
        return (x - x.flip(0)).square().sum(-1, keepdim=True).sqrt()


class Hidden(nn.Module):
    def forward(self, x):
        return torch.tanh(x * 3e4 * 3e4)


MODELS
for step in range(STEPS):
    x = torch.randn(16, 8)
    DATA
    optimizer.zero_grad()
    LOSS.backward()
    optimizer.step()
"""


def script(models, loss, *, data="pass", steps=12):
    words = {"MODELS": models, "LOSS": loss, "DATA": data, "STEPS": str(steps)}
    text = LOOP
    for word, value in words.items():
        text = text.replace(word, value)
    return text


PARTS = "nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)"
ONE = (
    f"model = nn.Sequential({PARTS}LAST)\noptimizer = torch.optim.SGD(model.parameters(), lr=RATE)"
)
TWO = f"""
encoder = nn.Sequential({PARTS})
decoder = nn.Sequential({PARTS}LAST)
optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
# REMEDY
"""


def of(models, *, last="", rate=1e-3):
    return models.replace("LAST", last).replace("RATE", str(rate))


@pytest.mark.parametrize(
    ("last", "what"),
    [(", Root()", "Sqrt made nan"), (", Hidden()", "Multiply made inf in the forward pass")],
)
def test_two_models_of_one_class(tmp_path, last, what):
    data = "x[0] = x[-1]"
    text = script(of(TWO, last=last), "decoder(encoder(x)).square().mean()", data=data)
    _, report = examined(tmp_path, text)
    first = report.findings[0]
    assert (first.severity, first.module) == ("error", "decoder.3")
    assert first.text.startswith(what)
    assert not any("outside of every model" in each.text for each in report.findings)
    assert {each.partition(".")[0] for each in report.ranges.modules} == {"encoder", "decoder"}
    assert {each.module.partition(".")[0] for each in report.casts} == {"encoder", "decoder"}


def test_the_remedy_for_one_of_two_models_of_a_class(tmp_path):
    text = script(of(TWO, last=", Hidden()"), "decoder(encoder(x)).square().mean()")
    _, report = examined(tmp_path, text)
    remedy = report.findings[0].remedy
    assert 'reason="Its numbers leave float16 in decoder.", where="3")' in remedy
    done, report = examined(tmp_path, text.replace("# REMEDY", remedy))
    assert (done.returncode, told(report, "error")) == (0, [])


def test_a_way_back_that_breaks_once(tmp_path):
    models, data = of(ONE, last=", Root()"), "x[0] = x[-1] if step == 6 else x[0]"
    _, report = examined(tmp_path, script(models, "model(x).mean()", data=data))
    assert [step.number for step in report.skipped] == [7]
    first = report.findings[0]
    assert (first.severity, first.module) == ("error", "3")
    assert first.text.startswith("Sqrt made inf in the backward pass")
    assert first.text.endswith("(step 7).")
    assert "torch.sqrt(safe)" in first.remedy


@pytest.mark.parametrize("rate", [2, 50])
def test_a_learning_rate_that_breaks_the_next_steps(tmp_path, rate):
    models = of(ONE, rate=rate)
    _, report = examined(tmp_path, script(models, "(model(x) - x.sum()).square().mean()"))
    assert "the training diverges, in whatever format" in told(report, "error")[0]
    assert not any(each.remedy for each in report.findings)


@pytest.mark.parametrize("far", [{0}, {11}, {0, 1}, {5, 6}, {10, 11}])
def test_batches_that_are_far_from_all_others(tmp_path, far):
    data = f"x = x * (1e5 if step in {far} else 1.0)"
    _, report = examined(tmp_path, script(of(ONE), "(model(x) - 1.0).square().mean()", data=data))
    assert [step.number - 1 for step in report.skipped] == sorted(far)
    assert told(report, "error") == []
    warnings = told(report, "warning")
    assert len(warnings) == len(far)
    assert all("look at its data" in each for each in warnings)
    assert not any(each.remedy for each in report.findings)


def test_adam_that_breaks_parameters_in_half_precision(tmp_path):
    models = f"""
model = nn.Sequential({PARTS}).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
# REMEDY
"""
    text = script(models, "(model(x.half()).float() - 1.0).square().mean()")
    _, report = examined(tmp_path, text)
    first = report.findings[0]
    assert first.text.startswith("A step of Adam (lr=0.001, eps=1e-08) made the parameter")
    assert not any("data" in each.text for each in report.findings)
    done, report = examined(tmp_path, text.replace("# REMEDY", first.remedy))
    assert (done.returncode, told(report, "error")) == (0, [])
