"""What is read from the numbers of operations, and in which order it is told."""

import pytest

from halfstep import Exponents
from halfstep.core import Observation, Observed
from halfstep.errors import UsageError


def row(module, *numbers, reference=None, form="float16", **place):
    place = {"operation": "exp", "phase": "forward", "role": "output"} | place
    full = None if reference is None else Exponents.of(reference)
    return Observed(module, form=form, run=Exponents.of(numbers), reference=full, **place)


@pytest.mark.parametrize(
    ("form", "subnormals", "saturated"),
    [("float16", 2, 1), ("bfloat16", 0, 0), ("float32", 0, 0), ("float8_e5m2", 2, 1)],
)
def test_counts_go_by_the_format(form, subnormals, saturated):
    found = row("a", 2.0**-24, 2.0**-15, 2.0**-14, 0.0, 4e4, form=form)
    assert (found.subnormals, found.saturated, found.zeros) == (subnormals, saturated, 1)


def test_zeros_that_float32_has_are_not_lost():
    found = row("a", 0.0, 0.0, 0.0, 1.0, reference=[0.0, 1e-9, 1e-8, 1.0])
    assert (found.flushed, found.lost) == (2, 2 / 3)
    fewer = row("a", 1e-7, 1.0, reference=[0.0, 1.0])
    assert (fewer.flushed, fewer.lost) == (0, 0.0)
    assert row("a", 0.0, reference=[0.0]).lost == 0.0


def test_the_worst_comes_first():
    rows = (
        row("fine", 1.0, reference=[1.0]),
        row("small", 1e-7, reference=[1e-7]),
        row("large", 6e4, reference=[6e4]),
        row("some", 0.0, 1.0, reference=[1e-9, 1.0]),
        row("most", 0.0, reference=[1e-9]),
        row("nan", 1.0, float("nan")),
        row("inf", float("inf")),
    )
    lines = str(Observation(rows)).splitlines()[1:]
    assert [line.split()[0] for line in lines] == [each.module for each in reversed(rows)]


def test_lines_that_say_the_same_are_one_and_no_more_than_forty_are_shown():
    rows = [row(f"layer{place}", 1.0) for place in range(50) for _ in range(3)]
    lines = str(Observation(tuple(rows))).splitlines()
    assert len(lines) == 42
    assert lines[-1] == "and 10 more lines"


def test_a_selection():
    seen = Observation((row("a", 1.0), row("b", 1.0, phase="backward", name="aten::exp")))
    assert [each.module for each in seen.of()] == ["a", "b"]
    assert seen.of(operation="aten::exp") == seen.of(phase="backward") == seen.of(module="b")
    assert len(seen.of(module="a", role="input")) == 0


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"phase": "forwards"}, "a phase among forward, backward, got 'forwards'. Did you mean"),
        ({"module": "aa"}, "a module among a, b, got 'aa'. Did you mean 'a'?"),
        ({"module": 3}, "a module among a, b, got 3. Write one of these, or leave it out."),
        ({"operation": "matmul"}, "an operation among exp, aten::exp, got 'matmul'."),
        ({"role": "outputs"}, "a role among input, weight, output, buffer, target, grad_output"),
    ],
)
def test_what_is_in_no_step_is_refused_with_what_is(asked, text):
    seen = Observation((row("a", 1.0, name="aten::exp"), row("b", 1.0, phase="backward")))
    with pytest.raises(UsageError) as caught:
        seen.of(**asked)
    assert text in str(caught.value)


def test_what_is_in_the_step_may_be_missing_in_a_selection():
    seen = Observation((row("a", 1.0), row("b", 1.0, phase="backward")))
    assert len(seen.of(phase="backward").of(module="a")) == 0
    with pytest.raises(UsageError, match="a module among a, b, got 'c'"):
        seen.of(module="a").of(module="c")


def test_a_long_list_of_modules_is_cut():
    seen = Observation(tuple(row(f"layers.{place}", 1.0) for place in range(5000)))
    with pytest.raises(UsageError, match="and 4988 more, got 'layers'") as caught:
        seen.of(module="layers")
    assert len(str(caught.value)) < 400
