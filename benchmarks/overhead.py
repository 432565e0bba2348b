"""What halfstep's autocast and GradScaler cost over PyTorch's, on this machine.

Run `python benchmarks/overhead.py`. Each rule set is measured in a process of its own, because a
process that has used one set answers a few more operations itself afterwards. Within a process the
two sides alternate, so that a slow spell of the machine hits both. A figure is the median of the
ratios of neighbouring runs, with their middle half in brackets.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from datetime import date

import torch
from ratios import processor
from torch import nn
from torch.nn import functional

import halfstep
from halfstep.torch import GradScaler, autocast

LOW = torch.bfloat16
RULES = ("torch-2.13-cpu", "torch-2.13", "halfstep-1")


class Block(nn.Module):
    """A transformer block with fused attention."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens):
        batch, length, width = tokens.shape
        mixed = self.mix(self.before_attention(tokens)).view(batch, length, 3, self.heads, -1)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return tokens + self.narrow(functional.gelu(self.widen(self.before_feed(tokens))))


class Transformer(nn.Module):
    """A tiny language model: two blocks of width 64."""

    def __init__(self, width=64, heads=4, blocks=2, symbols=256):
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, symbols))

    def forward(self, symbols):
        return self.head(self.blocks(self.embed(symbols)))


def operations():
    """Single operations, called many times inside one region."""
    values, weight = torch.randn(64, 64), torch.randn(64, 64)
    low, images = values.to(LOW), torch.randn(1, 8, 16, 16)
    filters = torch.randn(8, 8, 3, 3)
    return {
        "linear": lambda: functional.linear(values, weight),
        "matmul": lambda: values @ weight,
        "conv2d": lambda: functional.conv2d(images, filters),
        "layer_norm": lambda: functional.layer_norm(low, (64,)),
        "softmax": lambda: low.softmax(-1),
        "add": lambda: low + low,
        "relu": lambda: low.relu(),
    }


def region_of(rules):
    return lambda: autocast("cpu", dtype=LOW, rules=rules)


def pytorch():
    return torch.autocast("cpu", dtype=LOW)


def many(operation, region, calls=1000):
    def run():
        with region():
            for _ in range(calls):
                operation()

    return run


def training_step(region, make_scaler):
    torch.manual_seed(0)
    model, symbols = Transformer(), torch.randint(0, 256, (4, 32))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = make_scaler()

    def run():
        optimizer.zero_grad()
        with region():
            loss = functional.cross_entropy(model(symbols).flatten(0, 1), symbols.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return run


def scaler_step(make_scaler, clip):
    """The scaler's part of a step alone: gradients are given, the optimizer is plain SGD."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler, loss = make_scaler(), torch.ones(())
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]

    def run():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        scaler.scale(loss)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return run


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ratio(ours, theirs, rounds):
    """Returns the median ratio of alternating runs, and the quartiles around it."""
    for run in (ours, theirs) * 3:
        run()
    ratios = sorted(seconds(ours) / seconds(theirs) for _ in range(rounds))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": middle, "low": low, "high": high}


def ours_scaler():
    return GradScaler("cpu")


def their_scaler():
    return torch.amp.GradScaler("cpu")


def measure(rules, rounds):
    """Returns every figure of one rule set."""
    region = region_of(rules)
    figures = {
        name: ratio(many(operation, region), many(operation, pytorch), rounds)
        for name, operation in operations().items()
    }
    ours, theirs = training_step(region, ours_scaler), training_step(pytorch, their_scaler)
    figures["training step"] = ratio(ours, theirs, rounds * 3)
    return figures


def measure_scaler(rounds):
    return {
        name: ratio(scaler_step(ours_scaler, clip), scaler_step(their_scaler, clip), rounds * 10)
        for name, clip in (("scaler", False), ("scaler, unscale and clip", True))
    }


def in_a_process(what, rounds):
    command = [sys.executable, __file__, "--only", what, "--rounds", str(rounds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def cell(figure):
    return f"{figure['ratio']:.2f} ({figure['low']:.2f}-{figure['high']:.2f})"


def table(measured, scaler):
    names = list(next(iter(measured.values())))
    lines = [f"| | {' | '.join(measured)} |", "|---|" + "---|" * len(measured)]
    for name in names:
        cells = " | ".join(cell(figures[name]) for figures in measured.values())
        lines.append(f"| {name} | {cells} |")
    lines += [f"| {name} | {cell(figure)} |" + " |" * 2 for name, figure in scaler.items()]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="runs of each side")
    parser.add_argument("--only", choices=[*RULES, "scaler"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only:
        scaler = options.only == "scaler"
        found = measure_scaler(options.rounds) if scaler else measure(options.only, options.rounds)
        print(json.dumps(found))
        return
    measured = {rules: in_a_process(rules, options.rounds) for rules in RULES}
    versions = f"halfstep {halfstep.__version__}, torch {torch.__version__}"
    print(f"{processor()}, 1 thread, {versions}, {date.today()}")
    print("time of halfstep over time of PyTorch: median (middle half)\n")
    print(table(measured, in_a_process("scaler", options.rounds)))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
