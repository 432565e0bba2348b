"""What a step of a halfstep region costs, over a step of the torch.amp loop, on this machine.

Run `python benchmarks/region.py`. PyTorch's side is `torch.autocast`, `torch.amp.GradScaler`,
`unscale_`, clipping and the optimizer; halfstep's is `prepare` and the plain loop with the same
clipping. Both scale, in bfloat16 too, where it is not needed, because float16 products are slow on
most CPUs. Each rule set is measured in a process of its own, and the two sides alternate within it.
A figure is the median of the ratios of neighbouring measurements, of one step or of ten small ones,
with their middle half in brackets.
"""

import argparse
import contextlib
import json
import subprocess
import sys
from datetime import date

import torch
from overhead import Transformer, cell, ratio
from ratios import processor
from torch import nn
from torch.nn import functional

import halfstep
from halfstep.torch import prepare, saved_bytes

RULES = ("halfstep-1", "torch-2.13-cpu")
ROUNDS = {"tiny transformer": 30, "medium transformer": 10, "CNN": 20}
# A training loop repeats its step; what takes milliseconds is measured in the caches of its own.
STEPS = {"tiny transformer": 10, "medium transformer": 1, "CNN": 1}


def language_model(batch, length, **sizes):
    symbols = torch.randint(256, (batch, length + 1))
    model = Transformer(**sizes)
    return model, symbols[:, :-1], symbols[:, 1:].flatten()


def tiny():
    """Two blocks of width 64: the time goes into calls."""
    return language_model(4, 32)


def medium():
    """Four blocks of width 256: the time goes into products."""
    return language_model(8, 128, width=256, heads=8, blocks=4)


def convolutional():
    """Three stages of convolution and batch normalisation on 32x32 images."""
    stages = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        stages += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        stages.append(nn.MaxPool2d(2))
    model = nn.Sequential(*stages, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))
    return model, torch.rand(32, 3, 32, 32), torch.randint(10, (32,))


MODELS = {"tiny transformer": tiny, "medium transformer": medium, "CNN": convolutional}


def loss_of(model, inputs, targets):
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets)


class Side:
    """A model with its batch and optimizer, made the same way for both sides."""

    def __init__(self, build, options):
        torch.manual_seed(0)
        self.model, self.inputs, self.targets = build()
        fused = {"fused": True} if options.fused else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **fused)
        self.dtype = getattr(torch, options.dtype)
        self.called = torch.compile(self.model) if options.compiled else self.model


class Amp(Side):
    """The loop that PyTorch documents."""

    def __init__(self, build, options):
        super().__init__(build, options)
        self.scaler = torch.amp.GradScaler("cpu")

    def forward(self):
        with torch.autocast("cpu", dtype=self.dtype):
            return loss_of(self.called, self.inputs, self.targets)

    def step(self):
        self.optimizer.zero_grad()
        self.scaler.scale(self.forward()).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Region(Side):
    """The plain loop on a prepared model."""

    def __init__(self, build, options):
        super().__init__(build, options)
        policy = f"compute_dtype={options.dtype}, rules={options.only}, scale=dynamic"
        prepare(self.model, self.optimizer, policy=policy)

    def forward(self):
        return loss_of(self.called, self.inputs, self.targets)

    def step(self):
        self.optimizer.zero_grad()
        self.forward().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def kept(side):
    """Returns the mebibytes that one forward pass and its loss keep for backward."""
    with saved_bytes() as saved:
        loss = side.forward()
    del loss
    return saved.bytes / 2**20


def measure(name, options):
    """Returns the figures of one model under one rule set."""
    ours, theirs = Region(MODELS[name], options), Amp(MODELS[name], options)
    rounds = max(4, round(ROUNDS[name] * options.rounds))
    return {
        **ratio(repeated(ours.step, name), repeated(theirs.step, name), rounds),
        "ours": kept(ours),
        "theirs": kept(theirs),
    }


def repeated(step, name):
    def run():
        for _ in range(STEPS[name]):
            step()

    return run


def in_a_process(rules):
    command = [sys.executable, __file__, "--only", rules, *sys.argv[1:]]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def table(measured):
    lines = ["| | step time | kept for backward | kept by torch.amp |", "|---|---|---|---|"]
    for rules, figures in measured.items():
        for name, figure in figures.items():
            sizes = f"{figure['ours']:.2f} MiB | {figure['theirs']:.2f} MiB"
            lines.append(f"| {name}, {rules} | {cell(figure)} | {sizes} |")
    return "\n".join(lines)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=float, default=1.0, help="times the usual number of steps")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--fused", action="store_true", help="AdamW's fused form")
    parser.add_argument("--compiled", action="store_true", help="both models compiled")
    parser.add_argument("--only", choices=RULES, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = arguments()
    torch.set_num_threads(1)
    if options.only:
        print(json.dumps({name: measure(name, options) for name in options.model or MODELS}))
        return
    measured = {rules: in_a_process(rules) for rules in RULES}
    versions = f"halfstep {halfstep.__version__}, torch {torch.__version__}"
    print(f"{processor()}, 1 thread, {versions}, {date.today()}")
    print(f"{options.dtype}; time of a region over time of torch.amp: median (middle half)\n")
    print(table(measured))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
