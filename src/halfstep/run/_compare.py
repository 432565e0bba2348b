"""A script, run once per policy and seed, each time in a process of its own."""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from halfstep.core import Auto, Policy
from halfstep.errors import UsageError
from halfstep.launch import (
    RunLog,
    RunResult,
    Script,
    SharedInput,
    explain_exit,
    run_process,
    runnable_policy,
)

DEFAULT_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
# The module whose main function is the process of a run.
CHILD = "halfstep.run._child"
_LAST_SEED = 2**32 - 1
_KEPT_LINES = 20


class Watcher(Protocol):
    """Whoever shows how the runs go."""

    def start(self, index: int) -> None:
        """Learns that a run begins."""

    def update(self, index: int, text: str) -> None:
        """Learns how far a run is."""

    def output(self, line: str) -> None:
        """Learns what the script printed."""

    def finish(self, index: int, run: RunResult) -> None:
        """Learns how a run ended."""


@dataclass(frozen=True)
class Comparison:
    """Which runs to make.

    Args:
        script: The Python file or the module, as the user wrote it.
        args: The script's own arguments.
        policies: The texts of the policies, the one that the others are compared with first.
        seeds: The seeds.
        module: Whether `script` names a module.
    """

    script: str
    args: tuple[str, ...]
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    module: bool = False

    @classmethod
    def of(
        cls,
        script: str,
        args: Sequence[str] = (),
        policies: Sequence[str] = (),
        *,
        seeds: int = 1,
        seed: int = 0,
        module: bool = False,
    ) -> Self:
        """Returns the comparison that a command line asks for, or says what is wrong with it.

        Args:
            script: The path of the Python file, or the name of the module.
            args: The script's own arguments.
            policies: The texts of the policies; none stands for the default ones.
            seeds: How many seeds.
            seed: The first of them.
            module: Whether `script` names a module.
        """
        Script(script, module=module).check("compare")
        _check_seeds(seeds, seed)
        texts = tuple(text.strip() for text in policies or DEFAULT_POLICIES)
        _check_policies(texts)
        return cls(script, tuple(args), texts, tuple(range(seed, seed + seeds)), module)

    @property
    def plan(self) -> tuple[tuple[str, int], ...]:
        """The (policy, seed) of each run: seed by seed, so that a slow spell hits all alike."""
        return tuple((policy, seed) for seed in self.seeds for policy in self.policies)


def run_all(comparison: Comparison, watcher: Watcher) -> Iterator[RunResult]:
    """Yields every run, one after the other so that they do not slow each other down."""
    stdin = SharedInput()
    for index in range(len(comparison.plan)):
        yield _run(comparison, index, stdin, watcher)


def _run(comparison: Comparison, index: int, stdin: SharedInput, watcher: Watcher) -> RunResult:
    policy, seed = comparison.plan[index]
    log, kept = RunLog(policy, seed), deque[str](maxlen=_KEPT_LINES)
    job: dict[str, Any] = {
        "script": comparison.script,
        "args": comparison.args,
        "module": comparison.module,
    }
    job |= {"policy": policy, "seed": seed}
    watcher.start(index)
    started = time.monotonic()
    exit_code = run_process(
        job,
        stdin,
        child=CHILD,
        on_event=_both(
            lambda line: log.add(json.loads(line)), lambda _: watcher.update(index, log.text)
        ),
        on_output=_both(kept.append, watcher.output),
    )
    error = (log.error or explain_exit(exit_code, kept)) if exit_code else ""
    result = log.result(exit_code=exit_code, error=error, seconds=time.monotonic() - started)
    watcher.finish(index, result)
    return result


def _both(first: Callable[[str], None], second: Callable[[str], None]) -> Callable[[str], None]:
    def call(line: str) -> None:
        first(line)
        second(line)

    return call


def _check_seeds(seeds: int, seed: int) -> None:
    if seeds < 1:
        raise UsageError(
            f"compare needs --seeds >= 1, got {seeds}. Write --seeds 3 to measure the noise."
        )
    if not 0 <= seed <= _LAST_SEED - seeds + 1:
        raise UsageError(
            f"compare needs seeds from 0 to {_LAST_SEED}, got --seed {seed} with {seeds} of them. "
            "Write --seed 0."
        )


def _check_policies(texts: Sequence[str]) -> None:
    seen: dict[Policy | Auto, str] = {}
    for text in texts:
        policy = runnable_policy(text, "compare")
        if policy in seen:
            raise UsageError(
                f"compare needs different policies, got {seen[policy]!r} and {text!r}, "
                "which are the same. Leave one out; use --seeds to repeat a run."
            )
        seen[policy] = text
