"""What doctor says is pasted into the script, and doctor has nothing more to say."""

from tests.cli.doctor_scripts import examined

_SCRIPT = """
import torch
from torch import nn

{pasted}

torch.manual_seed(61)
layers = []
for _ in range(int(torch.randint(2, 6, ()))):
    layers += [nn.Linear(8, 8), nn.Tanh()]
    layers[-2].weight.data.mul_(2.0 ** int(torch.randint(-14, 9, ())))
by = 2.0 ** int(torch.randint(-24, 4, ()))
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for number in range(1, 13):
    torch.manual_seed(number)
    optimizer.zero_grad()
    (model(torch.randn(16, 8)).float().square().mean() * by).backward()
    optimizer.step()
"""


def test_what_is_pasted_mends_it(tmp_path):
    texts = [""]
    done, report = examined(tmp_path, _SCRIPT.format(pasted=""), "--steps", "12")
    assert done.returncode == 1
    # Its gradients used to be told as several findings, with a scale each.
    (warning,) = (each for each in report.findings if each.severity != "note")
    assert "scale" in warning.remedy
    while done.returncode:
        texts.append(report.remedies.text)
        assert len(texts) <= 3, texts
        done, report = examined(tmp_path, _SCRIPT.format(pasted=texts[-1]), "--steps", "12")
    assert not [each for each in report.findings if each.severity != "note"]
