import io

import pytest
from rich.console import Console

from halfstep.report._columns import Column, ColumnTable

NUMBERS = ("65504", "1.234e+38")
NAME = "encoder.layers.11.attention.projection"
COLUMNS = (
    Column("module", [NAME, "head"]),
    Column("tensor", ["grad_output", "weight"], rank=1),
    Column("largest", NUMBERS, is_number=True, rank=3),
    Column("lost", ["99.9 %", "< 0.01 %"], is_number=True, rank=2),
)


def printed(width, columns=COLUMNS):
    file = io.StringIO()
    Console(file=file, width=width).print(ColumnTable(columns))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def left_out(lines):
    text = " ".join(lines)
    return text.partition("no room for: ")[2].split(", ") if "no room for" in text else []


@pytest.mark.parametrize("width", range(16, 90))
def test_a_number_is_whole_or_its_column_is_named_as_left_out(width):
    lines = printed(width)
    assert max(map(len, lines)) <= width
    for column in COLUMNS[2:]:
        is_shown = column.head not in left_out(lines)
        assert all(any(cell in line for line in lines) is is_shown for cell in column.cells)


def test_names_are_broken_and_stay_complete():
    lines = printed(56)
    assert left_out(lines) == []
    assert NAME in "".join(line.split(" ")[0] for line in lines[2:])


def test_columns_are_left_out_one_by_one_the_highest_rank_first():
    found = [tuple(left_out(printed(width))) for width in range(90, 15, -1)]
    assert list(dict.fromkeys(found)) == [
        (),
        ("largest",),
        ("largest", "lost"),
        ("tensor", "largest", "lost"),
    ]


def test_a_name_may_look_like_markup():
    assert printed(40, [Column("module", ["[red]x[/red]"])])[-1] == "[red]x[/red]"
