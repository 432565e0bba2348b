"""What a jitted training step takes with halfstep, over one with casts written by hand.

Run `python benchmarks/jax_step.py`. By hand means with jmp: parameters and inputs are cast, the
loss is computed in float32 and scaled where the format is float16, and steps whose gradients are
not finite are not taken. The ways take turns, so that a slow spell of the machine hits all. A
figure is the median of the ratios of neighbouring runs, with their middle half in brackets.
"""

import argparse
import contextlib
import functools
import statistics
import time
from datetime import date
from importlib.metadata import version

import jax
import jmp
import optax
from jax import numpy as jnp
from ratios import cell, processor

import halfstep
import halfstep.jax as ours

HEADS = 4
PEERS = ("jax", "jmp", "optax")


def dense(key, rows, columns):
    return jax.random.normal(key, (rows, columns)) / rows**0.5


def normalised(values, gain):
    centred = values - values.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gain


def layers(width, depth, batch):
    """Dense layers with relu."""
    keys = jax.random.split(jax.random.key(0), depth)
    parameters = [dense(key, width, width) for key in keys]

    def loss(parameters, inputs):
        for weight in parameters:
            inputs = jax.nn.relu(inputs @ weight)
        return jnp.mean(inputs.astype(jnp.float32) ** 2)

    return loss, parameters, jax.random.normal(keys[0], (batch, width))


def transformer(width, length, batch):
    """A block with causal attention."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"mix": 3 * width, "out": width, "widen": 4 * width}
    parameters = {
        name: dense(key, width, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    parameters["narrow"] = dense(keys[3], 4 * width, width)
    parameters["gains"] = jnp.ones((2, width))
    earlier = jnp.tril(jnp.ones((length, length), bool))

    def loss(given, tokens):
        mixed = normalised(tokens, given["gains"][0]) @ given["mix"]
        query, key, value = jnp.moveaxis(mixed.reshape(batch, length, 3, HEADS, -1), 2, 0)
        weights = jnp.einsum("bqhd,bkhd->bhqk", query, key) / key.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(earlier, weights, -jnp.inf))
        seen = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        tokens = tokens + seen.reshape(tokens.shape) @ given["out"]
        hidden = jax.nn.gelu(normalised(tokens, given["gains"][1]) @ given["widen"])
        tokens = tokens + hidden @ given["narrow"]
        return jnp.mean(tokens.astype(jnp.float32) ** 2)

    return loss, parameters, jax.random.normal(keys[4], (batch, length, width))


def images(channels, batch):
    """Two convolutions."""
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = ((3, channels), (channels, channels))
    parameters = [
        jax.random.normal(key, (3, 3, *size)) / (9 * size[0]) ** 0.5
        for key, size in zip(keys, sizes, strict=False)
    ]

    def loss(parameters, pixels):
        for kernel in parameters:
            names = ("NHWC", "HWIO", "NHWC")
            pixels = jax.lax.conv_general_dilated(
                pixels, kernel, (1, 1), "SAME", dimension_numbers=names
            )
            pixels = jax.nn.relu(pixels)
        return jnp.mean(pixels.astype(jnp.float32) ** 2)

    return loss, parameters, jax.random.normal(keys[2], (batch, 16, 16, 3))


MODELS = {
    "8 dense of 512": functools.partial(layers, 512, 8, 64),
    "a transformer block of 256": functools.partial(transformer, 256, 64, 8),
    "2 convolutions of 32": functools.partial(images, 32, 16),
}


def optimizer():
    return optax.adam(1e-4)


def plain(loss, parameters, dtype):
    """The step in float32."""

    def step(state, inputs):
        parameters, moments = state
        value, grads = jax.value_and_grad(loss)(parameters, inputs)
        updates, moments = optimizer().update(grads, moments)
        return (optax.apply_updates(parameters, updates), moments), value

    return step, (parameters, optimizer().init(parameters))


def by_hand(loss, parameters, dtype):
    """jmp's step."""
    policy = jmp.Policy(jnp.float32, dtype, jnp.float32)
    first = (
        jmp.DynamicLossScale(jnp.float32(2.0**15)) if dtype == jnp.float16 else jmp.NoOpLossScale()
    )

    def scaled(parameters, inputs, scale):
        value = loss(*policy.cast_to_compute((parameters, inputs)))
        return scale.scale(value), value

    def step(state, inputs):
        parameters, moments, scale = state
        grads, value = jax.grad(scaled, has_aux=True)(parameters, inputs, scale)
        grads = scale.unscale(grads)
        updates, stepped = optimizer().update(grads, moments)
        after = optax.apply_updates(parameters, updates), stepped
        if isinstance(scale, jmp.NoOpLossScale):
            return (*after, scale), value
        finite = jmp.all_finite(grads)
        after = jmp.select_tree(finite, after, (parameters, moments))
        return (*after, scale.adjust(finite)), value

    return step, (parameters, optimizer().init(parameters), first)


def in_a_region(loss, parameters, dtype):
    """halfstep's step."""
    low = ours.autocast(loss, f"mixed_{jnp.dtype(dtype).name}")
    inner = optimizer()
    trains = ours.apply_if_finite(inner) if dtype == jnp.float16 else inner

    def step(state, inputs):
        parameters, moments = state
        value, grads = jax.value_and_grad(low)(parameters, inputs)
        updates, moments = trains.update(grads, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), value

    return step, (parameters, trains.init(parameters))


WAYS = {"float32": plain, "by hand": by_hand, "halfstep": in_a_region}


class Timed:
    """A way to train: how long it takes to compile, and a step."""

    def __init__(self, way, build, dtype):
        loss, parameters, self.inputs = build()
        step, self.state = way(loss, parameters, dtype)
        start = time.perf_counter()
        jax.make_jaxpr(step)(self.state, self.inputs)
        self.traced = time.perf_counter() - start
        self.step = jax.jit(step)

    def __call__(self, steps):
        start = time.perf_counter()
        for _ in range(steps):
            self.state, value = self.step(self.state, self.inputs)
        value.block_until_ready()
        jax.block_until_ready(self.state)
        return (time.perf_counter() - start) / steps


def measure(build, dtype, options):
    """Returns the ways, and the seconds of a step in each round."""
    ways = {name: Timed(way, build, dtype) for name, way in WAYS.items()}
    for run in [*ways.values()] * 2:
        run(options.steps)
    rounds = [
        {name: run(options.steps) for name, run in ways.items()} for _ in range(options.rounds)
    ]
    return ways, rounds


def over(rounds, base):
    return cell([each["halfstep"] / each[base] for each in rounds])


def row(model, dtype, options):
    ways, rounds = measure(MODELS[model], dtype, options)
    milliseconds = 1000 * statistics.median(each["by hand"] for each in rounds)
    traced = " / ".join(f"{1000 * ways[name].traced:.0f}" for name in ("by hand", "halfstep"))
    ratios = f"{over(rounds, 'by hand')} | {over(rounds, 'float32')}"
    return f"| {model} | {jnp.dtype(dtype).name} | {milliseconds:.2f} ms | {ratios} | {traced} ms |"


def _versioned(package):
    return f"{package} {version(package)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="runs of each way")
    parser.add_argument("--steps", type=int, default=10, help="steps in a run")
    options = parser.parse_args()
    packages = f"halfstep {halfstep.__version__}, " + ", ".join(map(_versioned, PEERS))
    print(f"{processor()}, {packages}, {date.today()}")
    print("time of a jitted step: median (middle half); tracing: by hand / halfstep\n")
    print("| model | dtype | by hand | halfstep over by hand | halfstep over float32 | traced in |")
    print("|---|---|---|---|---|---|")
    for model in MODELS:
        for dtype in (jnp.bfloat16, jnp.float16):
            print(row(model, dtype, options), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
