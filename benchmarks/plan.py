"""What a step takes under `auto` and under a plan, beside float32 and torch.autocast, here.

Run `python benchmarks/plan.py`. A step is zero_grad, forward, loss, backward and the fused AdamW;
with float16, PyTorch's way has its GradScaler. The plan is made of the model and one batch, and
then measured anew with all the others. The ways take turns; a figure is the median of its time
over that of the best of PyTorch's in the same round, with the middle half in brackets.
"""

import argparse
import contextlib
import copy
import math
import time
from datetime import date
from statistics import median

import torch
from plan_models import MODELS
from ratios import cell, processor

import halfstep
from halfstep.torch import plan, prepare, saved_bytes

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# What takes that many times as long as float32 is measured once, and left out then.
HOPELESS = 3.0
COLUMNS = (
    "model",
    "float32",
    "autocast bfloat16",
    "autocast float16",
    "auto",
    "plan",
    "auto over float32",
    "auto: format, rules",
    "plan over the best",
    "the best",
    "kept over the best's",
    "plan: format, rules",
)


class Native:
    """float32, or torch.autocast with a GradScaler where it is needed."""

    def __init__(self, model, batch, loss_fn, dtype=None):
        self.model, self.batch, self.loss_fn, self.dtype = (
            copy.deepcopy(model),
            batch,
            loss_fn,
            dtype,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)

    def forward(self):
        low = torch.autocast("cpu", dtype=self.dtype) if self.dtype else contextlib.nullcontext()
        with low:
            return self.loss_fn(self.model, self.batch)

    def __call__(self):
        self.optimizer.zero_grad()
        self.scaler.scale(self.forward()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Prepared(Native):
    """A region by a policy or a plan; the loop is that of float32."""

    def __init__(self, model, batch, loss_fn, policy):
        super().__init__(model, batch, loss_fn)
        self.policy = prepare(self.model, self.optimizer, policy=policy).policy


def ways(model, batch, loss_fn, found):
    yield "float32", Native(model, batch, loss_fn)
    for name, dtype in LOW.items():
        yield f"autocast {name}", Native(model, batch, loss_fn, dtype)
    yield "auto", Prepared(model, batch, loss_fn, "auto")
    yield "plan", Prepared(model, batch, loss_fn, found)


def kept(way):
    with saved_bytes() as saved:
        way.forward()
    return saved.bytes


def seconds(step, times):
    step()
    begin = time.perf_counter()
    for _ in range(times):
        step()
    return (time.perf_counter() - begin) / times


def at_first(step):
    """Returns what two steps take, inf where PyTorch has no kernel for the format."""
    try:
        return seconds(step, 2)
    except RuntimeError:
        return math.inf


def measured(steps, rounds):
    """Returns the times of each way, round by round."""
    first = {name: at_first(step) for name, step in steps.items()}
    hopeful = {n: s for n, s in steps.items() if first[n] <= HOPELESS * first["float32"]}
    times = {name: [] for name in hopeful}
    for _ in range(rounds):
        for name, step in hopeful.items():
            times[name].append(seconds(step, max(1, round(0.05 / first[name]))))
    return times, first


def shown(times):
    return "cannot" if math.isinf(median(times)) else f"{median(times) * 1e3:.2f} ms"


def row(name, rounds, budget):
    torch.manual_seed(0)
    model, batch, loss_fn = MODELS[name]()
    found = plan(model, batch, loss_fn, seconds=budget)
    steps = dict(ways(model, batch, loss_fn, found))
    times, first = measured(steps, rounds)
    memory = {name: kept(steps[name]) for name in times}
    native = [each for each in times if each not in ("auto", "plan")]
    best = min(native, key=lambda each: median(times[each]))
    over, auto = over_each(times["plan"], times[best]), over_each(times["auto"], times["float32"])
    cells = [shown(times[each] if each in times else [first[each]]) for each in steps]
    less, chosen = memory["plan"] / memory[best], described(steps["auto"].policy)
    shares = f"{cell(auto)} | {chosen} | {cell(over)} | {best} | {less:.2f}"
    return f"| {name} | {' | '.join(cells)} | {shares} | {described(found.policy)} |"


def over_each(times, others):
    return [a / b for a, b in zip(times, others, strict=True)]


def described(policy):
    return f"{policy.compute_dtype}, {len(policy.rules.edits)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="runs of each way")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to make a plan")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one")
    options = parser.parse_args()
    threads = f"{torch.get_num_threads()} threads"
    versions = f"halfstep {halfstep.__version__}, torch {torch.__version__}"
    print(f"{processor()}, {threads}, {versions}, {date.today()}")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for name in options.model or MODELS:
        print(row(name, options.rounds, options.seconds), flush=True)


if __name__ == "__main__":
    main()
