"""Runs a script in a process of its own, and makes a report of what it tells."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from halfstep.core import Report
from halfstep.diagnose._findings import findings
from halfstep.diagnose._heard import Heard
from halfstep.errors import UsageError
from halfstep.launch import Enough, Script, Watcher, follow, runnable_policy

DEFAULT_POLICY = "mixed_float16"
_CHILD = "halfstep.diagnose._child"


@dataclass(frozen=True)
class Examination:
    """What is to be examined.

    Args:
        script: The script, and what follows it in `sys.argv`.
        policy: The text of the policy that it trains under.
        overrides: Whether that wins over the policies of the script itself.
        every: At each how many steps to look closely.
        steps: After how many steps to stop, 0 for not at all.
    """

    script: Script
    policy: str = DEFAULT_POLICY
    overrides: bool = False
    every: int = 100
    steps: int = 0

    @classmethod
    def of(
        cls,
        script: str,
        args: Sequence[str] = (),
        *,
        module: bool = False,
        policy: str | None = None,
        every: int = 100,
        steps: int | None = None,
    ) -> Self:
        """Returns the examination that a command line asks for, or says what is wrong with it.

        Args:
            script: The path of the Python file, or the name of the module.
            args: The script's own arguments.
            module: Whether `script` names a module.
            policy: The text of the policy; without one, those of the script count, and
                "mixed_float16" where it has none.
            every: At each how many steps to look closely.
            steps: After how many steps to stop, None for not at all.
        """
        asked = Script(script, tuple(args), module)
        asked.check("doctor")
        chosen = DEFAULT_POLICY if policy is None else policy.strip()
        runnable_policy(chosen, "doctor")
        for name, value, remedy in (
            ("--every", every, "Write --every 100."),
            ("--steps", steps, "Write --steps 200, or leave it out to train to the end."),
        ):
            if value is not None and value < 1:
                raise UsageError(f"doctor needs {name} >= 1, got {value}. {remedy}")
        return cls(asked, chosen, policy is not None, every, steps or 0)


def examine(asked: Examination, watcher: Watcher) -> Report:
    """Returns what happened in a training, with findings.

    Args:
        asked: What to examine.
        watcher: Shows how it goes.
    """
    heard = Heard(asked.policy, asked.overrides)

    def on_message(message: dict[str, Any]) -> None:
        if message["kind"] == "enough":
            raise Enough
        heard.add(message)
        watcher.update(heard.text)

    ended = follow(_job(asked), child=_CHILD, on_message=on_message, watcher=watcher)
    error = ended.failure and (heard.error or ended.failure)
    return heard.report(asked.script.name, error, findings, stopped=ended.stopped)


def _job(asked: Examination) -> dict[str, Any]:
    return {
        "script": asked.script.name,
        "args": asked.script.args,
        "module": asked.script.module,
        "policy": asked.policy,
        "overrides": asked.overrides,
        "seed": 0,
        "task": "doctor",
        "every": asked.every,
        "steps": asked.steps,
    }
