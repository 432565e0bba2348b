"""What the tables say about the memory of a training."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from halfstep.report import ASCII_UNKNOWN, UNKNOWN, Row, bytes_text, number
from halfstep.run._footprint import Activations, Footprint, Kept, total
from halfstep.run._layouts import PARTS

_DECIMALS = 2
_MIB = 2**20


def layout_rows(footprint: Footprint, *, ascii_only: bool = False) -> list[Row]:
    """Returns a row per layout: bytes per parameter, predicted and measured.

    Args:
        footprint: What is known.
        ascii_only: Whether to keep to characters that every terminal has.
    """
    unknown = ASCII_UNKNOWN if ascii_only else UNKNOWN
    count = footprint.parameters
    return [Row(each.name, dict(_cells(each, count, unknown))) for each in footprint.layouts]


def activation_rows(footprint: Footprint, *, ascii_only: bool = False) -> list[Row]:
    """Returns a row per policy: what one pass keeps for backward.

    Args:
        footprint: What is known.
        ascii_only: Whether to keep to characters that every terminal has.
    """
    unknown = ASCII_UNKNOWN if ascii_only else UNKNOWN
    full = next((each.per_sample for each in footprint.activations), None)
    return [
        Row(each.policy, dict(_activation_cells(each, full, unknown)))
        for each in footprint.activations
    ]


def footprint_notes(footprint: Footprint) -> Iterator[str]:
    """Yields what the tables leave out: reasons, and what lies besides."""
    of_layouts = [(each.name, each.unmeasured) for each in footprint.layouts]
    yield from _reasons("not measured", of_layouts)
    yield from _reasons("not predicted", _unpredicted(footprint))
    yield from _reasons(
        "activations not measured", [(each.policy, each.reason) for each in footprint.activations]
    )
    yield from _besides(footprint)


def _cells(kept: Kept, count: int, unknown: str) -> Iterator[tuple[str, str]]:
    """Yields the cells of a layout; what was measured is divided by what was trained there."""
    of_predicted = _divided(kept.predicted, count)
    of_measured = _divided(kept.measured, kept.measured["parameters"] if kept.measured else 0)
    for part in (*PARTS, "total"):
        yield part, _pair(of_predicted, of_measured, part, unknown)
    whole = (kept.predicted, kept.measured)
    yield "MiB", " / ".join(number(total(it) / _MIB, 3) if it else unknown for it in whole)


def _divided(parts: Mapping[str, Any] | None, count: int) -> dict[str, float]:
    if not parts or not count:
        return {}
    return {"total": total(parts) / count} | {part: parts[part] / count for part in PARTS}


def _pair(
    predicted: Mapping[str, float], measured: Mapping[str, float], part: str, unknown: str
) -> str:
    texts = (_known(values.get(part), unknown) for values in (predicted, measured))
    return " / ".join(texts)


def _known(value: float | None, unknown: str) -> str:
    return unknown if value is None else number(round(value, _DECIMALS))


def _activation_cells(
    each: Activations, full: float | None, unknown: str
) -> Iterator[tuple[str, str]]:
    """Yields the cells of a policy; nothing is predicted, since the rules decide what is kept."""
    per_sample = each.per_sample
    cells = {
        "kept for backward": None if each.bytes is None else bytes_text(each.bytes),
        "whatever the batch": None if each.fixed is None else bytes_text(each.fixed),
        "per sample": None if per_sample is None else bytes_text(per_sample),
        "per activation": f"{_known(4 * per_sample / full, unknown)} B"
        if per_sample and full
        else None,
    }
    for label, text in cells.items():
        if text is not None:
            yield label, f"{unknown} / {text}"


def _unpredicted(footprint: Footprint) -> list[tuple[str, str]]:
    every = [(each.name, each.unpredicted) for each in footprint.layouts]
    # What cannot be at all was said already.
    both = zip(every, footprint.layouts, strict=True)
    return [pair for pair, each in both if pair[1] != each.unmeasured]


def _reasons(label: str, pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yields a line per reason, with all that it holds for."""
    with_reason = sorted(((why, name) for name, why in pairs if why), key=lambda pair: pair[0])
    for why, group in groupby(with_reason, key=lambda pair: pair[0]):
        yield f"{', '.join(name for _, name in group)}: {label}: {why.removesuffix('.')}."


def _besides(footprint: Footprint) -> Iterator[str]:
    peaks = [
        f"{each.name} {number(round(each.measured['gradient_peak'] / footprint.parameters, 2))}"
        for each in footprint.layouts
        if each.measured and each.measured["gradient_peak"] is not None
    ]
    if peaks:
        yield f"gradients alive at once in the backward pass: {', '.join(peaks)} B per parameter"
    others = [each.measured["others"] for each in footprint.layouts if each.measured]
    if any(others):
        most = bytes_text(max(others))
        yield f"besides: {most} of buffers and of parameters that are not trained"
