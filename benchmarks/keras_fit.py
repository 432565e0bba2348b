"""What a step of Keras' `fit` takes with halfstep, over what it takes with Keras alone.

Run `python benchmarks/keras_fit.py`. Each backend is measured in a process of its own. Within one,
the ways take turns, so that a slow spell of the machine hits all. A figure is the median of the
ratios of neighbouring runs, with their middle half in brackets.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
from ratios import cell, processor

BACKENDS = ("tensorflow", "jax", "torch")
BATCH = 32


@dataclass(frozen=True)
class Way:
    """A name, what sets the policy, and what makes the optimizer that `compile` receives."""

    name: str
    begin: Callable[[], None]
    optimizer: Callable[[], object]


def models():
    """Each returns a network and an input: many small variables, and a few large ones."""
    from keras import Input, Sequential, layers

    def deep():
        return Sequential([Input((64,)), *(layers.Dense(64, "relu") for _ in range(8))]), (64,)

    def wide():
        return Sequential([Input((512,)), *(layers.Dense(1024, "relu") for _ in range(2))]), (512,)

    def images():
        hidden = [layers.Conv2D(16, 3, activation="relu"), layers.BatchNormalization()]
        last = [layers.GlobalAveragePooling2D(), layers.Dense(10, activation="softmax")]
        return Sequential([Input((16, 16, 3)), *hidden, *last]), (16, 16, 3)

    return {"8 dense of 64": deep, "2 dense of 1,024": wide, "convolution": images}


def ways():
    """Returns pairs of Keras' way and ours, by what they compute in."""
    import keras

    import halfstep.keras as ours

    def adam():
        return keras.optimizers.Adam(1e-4)

    def alone():
        ours.set_global_policy("float32")
        keras.config.set_dtype_policy("mixed_float16")

    def plain():
        ours.set_global_policy("float32")

    kerass, own = keras.optimizers.LossScaleOptimizer, ours.LossScaleOptimizer
    return {
        "float32, the optimizer alone": (
            Way("Keras", plain, lambda: kerass(adam())),
            Way("halfstep", plain, lambda: own(adam())),
        ),
        "mixed_float16, safe=False": (
            Way("Keras", alone, adam),
            Way("halfstep", lambda: ours.set_global_policy("mixed_float16", safe=False), adam),
        ),
        "mixed_float16": (
            Way("Keras", alone, adam),
            Way("halfstep", lambda: ours.set_global_policy("mixed_float16"), adam),
        ),
    }


def prepared(way, build, steps):
    """Returns a function that trains so many steps with `fit` and returns the seconds of one."""
    import keras

    keras.utils.set_random_seed(0)
    way.begin()
    model, shape = build()
    numbers = np.random.default_rng(0)
    inputs = numbers.standard_normal((BATCH * steps, *shape)).astype("float32")
    targets = np.zeros((BATCH * steps, model.output_shape[-1]), "float32")
    model.compile(way.optimizer(), "mse")
    trained = {"batch_size": BATCH, "verbose": 0, "shuffle": False}

    def run():
        way.begin()
        start = time.perf_counter()
        model.fit(inputs, targets, **trained)
        return (time.perf_counter() - start) / steps

    return run


def measure(options):
    """Yields a row for each model and pair of ways."""
    for model, build in models().items():
        for computing, pair in ways().items():
            theirs, own = (prepared(way, build, options.steps) for way in pair)
            for run in (theirs, own) * 2:
                run()
            rounds = [(theirs(), own()) for _ in range(options.rounds)]
            ratios = [mine / its for its, mine in rounds]
            milliseconds = 1000 * statistics.median(its for its, _ in rounds)
            yield {
                "model": model,
                "computing": computing,
                "milliseconds": milliseconds,
                "ratios": ratios,
            }


def rows_of(backend, arguments):
    """Returns what a process of its own measures on a backend."""
    command = [sys.executable, __file__, *arguments, "--backend", backend, "--json"]
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(rows):
    lines = ["| backend | model | computed in | Keras' step | halfstep over Keras |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        names = f"| {row['backend']} | {row['model']} | {row['computing']} "
        lines.append(f"{names}| {row['milliseconds']:.2f} ms | {cell(row['ratios'])} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="runs of each way")
    parser.add_argument("--steps", type=int, default=60, help="steps in a run")
    parser.add_argument("--backend", choices=BACKENDS, help="this one only")
    parser.add_argument("--json", action="store_true", help="measure here, print JSON")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(list(measure(options))))
        return
    chosen = (
        [options.backend] if options.backend else [name for name in BACKENDS if find_spec(name)]
    )
    arguments = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    rows = [{"backend": name, **row} for name in chosen for row in rows_of(name, arguments)]
    packages = ", ".join(f"{name} {version(name)}" for name in ("halfstep", "keras"))
    print(f"{processor()}, {packages}, {date.today()}")
    print("time of a step of fit over that of Keras alone: median (middle half)\n")
    print(table(rows))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
