"""What training keeps in memory from step to step, in bytes per parameter, by layout.

Run `python benchmarks/memory.py`; with torchao installed it has the rows with 8-bit states too. A
GPT of 50 million parameters with biases and norms, AdamW, 3 steps, each layout in a process of its
own. What is counted are the storages that are alive after the third step, each once, and the most
bytes of gradients at once in a backward pass. Counts, the same on any machine.
"""

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import date

import torch
from overhead import Block
from torch import nn
from torch.nn import functional

import halfstep
from halfstep.torch import prepare
from halfstep.torch._memory import kept
from halfstep.torch._storages import GradientPeak

WIDTH, HEADS, BLOCKS, SYMBOLS, LENGTH, BATCH, STEPS = 512, 8, 12, 12288, 64, 2, 3
PARTS = ("weights", "remainder", "gradients", "state")


class GPT(nn.Module):
    """A language model with learned positions and an output of its own."""

    def __init__(self, width=WIDTH, blocks=BLOCKS, symbols=SYMBOLS):
        super().__init__()
        self.embed, self.place = nn.Embedding(symbols, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, HEADS) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, symbols):
        tokens = self.embed(symbols) + self.place.weight[: symbols.shape[1]]
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens))


def own(parameters):
    return torch.optim.AdamW(parameters)


def eight_bit(parameters):
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters)


# The optimizer, and what `prepare` is given; None for what does without it.
LAYOUTS = {
    "float32": (own, None),
    "torch.amp": (own, None),
    "cast masters": (own, {}),
    "split masters": (own, {"masters": "split"}),
    "split masters, 8-bit states": (eight_bit, {"masters": "split"}),
    "split masters, 8-bit states, gradient release": (
        eight_bit,
        {"masters": "split", "release": True},
    ),
}


def prepared(model, optimizer, options):
    """Prepares the model, each block by itself where gradients are released."""
    parts = [model.embed, *model.blocks, model.norm, model.head] if "release" in options else []
    for part in (*parts, model):
        prepare(part, optimizer, "mixed_bfloat16", **options)


def step(model, optimizer, scaler, symbols):
    """The loop that PyTorch documents; a disabled scaler hands everything through."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=scaler.is_enabled()):
        output = model(symbols[:, :-1])
        loss = functional.cross_entropy(output.flatten(0, 1).float(), symbols[:, 1:].flatten())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def measure(name, sizes):
    """Returns the bytes of one layout."""
    make, options = LAYOUTS[name]
    torch.manual_seed(0)
    model = GPT(**sizes)
    peak = GradientPeak(model.parameters())
    try:
        optimizer = make(model.parameters())
    except ImportError as error:
        raise SystemExit(f"{error}; python -m pip install torchao") from error
    if options is not None:
        prepared(model, optimizer, options)
    scaler = torch.amp.GradScaler("cpu", enabled=name == "torch.amp")
    # Compiled code, as torchao's optimizers want it, would hold the same bytes after minutes.
    with peak, torch.compiler.set_stance("force_eager"):
        for _ in range(STEPS):
            step(model, optimizer, scaler, torch.randint(100, (BATCH, LENGTH + 1)))
    return asdict(kept([optimizer], [model], peak.bytes))


def in_a_process(name, quick):
    """Returns the bytes of a layout, or why there are none."""
    command = [sys.executable, __file__, "--only", name, *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return json.loads(done.stdout.splitlines()[-1])


def row(name, found):
    """Returns a line of the table."""
    if isinstance(found, str):
        return f"| {name} | not measured: {found} |" + " |" * (len(PARTS) + 1)
    each = [found[part] for part in PARTS]
    values = [*each, sum(each), found["gradient_peak"]]
    return f"| {name} | " + " | ".join(f"{v / found['parameters']:.2f}" for v in values) + " |"


def main():
    """Prints a table in Markdown."""
    options = arguments()
    sizes = {"width": 64, "blocks": 2, "symbols": 256} if options.quick else {}
    if options.only:
        print(json.dumps(measure(options.only, sizes)))
        return
    count = sum(each.numel() for each in GPT(**sizes).parameters())
    versions = f"halfstep {halfstep.__version__}, torch {torch.__version__}"
    print(
        f"{count / 1e6:.1f} M parameters, {versions}, {platform.python_version()}, {date.today()}"
    )
    heads = (*PARTS, "total", "gradients at most")
    print(f"\n| bytes per parameter | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
    for name in LAYOUTS:
        print(row(name, in_a_process(name, options.quick)), flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=LAYOUTS, help="measure one layout, in this process")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
