"""Scripts of PyTorch that go wrong, examined as a user would, and mended by what is told."""

import pytest

from tests.cli.doctor_scripts import examined, told

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

HALF = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4)).to(torch.FORMAT)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
# REMEDY
inputs, targets = torch.randn(64, 32, dtype=torch.FORMAT), torch.randint(4, (64,))
for step in range(10):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs).float(), targets).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("form", "severity", "text"),
    [
        ("float16", "error", "eps=1e-08 of its optimizer is 0 in float16, so that steps divide"),
        ("bfloat16", "warning", "of its updates change nothing, because they round to nothing."),
    ],
)
def test_a_model_in_half_precision(tmp_path, form, severity, text):
    script = HALF.replace("FORMAT", form)
    _, report = examined(tmp_path, script)
    assert report.policy == f"{form} parameters (the script's own)"
    assert any(text in each for each in told(report, severity))
    assert not any("float32" in each.text for each in report.findings)
    (remedy,) = {each.remedy for each in report.findings} - {""}
    done, report = examined(tmp_path, script.replace("# REMEDY", remedy))
    assert (done.returncode, report.findings) == (0, ())


PAIR = """
import torch
from torch import nn


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, noise):
        return self.last(torch.relu(self.first(noise)))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow, self.sum = nn.Linear(8, 64), nn.Linear(64, 1)
        for each, value in ((self.grow.weight, 40.0), (self.grow.bias, 100.0)):
            nn.init.constant_(each, value)
        nn.init.constant_(self.sum.weight, 30.0)

    def forward(self, images):
        return torch.tanh(self.sum(torch.relu(self.grow(images))) * 1e-6)


torch.manual_seed(0)
makes, looks = Generator(), Discriminator()
generating = torch.optim.SGD(makes.parameters(), lr=1e-4)
optimizer = torch.optim.SGD(looks.parameters(), lr=1e-4)
# PREPARED
entropy = nn.functional.binary_cross_entropy_with_logits
for step in range(6):
    noise, real = torch.randn(4, 8), torch.randn(4, 8)
    fake = makes(noise)
    optimizer.zero_grad()
    loss = entropy(looks(real), torch.ones(4, 1)) + entropy(looks(fake.detach()), torch.zeros(4, 1))
    loss.backward()
    optimizer.step()
    generating.zero_grad()
    entropy(looks(fake), torch.ones(4, 1)).backward()
    generating.step()
"""
BOTH = "from halfstep.torch import prepare\nprepare(makes, generating)\nprepare(looks, optimizer)"
ONE = "from halfstep.torch import prepare\nprepare(makes, generating)\n"


@pytest.mark.parametrize(("prepared", "before"), [("", ""), (BOTH, ONE)])
def test_a_fault_in_one_of_two_models(tmp_path, prepared, before):
    _, report = examined(tmp_path, PAIR.replace("# PREPARED", prepared))
    first, *others = report.findings
    assert (first.severity, first.module) == ("error", "looks.sum")
    assert not any(each.remedy for each in others)
    done, report = examined(tmp_path, PAIR.replace("# PREPARED", before + first.remedy))
    assert (done.returncode, told(report, "error")) == (0, [])


def test_a_learning_rate_that_is_too_high(tmp_path):
    script = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.9)
inputs = torch.randn(64, 16)
for step in range(12):
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
"""
    _, report = examined(tmp_path, script)
    assert any(
        "the training diverges, in whatever format" in each for each in told(report, "error")
    )
    assert not any(each.remedy for each in report.findings)


def test_one_batch_that_is_far_from_all_others(tmp_path):
    script = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    inputs = torch.randn(32, 16) * (1e5 if step == 6 else 1.0)
    optimizer.zero_grad()
    (model(inputs) - 1.0).square().mean().backward()
    optimizer.step()
"""
    _, report = examined(tmp_path, script)
    assert [step.number for step in report.skipped] == [7]
    (warning,) = told(report, "warning")
    assert warning.startswith("At step 7, numbers of up to ")
    assert told(report, "error") == []
    assert not any(each.remedy for each in report.findings)
