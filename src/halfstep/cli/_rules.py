"""`halfstep rules`."""

import json as json_format
from dataclasses import asdict
from itertools import groupby
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from halfstep.cli._consoles import output
from halfstep.core import Rule, Rules

_DEFAULT = Rules().base
_OTHER_COLUMNS = 30  # what the action, a few words of the reason and the gaps need


def rules(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The rule set.", show_default=True)
    ] = _DEFAULT,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a rule set: what runs in which precision, and why."""
    chosen = Rules.parse(name)
    if json:
        rows = [asdict(rule) for rule in chosen.rows]
        typer.echo(json_format.dumps({"name": str(chosen), "rules": rows}, indent=1))
        return
    console = output()
    console.print(_table(chosen, console.width))
    others = ", ".join(each for each in Rules.names() if each != name)
    console.print(
        Text(f"{name}: {len(chosen.rows)} rules. Other rule sets: {others}.", style="dim")
    )


def _table(rules: Rules, width: int) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    table.add_column("operations", overflow="fold", width=_width_of_names(rules, width))
    for head in ("action", "why"):
        table.add_column(head, overflow="fold")
    # Neighbours with the same action and reason were one row of the rule set's file.
    for (action, limits, reason), group in groupby(rules.rows, key=_what):
        targets = ", ".join(rule.target for rule in group)
        table.add_row(Text(targets + limits), Text(action), Text(reason))
    return table


def _width_of_names(rules: Rules, width: int) -> int | None:
    """Returns a width that breaks no name in two, None where there is no room for it.

    A name that is broken at the end of a line could not be searched for.
    """
    longest = max((len(f"{rule.target},") for rule in rules.rows), default=0)
    return max(longest, width // 2) if longest + _OTHER_COLUMNS <= width else None


def _what(rule: Rule) -> tuple[str, str, str]:
    limits = {"in": rule.where, "on": rule.device, "computing in": rule.dtype}
    text = "".join(f" {word} {value}" for word, value in limits.items() if value)
    return rule.action, text, rule.reason
