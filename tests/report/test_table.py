import io

import pytest
from rich.console import Console

from halfstep.report import FittingTable, Row

ROWS = [
    Row("first", {"loss": "1.5", "speed": "10 per second"}),
    Row("second", {"loss": "2.5", "speed": "20 per second"}),
    Row("third", {"loss": "3.5"}),
]


def printed(rows, width, encoding="utf-8"):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=width).print(FittingTable("name", rows))
    file.flush()
    text = raw.getvalue().decode(encoding)
    assert max(map(len, text.splitlines())) <= width
    return [line.rstrip() for line in text.splitlines()]


def test_wide_enough_for_a_line_per_row():
    assert printed(ROWS, 40) == [
        "name     loss   speed",
        "─" * 29,
        "first    1.5    10 per second",
        "second   2.5    20 per second",
        "third    3.5    \N{EN DASH}",
    ]


def test_many_columns_are_turned():
    rows = [
        Row(row.name, {f"{key} {i}": "1" for i in range(4) for key in row.cells}) for row in ROWS
    ]
    assert printed(rows, 40)[:3] == [
        "name      first   second   third",
        "────────────────────────────────",
        "loss 0    1       1        1",
    ]


def test_a_long_name_is_folded_rather_than_costing_a_column():
    rows = [Row(name, {"loss per byte of held-out text": "1"}) for name in ("first", "x" * 30)]
    assert printed(rows, 60) == [
        f"{'':24} {'loss per byte of':22}".rstrip(),
        "name                     held-out text",
        "─" * 47,
        "first                    1",
        "x" * 22 + "   1",
        "x" * 8,
    ]


def test_too_many_of_both_are_shown_in_pairs():
    lines = printed(ROWS, 24)
    heads = [line.split() for line in lines if line.startswith("name")]
    assert heads == [["name", "first", "second"], ["name", "first", "third"]]


def test_a_single_row_in_a_very_narrow_terminal():
    assert "first" in "".join(printed(ROWS[:1], 16))


def test_without_unicode():
    assert "".join(printed(ROWS, 40, encoding="ascii")).isascii()


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/nothing]"])
def test_names_are_not_markup(name):
    assert name in "".join(printed([Row(name, {"loss": "1"})], 40))
