"""The command `halfstep` and what all its subcommands share."""

import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from halfstep import __version__
from halfstep.cli._compare import INTERRUPTED, compare
from halfstep.cli._rules import rules
from halfstep.errors import HalfstepError

_USAGE = 2
# The error of the parser itself; typer exports only this child of it.
_ParserError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(compare)
app.command()(rules)


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
    _accept_any_encoding()
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = int(app(given, prog_name="halfstep", standalone_mode=False) or 0)
        return _complain("interrupted", code) if code == INTERRUPTED else code
    except HalfstepError as error:
        return _complain(str(error), _USAGE)
    except _ParserError as error:
        return _complain(_explain(error), _USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", INTERRUPTED)


def _accept_any_encoding() -> None:
    """Lets a terminal without Unicode show escapes instead of ending a long job with an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _complain(message: str, code: int) -> int:
    typer.echo(f"halfstep: {message}", err=True)
    return code


def _explain(error: Exception) -> str:
    """Returns the parser's message, with the advice that fits a script's own option."""
    message = getattr(error, "format_message", lambda: str(error))()
    command = getattr(getattr(error, "ctx", None), "info_name", "")
    if type(error).__name__ == "NoSuchOption" and command == "compare":
        return f"{message}. The script's own options go after --: halfstep compare SCRIPT -- ..."
    return str(message)
