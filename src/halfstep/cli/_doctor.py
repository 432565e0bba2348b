"""`halfstep doctor`."""

from importlib.util import find_spec
from typing import Annotated

import typer
from rich.text import Text

from halfstep.cli._consoles import messages, output, progress
from halfstep.cli._interruptions import INTERRUPTED, terminated_like_interrupted
from halfstep.cli._line import Line
from halfstep.cli._options import IsModule, JsonFile, ScriptArgs, ScriptName, Verbose
from halfstep.core import Report
from halfstep.diagnose import DEFAULT_POLICY, Examination, examine
from halfstep.errors import MissingExtraError
from halfstep.report import (
    Progress,
    ReportText,
    check_page,
    check_writable,
    headline,
    is_stdout,
    page,
    write_json,
    write_text,
)

_FOUND = 1
_GRAVE = ("error", "warning")
_HINT = "--html doctor.html writes all of it as a page: every step, every tensor, every cast"


def doctor(
    script: ScriptName,
    args: ScriptArgs = None,
    module: IsModule = False,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="P",
            help="The policy to train under, whatever the script says. Default: the script's own, "
            f"and {DEFAULT_POLICY} where it has none.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        int,
        typer.Option(metavar="N", help="Look closely at each N-th step, and at the first ones."),
    ] = 100,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Stop after so many steps. Default: train to the end.",
            show_default=False,
        ),
    ] = None,
    json: JsonFile = None,
    html: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Write all that was found as a page, which opens without network."
        ),
    ] = None,
    verbose: Verbose = False,
) -> int:
    """Train a script in low precision and explain what becomes of its numbers.

    Where the first inf or NaN comes from, which gradients become 0, what is cast, and what to write
    instead, in scripts of PyTorch, Keras and JAX. The exit code is 1 if there is something to mend.
    Ctrl-C ends the training, shows and writes what was found so far, and makes the exit code 130.
    """
    asked = Examination.of(
        script, args or (), module=module, policy=policy, every=every, steps=steps
    )
    _check_files(script, json, html)
    _check_framework()
    with terminated_like_interrupted():
        report = _examine(asked, verbose)
    _show(report, to_stderr=any(map(is_stdout, filter(None, (json, html)))))
    if json:
        write_json(json, report.to_dict())
    if html:
        write_text(html, page(report), "--html")
    _tell_files(json, html)
    return INTERRUPTED if report.stopped else _FOUND if _is_grave(report) else 0


def _check_files(script: str, json: str | None, html: str | None) -> None:
    if json is not None:
        check_writable(json, "--json", script)
    if html is not None:
        check_page()
        check_writable(html, "--html", script, json)


def _check_framework() -> None:
    if not any(map(find_spec, ("torch", "keras", "jax"))):
        raise MissingExtraError(
            "doctor needs PyTorch, Keras or JAX, got an environment without them. Install one: "
            "python -m pip install 'halfstep[torch]', or 'halfstep[keras]', or 'halfstep[jax]'."
        )


def _examine(asked: Examination, verbose: bool) -> Report:
    with Progress(progress(), [asked.script.name]) as shown:
        shown.start(0)
        report = examine(asked, Line(shown, verbose=verbose))
        failed = bool(report.error)
        text = report.error.splitlines()[-1] if failed else headline(report)
        shown.finish(0, text, failed=failed)
    return report


def _show(report: Report, *, to_stderr: bool) -> None:
    console = output(to_stderr=to_stderr)
    console.print()
    console.print(ReportText(report), crop=False)


def _tell_files(json: str | None, html: str | None) -> None:
    console = messages()
    for path in filter(None, (json, html)):
        if not is_stdout(path):
            console.print(Text(f"halfstep: wrote {path}"), soft_wrap=True)
    if html is None:
        console.print(Text(_HINT, style="dim"), soft_wrap=True)


def _is_grave(report: Report) -> bool:
    return bool(report.error) or any(each.severity in _GRAVE for each in report.findings)
