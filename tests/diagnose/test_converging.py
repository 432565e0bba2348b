"""Doing what a report says, and asking again, ends with nothing to mend."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from halfstep import Policy
from halfstep.core import Report, Step
from halfstep.diagnose._findings import findings
from halfstep.diagnose._heard import Heard
from halfstep.torch import GradScaler, autocast, prepare
from halfstep.torch._looking import Looking

_STEPS, _ROUNDS = 12, 2
_SAMPLED = (1, 10, _STEPS)


def made(seed):
    """Returns a model whose weights are of any size, and what its loss is multiplied by."""
    torch.manual_seed(seed)
    layers = []
    for _ in range(int(torch.randint(2, 6, ()))):
        layer = nn.Linear(8, 8)
        layer.weight.data.mul_(2.0 ** int(torch.randint(-14, 9, ())))
        layers += [layer, nn.Tanh()] if seed % 2 else [layer]
    return nn.Sequential(*layers), 2.0 ** int(torch.randint(-24, 4, ()))


class Training:
    """A short training in this process, which tells as the process of a script does."""

    ran: ClassVar = {}

    def __init__(self, seed, remedies):
        self.model, self.by = made(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.heard, self.looking = Heard("mixed_float16", overrides=False), Looking()
        self.prepare({name: value for text in remedies for name, value in values_in(text).items()})

    def report(self):
        end = self.looking.start()
        try:
            steps = [self.step(number) for number in range(1, _STEPS + 1)]
        finally:
            end()
        self.tell("steps", steps=tuple(steps))
        nothing = dict.fromkeys(("losses", "step_seconds", "skipped"), ())
        ran = {"kind": "batch", "lowered": True, "steps": _STEPS, **nothing, **self.ran}
        self.heard.add(ran)
        return self.heard.report("train.py", "", findings)

    def step(self, number):
        torch.manual_seed(number)
        self.optimizer.zero_grad()
        scale, (loss, skipped) = self.scale, self.trained(torch.randn(16, 8))
        if skipped or number in _SAMPLED:
            self.look(number, scale, skipped=skipped)
        self.looking.forget()
        return Step(number, loss, scale, skipped)

    def loss(self, batch):
        return self.model(batch).float().square().mean() * self.by

    def look(self, number, scale, *, skipped):
        seen = {} if skipped else self.looking.ranges(scale)._asdict()
        found = {"sampled": (number,), "diagnosis": self.looking.faults(scale), **seen}
        self.tell("look", failed=skipped, outside=False, **found)

    def tell(self, kind, *, failed=None, outside=None, **found):
        more = {} if failed is None else {"failed": failed, "outside": outside}
        report = Report(script="", policy="", **found).to_dict()
        self.heard.add({"kind": kind, "report": report, **more})


class Prepared(Training):
    def prepare(self, values):
        policy = values.get("policy", "mixed_float16")
        self.region = prepare(self.model, self.optimizer, policy=policy)
        self.ran = {"regions": 1, "region_policies": [str(Policy.parse(str(policy)))]}

    @property
    def scale(self):
        return float(self.region.scale)

    def trained(self, batch):
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss.item(), self.region.last_step.skipped


class Scaled(Training):
    ran: ClassVar = {"torch_amp": True}

    def prepare(self, values):
        lower = autocast("cpu", dtype=torch.float16)
        self.lower = values.get("lower", lower)
        self.scaler = values.get("scaler", GradScaler(init_scale=1.0))

    @property
    def scale(self):
        return float(self.scaler.get_scale())

    def trained(self, batch):
        with self.lower:
            loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item(), self.scaler.last_step.skipped


def values_in(text):
    """Executes what is to be pasted, up to where it takes effect on a model."""
    names, uses = {}, ("set_global_policy(", "region = ")
    lines = [line for line in text.splitlines() if not line.startswith(uses)]
    exec("\n".join(lines), names)
    return {name: names[name] for name in ("policy", "lower", "scaler") if name in names}


def graves(report):
    return [each for each in report.findings if each.severity != "note"]


# In the fifth, each of two remedies used to ask for the scale that the other one was for.
@pytest.mark.parametrize("seed", [2, 4, 5, 7, 9, 17, 23, 37, 45, 55, 67])
@pytest.mark.parametrize("way", [Prepared, Scaled])
def test_following_what_is_written_ends(seed, way):
    remedies = []
    report = way(seed, remedies).report()
    while graves(report):
        remedies.append(report.remedies.text)
        assert len(remedies) <= _ROUNDS, (report.findings, remedies)
        report = way(seed, remedies).report()
