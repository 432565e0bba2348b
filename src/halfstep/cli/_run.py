"""`halfstep run`."""

import contextlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated

import typer

from halfstep.cli._consoles import messages
from halfstep.cli._ending import show_ending
from halfstep.cli._options import IsModule, ScriptName
from halfstep.core import plan_of
from halfstep.errors import MissingExtraError
from halfstep.launch import RunResult, Script, runnable_policy
from halfstep.report import check_writable, is_stdout, write_json
from halfstep.run import load_here, run_document

SETTINGS = {"allow_interspersed_args": False}  # what follows SCRIPT is the script's


def run(
    script: ScriptName,
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="All that follows is the script's own."),
    ] = None,
    module: IsModule = False,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="P",
            help="The policy to train under. Default: auto, which is what the device is fast in, "
            "as it is measured in two seconds the first time.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write all that was measured to a file."),
    ] = None,
) -> Callable[[], Callable[[], None]]:
    """Run an unmodified PyTorch or Keras training script in mixed precision.

    It runs as under plain python, with the same arguments, streams and exit code; a summary goes to
    standard error when it has ended.
    """
    asked = Script(script, tuple(args or ()), module)
    asked.check("run")
    if policy is not None:
        runnable_policy(policy, "run")
    if json:
        check_writable(json, "--json", script)
    _check_framework()
    # Not run here: the parser would catch what the script raises.
    return lambda: load_here(asked, _placed(policy), _Ending(asked, policy, json))


def _placed(policy: str | None) -> str:
    """Returns the text of a policy, that of a plan's file from the root: a script may move."""
    text = (policy or "").strip()
    return text if plan_of(text) is None else os.path.abspath(text)


def _check_framework() -> None:
    if not any(map(find_spec, ("torch", "keras"))):
        raise MissingExtraError(
            "run needs PyTorch or Keras, got an environment without them. "
            "Install one: python -m pip install 'halfstep[torch]', or 'halfstep[keras]'."
        )


class _Ending:
    """Reports when the process ends, wherever the script has gone by then."""

    def __init__(self, script: Script, policy: str | None, json: str | None) -> None:
        self._script, self._chosen = script, policy is None
        self._json = json if json is None or is_stdout(json) else os.path.abspath(json)

    def __call__(self, run: RunResult) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody reads it any more
            show_ending(messages(), self._script.name, run, chosen=self._chosen)
            if self._json:
                write_json(self._json, run_document(self._script, run))
