"""Runs a script in a process of its own until a step of it was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from halfstep.core import Plan
from halfstep.errors import UsageError
from halfstep.launch import Enough, Script, Watcher, follow
from halfstep.plan._planner import ONLY_PYTORCH

_CHILD = "halfstep.plan._child"


@dataclass(frozen=True)
class Wanted:
    """What a plan is wanted for.

    Args:
        script: The script, and what follows it in `sys.argv`.
        step: The step that is measured; the first ones may do what later ones do not.
        seconds: About how long to measure.
        budget: How far an operation may be from float32.
    """

    script: Script
    step: int = 3
    seconds: float = 30.0
    budget: float = 0.05

    @classmethod
    def of(
        cls,
        script: str,
        args: Sequence[str] = (),
        *,
        module: bool = False,
        step: int = 3,
        seconds: float = 30.0,
        budget: float = 0.05,
    ) -> Self:
        """Returns what a command line asks for, or says what is wrong with it."""
        asked = Script(script, tuple(args), module)
        asked.check("plan")
        for name, value, example in (
            ("--step", step, "3"),
            ("--seconds", seconds, "30"),
            ("--budget", budget, "0.05"),
        ):
            if not value > 0:
                raise UsageError(f"plan needs {name} above 0, got {value}. Write {name} {example}.")
        return cls(asked, step, seconds, budget)


def find(wanted: Wanted, watcher: Watcher) -> Plan | str:
    """Returns the plan for a script, or why there is none.

    Args:
        wanted: What it is wanted for.
        watcher: Shows how it goes.
    """
    heard: dict[str, Any] = {}

    def on_message(message: dict[str, Any]) -> None:
        heard[message["kind"]] = message
        if message["kind"] == "telling":
            watcher.update(message["text"])
        if message["kind"] in ("plan", "refused"):
            raise Enough

    ended = follow(_job(wanted), child=_CHILD, on_message=on_message, watcher=watcher)
    if ended.stopped:
        raise KeyboardInterrupt
    if "plan" in heard:
        return Plan.parse(heard["plan"]["plan"])
    return _why(wanted, heard, ended.failure)


def _why(wanted: Wanted, heard: dict[str, Any], failure: str) -> str:
    """Returns why there is no plan."""
    if "refused" in heard:
        return str(heard["refused"]["why"]).rstrip(".")
    if failure:
        return str(heard["error"]["error"]) if "error" in heard else failure
    return _never_came(wanted.step, heard.get("steps", {"steps": 0})["steps"])


def _never_came(step: int, steps: int) -> str:
    if not steps:
        return f"no step of an optimizer was seen in it. {ONLY_PYTORCH}"
    return f"it ended after {steps} steps, before step {step}. Write --step {steps}"


def _job(wanted: Wanted) -> dict[str, Any]:
    return {
        "script": wanted.script.name,
        "args": wanted.script.args,
        "module": wanted.script.module,
        "policy": "float32",
        "seed": 0,
        "task": "plan",
        "steps": wanted.step,
        "seconds": wanted.seconds,
        "budget": wanted.budget,
    }
