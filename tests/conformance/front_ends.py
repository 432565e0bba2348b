"""The front-ends that move a loss scale as core does: one table, a row for each.

`module` has a function for each of the `ways` in which the front-end moves a scale. It takes the
settings of the scale and the letters of a trace, and yields what the front-end has come to after
each of them.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from halfstep import LossScale

ROOT = Path(__file__).parents[2]


class After(NamedTuple):
    """What a front-end has come to after a step: the state of the scale, and skipped steps."""

    scale: float
    finite_steps: int
    overflows: int
    skipped: int


Replay = Callable[[str, LossScale, str], Iterable[After]]


@dataclass(frozen=True)
class FrontEnd:
    """A front-end, and how it is started.

    Args:
        name: What it is called in the tests.
        module: The module with a function for each way.
        ways: How it moves a scale, by name, each with the kinds of scale that move so.
        needs: The packages without which it is left out.
        environment: Where it is given, the front-end runs in a process of its own, with these.
        examples: How many random traces it replays in each way.
    """

    name: str
    module: str
    ways: dict[str, tuple[str, ...]]
    needs: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    examples: int = 50

    @contextlib.contextmanager
    def running(self) -> Iterator[Replay]:
        """Yields what replays a trace in one of the ways."""
        if not self.environment:
            yield replay_of(self.module)
            return
        with _worker(self.module, self.environment) as worker:
            yield lambda *trace: _asked(worker, *trace)


def replay_of(module: str) -> Replay:
    """Returns what replays a trace in this process."""
    return lambda way, rule, steps: getattr(import_module(module), way)(rule, steps)


def _worker(module: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.conformance.worker", module],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _asked(worker: subprocess.Popen[str], way: str, rule: LossScale, steps: str) -> list[After]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(json.dumps([way, str(rule), steps]), file=worker.stdin, flush=True)
    answer = worker.stdout.readline()
    assert answer, f"{way} ended at {rule} with {steps}"
    return [After(*values) for values in json.loads(answer)]


ALL = ("none", "static", "dynamic")
_LOOPS = {"eager": ALL, "compiled": ALL}
_KERAS = {"jax": _LOOPS, "tensorflow": _LOOPS, "torch": {"eager": ALL}}

FRONT_ENDS = (
    FrontEnd(
        "torch",
        "tests.conformance.on_torch",
        # A region counts only where counting moves its scale.
        {"scaler": ALL, "region": ("dynamic",)},
        needs=("torch",),
    ),
    FrontEnd(
        "jax",
        "tests.conformance.on_jax",
        # Scales of the other kinds have no state.
        {"scale": ("dynamic",), "optimizer": ("dynamic",)},
        needs=("jax", "optax"),
        examples=25,
    ),
    *(
        FrontEnd(
            f"keras on {backend}",
            "tests.conformance.on_keras",
            ways,
            needs=("keras", backend),
            environment={"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
            examples=25,
        )
        for backend, ways in _KERAS.items()
    ),
)
