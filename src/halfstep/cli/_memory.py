"""`halfstep memory`."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from halfstep.cli._consoles import output, progress
from halfstep.cli._options import JsonFile, ScriptArgs
from halfstep.errors import MissingExtraError
from halfstep.report import (
    FittingTable,
    Progress,
    Row,
    check_writable,
    is_stdout,
    number,
    write_json,
)
from halfstep.run import (
    Footprint,
    Target,
    activation_rows,
    footprint_notes,
    layout_rows,
    measure,
    memory_document,
    processes,
)

_FAILED = 1
_SHOWN_LINES = 8


def memory(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A Python training script, or with -m a module; or FILE.py:CALLABLE or "
            "PACKAGE.MODULE:CALLABLE, which returns a model, or a model and example inputs.",
        ),
    ],
    args: ScriptArgs = None,
    module: Annotated[
        bool, typer.Option("-m", help="TARGET is the name of a module, as in python -m.")
    ] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What trains a model: an optimizer of torch.optim, with options after commas, "
            "such as 'SGD, momentum=0.9'. A script has its own. Default: AdamW.",
            show_default=False,
        ),
    ] = None,
    json: JsonFile = None,
) -> int:
    """Show what training keeps in memory: bytes per parameter and activation, by layout.

    What arithmetic predicts and what was measured, side by side. A script runs for a few optimizer
    steps, once per policy, and is then stopped.
    """
    asked = Target.of(target, tuple(args or ()), module=module, optimizer=optimizer)
    if json:
        check_writable(json, "--json", target, target.rpartition(":")[0])
    _check_torch()
    with Progress(progress(), processes(asked)) as shown:
        footprint = measure(asked, shown)
    console = output(to_stderr=bool(json and is_stdout(json)))
    _show(console, footprint)
    if json:
        write_json(json, memory_document(asked, footprint))
    return _FAILED if footprint.error else 0


def _check_torch() -> None:
    if find_spec("torch") is None:
        raise MissingExtraError(
            "memory needs PyTorch, got an environment without it. "
            "Install it: python -m pip install 'halfstep[torch]'."
        )


def _show(console: Console, footprint: Footprint) -> None:
    if footprint.layouts:
        _show_tables(console, footprint)
    if footprint.error:
        console.print(Text(f"halfstep: {footprint.target} was not measured:", style="bold red"))
        for line in footprint.error.splitlines()[-_SHOWN_LINES:]:
            console.print(Text.from_ansi(f"  {line}"), soft_wrap=True)


def _show_tables(console: Console, footprint: Footprint) -> None:
    console.print()
    console.print(Text(_head(footprint)))
    tables: dict[str, Callable[..., Sequence[Row]]] = {
        "bytes per parameter": layout_rows,
        "activations": activation_rows,
    }
    for corner, rows_of in tables.items():
        rows = rows_of(footprint, ascii_only=console.options.ascii_only)
        if rows:
            console.print()
            console.print(FittingTable(corner, rows))
    console.print()
    for note in footprint_notes(footprint):
        console.print(Text(note))
    versions = ", ".join(f"{name} {version}" for name, version in footprint.versions)
    console.print(Text(f"{footprint.device}; {versions}", style="dim"))


def _head(footprint: Footprint) -> str:
    million = number(footprint.parameters / 1e6, 3)
    batch = f", {footprint.batch} samples" if footprint.batch else ""
    steps = f"{footprint.steps} step{'s' if footprint.steps > 1 else ''}"
    return (
        f"{footprint.target}: {million} M parameters, {', '.join(footprint.optimizers)}{batch}; "
        f"predicted / measured after {steps}"
    )
