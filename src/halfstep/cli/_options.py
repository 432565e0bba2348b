"""The options that several commands have, each defined once."""

from typing import Annotated, TypeAlias

import typer

ScriptName: TypeAlias = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="A Python training script, or with -m a module.")
]
ScriptArgs: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS", help="The script's own arguments, after --."),
]
IsModule: TypeAlias = Annotated[
    bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")
]
JsonFile: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Write all that was found to a file, as JSON; - is standard output, and what else is "
        "shown then goes to standard error.",
    ),
]
Verbose: TypeAlias = Annotated[bool, typer.Option("--verbose", help="Show what the script prints.")]
