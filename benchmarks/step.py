"""What checking, clipping, unscaling and splitting add to an optimizer step, on this machine.

Run `python benchmarks/step.py`. The step is AdamW's fused one, of 56 square matrices in float32;
gradients are set by hand, and nothing else is timed. Each way is measured with a limit that the
norm exceeds and with one that it does not. The ways take turns, and each figure is the median of
its time over that of the plain step of the same round, with the middle half in brackets.
"""

import argparse
import contextlib
import copy
import math
from datetime import date

import torch
from overhead import seconds
from ratios import cell, processor
from torch import nn

import halfstep
from halfstep.torch import GradScaler, keep_masters, prepare
from halfstep.torch._regions._guard import guard

MATRICES = 56
LIMITS = {"not active": 1e9, "active": 0.01}


class Matrices(nn.Module):
    """Parameters without a forward; gradients are written by hand."""

    def __init__(self, size):
        super().__init__()
        scale = 1 / math.sqrt(size)
        made = (torch.randn(size, size) * scale for _ in range(MATRICES))
        self.matrices = nn.ParameterList(map(nn.Parameter, made))


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)


def plain(model, limit):
    """The step alone."""
    return optimizer_of(model).step


def normed(model, limit):
    """One pass of PyTorch's that reads, one that updates."""
    optimizer, parameters = optimizer_of(model), list(model.parameters())

    def step():
        nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        optimizer.step()

    return step


def read(model, limit):
    """The least that a norm can take: to read all gradients once."""
    optimizer, parameters = optimizer_of(model), list(model.parameters())

    def step():
        for parameter in parameters:
            parameter.grad.sum()
        optimizer.step()

    return step


def amp(model, limit):
    """What PyTorch documents: unscale_, clip, step, update."""
    optimizer, scaler, loss = optimizer_of(model), torch.amp.GradScaler("cpu"), torch.ones(())

    def step():
        scaler.scale(loss)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaler.step(optimizer)
        scaler.update()

    return step


def scaler(model, limit):
    """GradScaler.step(max_norm=), update."""
    optimizer, ours, loss = optimizer_of(model), GradScaler("cpu"), torch.ones(())

    def step():
        ours.scale(loss)
        ours.step(optimizer, max_norm=limit)
        ours.update()

    return step


def region(model, limit):
    """Region.clip_grad_norm_, step."""
    optimizer = optimizer_of(model)
    # It never sees a forward, and would say so.
    ours = prepare(model, optimizer, policy="mixed_bfloat16")
    ours._used = True

    def step():
        ours.clip_grad_norm_(limit)
        optimizer.step()

    return step


def split_alone(model, limit):
    """The step of split masters without its check, as the plain one has none."""
    optimizer = optimizer_of(model)
    keep_masters(optimizer, param_dtype="bfloat16")
    feeding = guard(optimizer)._feeding
    return lambda: feeding.step(optimizer, None, (), {})


def split_checked(model, limit):
    """The step of split masters, as it is called."""
    optimizer = optimizer_of(model)
    keep_masters(optimizer, param_dtype="bfloat16")
    return lambda: optimizer.step()


def split_clipped(model, limit):
    """Region.clip_grad_norm_ and a step with split masters."""
    optimizer = optimizer_of(model)
    ours = prepare(model, optimizer, policy="mixed_bfloat16", masters="split")
    ours._used = True

    def step():
        ours.clip_grad_norm_(limit)
        optimizer.step()

    return step


# These make their parameters bfloat16, and have a model of their own.
SPLIT = {
    "split masters: the step alone": split_alone,
    "split masters: with its check": split_checked,
    "split masters: region.clip_grad_norm_, step": split_clipped,
}
WAYS = {
    "all gradients read once, a plain step": read,
    "PyTorch's norm, a plain step": normed,
    "torch.amp: unscale_, clip, step, update": amp,
    "halfstep: scaler.step(max_norm=), update": scaler,
    "halfstep: region.clip_grad_norm_, step": region,
    **SPLIT,
}


class Timed:
    """One way to step, with parameters and an optimizer state of its own."""

    def __init__(self, way, limit, model, gradients):
        self.model = model
        self.step = way(model, limit)
        dtype = next(model.parameters()).dtype
        self.gradients = [each.to(dtype) for each in gradients]

    def __call__(self):
        for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            parameter.grad = gradient.copy_(gradient.sign())
        return seconds(self.step)


def measure(limit, options):
    """Returns the ratios of every way over the plain step, one a round."""
    torch.manual_seed(0)
    # All share parameters and gradients; moments are each one's own.
    model = Matrices(options.size)
    gradients = [torch.randn_like(each) for each in model.parameters()]
    base = Timed(plain, limit, model, gradients)
    models = {name: copy.deepcopy(model) if name in SPLIT else model for name in WAYS}
    ways = {name: Timed(way, limit, models[name], gradients) for name, way in WAYS.items()}
    for run in (base, *ways.values()) * 2:
        run()
    rounds = [(base(), {name: run() for name, run in ways.items()}) for _ in range(options.rounds)]
    return {name: [times[name] / one for one, times in rounds] for name in ways}


def table(measured):
    lines = [f"| | {' | '.join(f'clipping {name}' for name in measured)} |", "|---|---|---|"]
    lines.append("| plain step | 1 | 1 |")
    for name in WAYS:
        lines.append(f"| {name} | {' | '.join(cell(each[name]) for each in measured.values())} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="steps of each way")
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of a matrix")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measured = {name: measure(limit, options) for name, limit in LIMITS.items()}
    versions = f"halfstep {halfstep.__version__}, torch {torch.__version__}"
    threads = f"{options.threads} threads"
    print(f"{processor()}, {threads}, {versions}, {date.today()}")
    print(f"{MATRICES} matrices of {options.size}x{options.size}, AdamW(fused=True)")
    print("time over that of the plain step: median (middle half)\n")
    print(table(measured))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
