"""The command `halfstep` and what all its subcommands share."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from halfstep import __version__
from halfstep.cli._compare import compare
from halfstep.cli._doctor import doctor
from halfstep.cli._interruptions import INTERRUPTED
from halfstep.cli._memory import memory
from halfstep.cli._plan import plan
from halfstep.cli._rules import rules
from halfstep.cli._run import SETTINGS, run
from halfstep.errors import HalfstepError, UsageError

_USAGE = 2
# The error of the parser itself; typer exports only this child of it.
_ParserError: type[Exception] = typer.BadParameter.__bases__[0]
_OWN_OPTIONS = {
    "compare": "The script's own options go after --: halfstep compare SCRIPT -- ...",
    "doctor": "The script's own options go after --: halfstep doctor SCRIPT -- ...",
    "memory": "The script's own options go after --: halfstep memory SCRIPT -- ...",
    "plan": "The script's own options go after --: halfstep plan SCRIPT -- ...",
    "run": "The script's own options go after the script: halfstep run SCRIPT ...",
}

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(compare)
app.command()(doctor)
app.command()(memory)
app.command()(plan)
app.command()(rules)
app.command(context_settings=SETTINGS)(run)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"halfstep {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Mixed-precision training that can be compared, explained and trusted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0, 1 for findings, 2 for wrong usage.

    Args:
        arguments: What follows the program's name; without it, the process's own.

    Example:
        >>> main(["--version"])
        halfstep ...
        0
    """
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    with _any_encoding():
        result = _answer(lambda: app(given, prog_name="halfstep", standalone_mode=False))
    if callable(result):  # a script, whose errors are not ours to catch
        return _run_script(result)
    return _complain("interrupted", result) if result == INTERRUPTED else int(result)


def _answer(command: Callable[[], Any]) -> Any:
    """Returns what a command returns, 0 for nothing, or the code of its error."""
    try:
        return command() or 0
    except HalfstepError as error:
        return _complain(str(error), _USAGE)
    except _ParserError as error:
        return _complain(_explain(error), _USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


def _run_script(load: Callable[[], Callable[[], None]]) -> int:
    try:
        script = load()
    except UsageError as error:
        return _complain(str(error), _USAGE)
    script()
    return 0


@contextlib.contextmanager
def _any_encoding() -> Iterator[None]:
    """Lets a terminal without Unicode show escapes instead of ending a long job with an error."""
    streams = [each for each in (sys.stdout, sys.stderr) if isinstance(each, io.TextIOWrapper)]
    before = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            stream.reconfigure(errors=errors)


def _complain(message: str, code: int) -> int:
    typer.echo(f"halfstep: {message}", err=True)
    return code


def _explain(error: Exception) -> str:
    """Returns the parser's message, with the advice that fits a script's own option."""
    message = getattr(error, "format_message", lambda: str(error))()
    command = getattr(getattr(error, "ctx", None), "info_name", "")
    advice = _OWN_OPTIONS.get(command)
    if type(error).__name__ == "NoSuchOption" and advice:
        return f"{message}. {advice}"
    return str(message)
