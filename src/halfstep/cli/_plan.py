"""`halfstep plan`."""

from importlib.util import find_spec
from typing import Annotated

import typer
from rich.text import Text

from halfstep.cli._consoles import output, progress
from halfstep.cli._interruptions import terminated_like_interrupted
from halfstep.cli._line import Line
from halfstep.cli._options import IsModule, JsonFile, ScriptArgs, ScriptName, Verbose
from halfstep.core import Plan
from halfstep.errors import MissingExtraError, UsageError
from halfstep.plan import Wanted, find
from halfstep.report import PlanText, Progress, check_writable, is_stdout, write_json, write_text

_FAILED = 1


def plan(
    script: ScriptName,
    args: ScriptArgs = None,
    module: IsModule = False,
    write: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where the plan is written to.")
    ] = "plan.toml",
    step: Annotated[
        int, typer.Option(metavar="N", help="Measure this step; the script then ends.")
    ] = 3,
    seconds: Annotated[float, typer.Option(metavar="S", help="About how long to measure.")] = 30.0,
    budget: Annotated[
        float,
        typer.Option(metavar="E", help="How far an operation may be from float32, in its norm."),
    ] = 0.05,
    json: JsonFile = None,
    verbose: Verbose = False,
) -> int:
    """Find the policy under which a PyTorch script trains fastest on this machine, by measuring.

    Its operations are timed in each format, rules follow from that, and whole steps decide. The
    result is a file that a person can edit: pass its path as any policy. Where nothing is faster
    than float32, it says so.
    """
    wanted = Wanted.of(script, args or (), module=module, step=step, seconds=seconds, budget=budget)
    _check_name(write)
    check_writable(write, "--output", script)
    if json:
        check_writable(json, "--json", script, write)
    _check_framework()
    found = _find(wanted, verbose)
    console = output(to_stderr=any(path is not None and is_stdout(path) for path in (write, json)))
    if isinstance(found, str):
        console.print(Text(f"halfstep: there is no plan for {script}: {found}."), soft_wrap=True)
        return _FAILED
    write_text(write, found.to_toml(), "--output")
    if json:
        write_json(json, found.to_dict())
    console.print(PlanText(found, write), soft_wrap=True)
    return 0


def _check_name(path: str) -> None:
    if not is_stdout(path) and not path.endswith(".toml"):
        raise UsageError(
            f"plan needs --output to end in .toml, by which it is known as a plan, got {path!r}. "
            f"Write --output {path}.toml."
        )


def _check_framework() -> None:
    if find_spec("torch") is None:
        raise MissingExtraError(
            "plan needs PyTorch, got an environment without it. "
            "Install it: python -m pip install 'halfstep[torch]'."
        )


def _find(wanted: Wanted, verbose: bool) -> Plan | str:
    with terminated_like_interrupted(), Progress(progress(), ["plan"]) as shown:
        shown.start(0)
        found = find(wanted, Line(shown, verbose=verbose))
        failed = isinstance(found, str)
        shown.finish(0, "failed" if failed else "measured", failed=failed)
    return found
