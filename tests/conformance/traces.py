"""Traces of the loss scale: one table, which core and every front-end must replay.

A front-end runs a training step per letter of `steps`, with gradients that are finite (`+`) or not
(`x`), and compares its state after each one with `states`. Where it has no counter of overflows it
compares the rest. `like_torch` marks the traces that `torch.amp.GradScaler` replays as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from halfstep import LossScale, ScaleState

TOP = 2.0**127


@dataclass(frozen=True)
class Trace:
    """Settings, what happens in each step, and the state after it."""

    name: str
    scale: str
    steps: str
    states: tuple[tuple[float, int, int], ...]
    like_torch: bool = True

    @property
    def rule(self) -> LossScale:
        """The settings as a value."""
        return LossScale.parse(self.scale)

    def __iter__(self) -> Iterator[tuple[bool, ScaleState]]:
        for letter, state in zip(self.steps, self.states, strict=True):
            yield letter == "+", ScaleState(*state)

    def __str__(self) -> str:
        return self.name


TRACES = (
    Trace(
        "default settings count",
        "dynamic",
        "+++",
        ((65536.0, 1, 0), (65536.0, 2, 0), (65536.0, 3, 0)),
    ),
    Trace(
        "growth on the third finite step in a row",
        "dynamic(init_scale=8.0, growth_interval=3)",
        "+++++++",
        (
            (8.0, 1, 0),
            (8.0, 2, 0),
            (16.0, 0, 0),
            (16.0, 1, 0),
            (16.0, 2, 0),
            (32.0, 0, 0),
            (32.0, 1, 0),
        ),
    ),
    Trace(
        "an overflow halves and starts the count anew",
        "dynamic(init_scale=8.0, growth_interval=3)",
        "++x++x+++",
        (
            (8.0, 1, 0),
            (8.0, 2, 0),
            (4.0, 0, 1),
            (4.0, 1, 1),
            (4.0, 2, 1),
            (2.0, 0, 1),
            (2.0, 1, 1),
            (2.0, 2, 1),
            (4.0, 0, 0),
        ),
    ),
    Trace(
        "growth in every step",
        "dynamic(init_scale=1.0, growth_interval=1)",
        "++x+",
        ((2.0, 0, 0), (4.0, 0, 0), (2.0, 0, 1), (4.0, 0, 0)),
    ),
    Trace(
        "factors that are no powers of two are rounded to float32",
        "dynamic(init_scale=3.0, growth_factor=1.1, backoff_factor=0.3, growth_interval=1)",
        "++x",
        ((3.299999952316284, 0, 0), (3.629999876022339, 0, 0), (1.0889999866485596, 0, 1)),
    ),
    Trace(
        "growth beyond float32 does not happen",
        f"dynamic(init_scale={TOP / 2}, growth_interval=1)",
        "+++x",
        ((TOP, 0, 0), (TOP, 0, 0), (TOP, 0, 0), (TOP / 2, 0, 1)),
    ),
    Trace(
        "growth beyond the cap does not happen and the count starts anew",
        "dynamic(init_scale=8.0, growth_interval=2, max_scale=20.0)",
        "++++++x",
        (
            (8.0, 1, 0),
            (16.0, 0, 0),
            (16.0, 1, 0),
            (16.0, 0, 0),
            (16.0, 1, 0),
            (16.0, 0, 0),
            (8.0, 0, 1),
        ),
        like_torch=False,
    ),
    Trace(
        "overflows stop at the floor and growth leads out of it",
        "dynamic(init_scale=4.0, growth_interval=2, min_scale=1.5)",
        "xxxx++",
        (
            (2.0, 0, 1),
            (1.5, 0, 1),
            (1.5, 0, 1),
            (1.5, 0, 1),
            (1.5, 1, 1),
            (3.0, 0, 0),
        ),
        like_torch=False,
    ),
    Trace(
        "two hundred overflows leave the default floor",
        "dynamic",
        "x" * 200,
        (
            *((2.0**power, 0, 1) for power in range(15, -16, -1)),
            *(((2.0**-16, 0, 1),) * 169),
        ),
        like_torch=False,
    ),
    Trace(
        "hysteresis tolerates one overflow and refills only by growth",
        "dynamic(init_scale=64.0, growth_interval=2, hysteresis=2)",
        "x+xx++xx",
        (
            (64.0, 0, 1),
            (64.0, 1, 1),
            (32.0, 0, 2),
            (16.0, 0, 2),
            (16.0, 1, 2),
            (32.0, 0, 0),
            (32.0, 0, 1),
            (16.0, 0, 2),
        ),
        like_torch=False,
    ),
    Trace(
        "hysteresis refills at the cap as well",
        "dynamic(init_scale=64.0, growth_interval=1, max_scale=64.0, hysteresis=2)",
        "x+x+xx",
        (
            (64.0, 0, 1),
            (64.0, 0, 0),
            (64.0, 0, 1),
            (64.0, 0, 0),
            (64.0, 0, 1),
            (32.0, 0, 2),
        ),
        like_torch=False,
    ),
    Trace(
        "a scale that never grows backs off",
        "dynamic(init_scale=8.0, growth_factor=1.0, growth_interval=1)",
        "+x+",
        ((8.0, 0, 0), (4.0, 0, 1), (4.0, 0, 0)),
    ),
    Trace(
        "a static scale never moves",
        "static(1024.0)",
        "x+x",
        ((1024.0, 0, 1), (1024.0, 1, 1), (1024.0, 0, 1)),
        like_torch=False,
    ),
    Trace(
        "no scale never moves",
        "none",
        "xx+",
        ((1.0, 0, 1), (1.0, 0, 1), (1.0, 1, 1)),
        like_torch=False,
    ),
)
