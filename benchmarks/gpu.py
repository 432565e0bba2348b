"""What a region costs and saves on a CUDA device, against torch.amp and against float32.

Run `python benchmarks/gpu.py`; it takes at most five minutes and leaves out what does not fit.
All sides train the same model with a fused AdamW and clipping: `prepare` and the plain loop;
`torch.autocast`, with `GradScaler` and `unscale_` for float16; the plain loop in float32, without
and with TF32. They alternate step by step, timed by events of the device; a figure is the median
ratio of neighbouring steps, with the middle half in brackets. `--device cpu --quick` tries it out.
"""

import argparse
import contextlib
import json
import platform
import statistics
import time
from datetime import date

import torch
from devices import Device
from gpu_models import built
from overhead import cell
from torch import nn
from torch.nn import functional

import halfstep
from halfstep.torch import prepare, saved_bytes

DTYPES = ("float16", "bfloat16")
# The most telling first, because time may run out.
WAYS = [
    ("medium transformer", "eager"),
    ("tiny transformer", "eager"),
    ("CNN", "eager"),
    ("medium transformer", "compiled"),
    ("tiny transformer", "compiled"),
    ("CNN", "compiled"),
]


def loss_of(model, inputs, targets):
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets)


class Side:
    """A model with its batch and optimizer; in float32, the plain loop."""

    precision = "highest"

    def __init__(self, name, way, options, dtype):
        self.model, self.inputs, self.targets = built(name, options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.device, self.dtype = options.device, dtype
        self.begin()
        backend = "eager" if options.quick else "inductor"
        compiled = way == "compiled"
        self.called = torch.compile(self.model, backend=backend) if compiled else self.model

    def begin(self):
        """Does what is done once."""

    def prefer(self):
        """Sets how products of float32 are computed, in matrices and in convolutions."""
        torch.set_float32_matmul_precision(self.precision)
        torch.backends.cudnn.allow_tf32 = self.precision == "high"

    def forward(self):
        return loss_of(self.called, self.inputs, self.targets)

    def update(self, loss):
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def step(self):
        self.optimizer.zero_grad()
        self.update(self.forward())


class TensorFloat(Side):
    """The plain loop in float32 with products in TF32."""

    precision = "high"


class Amp(Side):
    """The loop that PyTorch documents."""

    precision = "high"

    def begin(self):
        self.scaler = torch.amp.GradScaler(self.device, enabled=self.dtype == "float16")

    def forward(self):
        with torch.autocast(self.device, dtype=getattr(torch, self.dtype)):
            return loss_of(self.called, self.inputs, self.targets)

    def update(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Region(Side):
    """The plain loop on a prepared model."""

    precision = "high"

    def begin(self):
        prepare(self.model, self.optimizer, policy=f"mixed_{self.dtype}")


def warmed(kind, device, arguments):
    """Returns a side after its first steps, and the mebibytes that a step of it takes."""
    before = device.allocated()
    side = kind(*arguments)
    side.prefer()
    for _ in range(3):
        side.step()
    device.wait()
    return side, (device.peak(side.step) - before) / 2**20


def timed(sides, device, rounds):
    """Returns the milliseconds of alternating steps, by side."""
    moments = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            side.prefer()
            start = device.moment()
            side.step()
            moments[name].append((start, device.moment()))
    device.wait()
    return {name: [device.milliseconds(*pair) for pair in them] for name, them in moments.items()}


def kept(side):
    """Returns the mebibytes that one forward pass and its loss keep for backward."""
    with saved_bytes() as saved:
        loss = side.forward()
    del loss
    return saved.bytes / 2**20


def compared(ours, theirs):
    ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    return {"ratio": statistics.median(ratios), "low": low, "high": high}


def measure(name, way, options, device):
    """Returns the figures of one model, eager or compiled, for both dtypes."""
    plan = {"float32": (Side, None), "TF32": (TensorFloat, None)}
    for dtype in DTYPES:
        plan |= {f"torch.amp {dtype}": (Amp, dtype), f"region {dtype}": (Region, dtype)}
    if way == "compiled":
        # Compiling is what takes the time.
        del plan["float32"]
    sides, peaks = {}, {}
    for title, (kind, dtype) in plan.items():
        sides[title], peaks[title] = warmed(kind, device, (name, way, options, dtype))
    times = timed(sides, device, 8 if options.quick else 40)
    saved = {title: kept(side) for title, side in sides.items()} if way == "eager" else {}
    return [figures(dtype, times, peaks, saved) for dtype in DTYPES]


def figures(dtype, times, peaks, saved):
    ours = f"region {dtype}"
    others = {"torch.amp": f"torch.amp {dtype}", "TF32": "TF32", "float32": "float32"}
    sides = [ours, others["torch.amp"], "TF32"]
    return {
        "dtype": dtype,
        "milliseconds": statistics.median(times[ours]),
        "over": {
            name: compared(times[ours], times[title])
            for name, title in others.items()
            if title in times
        },
        "peak": [peaks[side] for side in sides],
        "kept": [saved[side] for side in sides if saved],
    }


def vanished(factor, options):
    """Returns the shares of gradients that are zero in float16 though not in float32."""

    def gradients(make):
        model, *batch = built("tiny transformer", options)
        with make(model):
            loss = factor * loss_of(model, *batch)
        loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    def region(model):
        prepare(model)
        return contextlib.nullcontext()

    full = gradients(lambda model: contextlib.nullcontext())
    low = {
        "autocast alone": lambda _: torch.autocast(options.device, dtype=torch.float16),
        "region": region,
    }
    return {
        name: (gradients(make)[full != 0] == 0).float().mean().item() for name, make in low.items()
    }


HEADS = ["", "ms", "/ torch.amp", "/ TF32", "/ float32", "peak MiB", "kept MiB"]


def line(cells):
    return f"| {' | '.join(cells)} |"


def cells(row):
    over = [row["over"].get(other) for other in ("torch.amp", "TF32", "float32")]
    return [
        f"{row['model']}, {row['way']}, {row['dtype']}",
        f"{row['milliseconds']:.2f}",
        *("" if figure is None else cell(figure) for figure in over),
        *(" / ".join(f"{size:.2f}" for size in row[what]) for what in ("peak", "kept")),
    ]


def told(options, device):
    """Measures what there is time for, tells each result at once, and returns all of them."""
    start, rows = time.monotonic(), []
    print(line(HEADS), line(["---"] * len(HEADS)), sep="\n", flush=True)
    for name, way in WAYS:
        if time.monotonic() - start > 60 * options.minutes:
            print(line([f"{name}, {way}: left out for lack of time", *[""] * (len(HEADS) - 1)]))
            continue
        for row in measure(name, way, options, device):
            rows.append({"model": name, "way": way, **row})
            print(line(cells(rows[-1])), flush=True)
        device.free()
    return rows


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try it out")
    parser.add_argument("--minutes", type=float, default=3.0, help="begins nothing new after them")
    parser.add_argument("--json", metavar="FILE", help="writes all figures there")
    return parser.parse_args()


def main():
    options = arguments()
    device = Device(options.device)
    versions = f"halfstep {halfstep.__version__}, torch {torch.__version__}"
    head = f"{device.describe()}, {versions}, Python {platform.python_version()}, {date.today()}"
    print(head)
    print("Times: region over the other. Memory: region / torch.amp / float32 with TF32.\n")
    rows = told(options, device)
    shares = {factor: vanished(factor, options) for factor in (1.0, 1e-6)}
    for factor, found in shares.items():
        text = ", ".join(f"{name} {share:.4%}" for name, share in found.items())
        print(f"\nGradients that vanish in float16, loss times {factor:g}: {text}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"head": head, "rows": rows, "vanished": shares}, file, indent=1)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
