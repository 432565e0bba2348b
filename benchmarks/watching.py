"""What it costs to watch the values of a training, over the same step without, on this machine.

Run `python benchmarks/watching.py`. A step is zero_grad, forward, loss, backward and AdamW. What is
measured is a step that is looked at and one that is not, each against the plain step, and from both
follows what sampling every 100 steps costs. Beside them is what others do in every step: PyTorch's
anomaly mode, and DebugUnderflowOverflow of Hugging Face, which looks at the forward pass only. The
sides alternate, so that a slow spell of the machine hits all alike. A figure is the median of the
ratios to the plain step just before, with their middle half in brackets. Before them stands what
counting takes per number.
"""

import argparse
import contextlib
import functools
import statistics
from datetime import date
from unittest import mock

import torch
from overhead import seconds
from ratios import cell, processor
from region import MODELS, STEPS, loss_of, repeated
from torch import nn

import halfstep
from halfstep.torch import prepare, watch
from halfstep.torch._native._kernel import kernel
from halfstep.torch._observing import _counting
from halfstep.torch._observing._exponents import Tally

ROUNDS = {"tiny transformer": 60, "medium transformer": 12, "CNN": 30}
SIZES = (
    *((power, "float32") for power in (10, 14, 17, 20, 23)),
    (20, "bfloat16"),
    (20, "float16"),
)
EVERY = 100
NEVER = 10**9


def step_of(name, policy, *, around=contextlib.nullcontext, attach=None):
    """Returns a training step of a model under a policy, made the same way for all sides."""
    torch.manual_seed(0)
    model, inputs, targets = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    if policy != "float32":
        prepare(model, optimizer, policy)
    kept = attach and attach(model)

    def step(_kept=kept):
        optimizer.zero_grad()
        with around():
            loss_of(model, inputs, targets).backward()
        optimizer.step()

    return repeated(step, name)


def sides(name, policy):
    """Returns the steps that are compared, the plain one first."""
    made = {
        "plain": step_of(name, policy),
        "looked at": step_of(name, policy, attach=lambda model: watch(model, every=1)),
        "not looked at": step_of(
            name, policy, attach=lambda model: watch(model, every=NEVER, first=0)
        ),
        "anomaly mode": step_of(name, policy, around=torch.autograd.detect_anomaly),
    }
    debugger = hugging_face()
    if debugger is not None:
        made["DebugUnderflowOverflow"] = step_of(name, policy, attach=debugger)
    return made


def hugging_face():
    """Returns the debugger of Hugging Face, None where it is not installed."""
    try:
        from transformers.debug_utils import DebugUnderflowOverflow
    except ImportError:
        return None
    return DebugUnderflowOverflow


def measure(name, policy, rounds):
    """Returns the ratios of each side to the plain step of the same round."""
    plain, *others = sides(name, policy).items()
    for _, run in (plain, *others) * 3:
        run()
    found = {label: [] for label, _ in others}
    times = []
    for _ in range(rounds):
        for label, run in others:
            before = seconds(plain[1])
            times.append(before)
            found[label].append(seconds(run) / before)
    return statistics.median(times) / STEPS[name] * 1000, found


def call():
    """Returns the microseconds that a call takes longer where it is not looked at."""
    plain, watched = nn.Identity(), nn.Identity()
    kept = watch(watched, every=NEVER, first=0)
    value, times = torch.ones(1), []
    for _ in range(200):
        before, after = (
            seconds(lambda model=model: [model(value) for _ in range(100)])
            for model in (plain, watched)
        )
        times.append((after - before) * 1e4)
    kept.close()
    return statistics.median(times)


def sampled(found, milliseconds):
    """Returns what a step takes on average where one of a hundred is looked at."""
    looked = statistics.median(found["looked at"])
    return 1 + (looked - 1) / EVERY + call() / 1000 / milliseconds


def row(name, policy, rounds):
    time, found = measure(name, policy, rounds)
    labels = ("looked at", "not looked at", "anomaly mode", "DebugUnderflowOverflow")
    cells = [cell(found[label]) if label in found else "not installed" for label in labels]
    cells.insert(2, f"{sampled(found, time):.3f}")
    return f"| {name}, {policy} | {time:.1f} ms | {' | '.join(cells)} |"


def counting(rounds):
    """Yields what counting takes per number, beside the largest magnitude of the same numbers."""
    yield "| numbers | abs().max() | counted by the kernel | by PyTorch's operations |"
    yield "|---|---|---|---|"
    tally = Tally()
    for power, dtype in SIZES:
        values = torch.randn(2**power).to(getattr(torch, dtype))
        add = functools.partial(tally.add, "key", values)
        with mock.patch.object(_counting, "kernel_at_hand", return_value=None):
            slow = per_number(add, values, rounds)
        largest = per_number(lambda values=values: values.abs().max(), values, rounds)
        times = (largest, per_number(add, values, rounds), slow)
        yield f"| 2^{power} of {dtype} | {' | '.join(f'{time:.2f} ns' for time in times)} |"


def per_number(run, values, rounds):
    for _ in range(3):
        run()
    times = [seconds(run) for _ in range(max(20, round(100 * rounds)))]
    return statistics.median(times) / values.numel() * 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=float, default=1.0, help="times the usual number")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = f"halfstep {halfstep.__version__}, torch {torch.__version__}"
    print(f"{processor()}, 1 thread, {versions}, {date.today()}")
    kernel()
    print(*counting(options.rounds), "", sep="\n")
    print(f"A call that is not looked at takes {call():.1f} us longer.")
    print("time over that of the plain step: median (middle half)\n")
    print("| | plain | looked at | not | 1 of 100 | anomaly mode | DebugUnderflowOverflow |")
    print("|---|---|---|---|---|---|---|")
    for name in options.model or MODELS:
        rounds = max(4, round(ROUNDS[name] * options.rounds))
        for policy in ("float32", "mixed_bfloat16"):
            print(row(name, policy, rounds), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
