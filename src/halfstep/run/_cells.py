"""What the table says about a policy."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from halfstep.report import Row, bytes_text, finite_limits, number, ratio_text, sparkline
from halfstep.run._summary import Summary, mean, spread

_CURVE_WIDTH = 12
_OWN_ROWS = {
    "policy",
    "first loss",
    "last loss",
    "loss curve",
    "steps/s",
    "peak memory",
    "saved for backward",
    "skipped",
    "last scale",
}


def table_rows(summaries: Sequence[Summary], *, ascii_only: bool = False) -> list[Row]:
    """Returns a row per policy, each compared with the first one.

    Args:
        summaries: The policies.
        ascii_only: Whether to keep to characters that every terminal has.
    """
    first = summaries[0]
    names = dict.fromkeys(name for each in summaries for name in each.metric_names)
    labels = _labels(list(names))
    return [Row(each.policy, dict(_cells(first, each, labels, ascii_only))) for each in summaries]


def _labels(metrics: Sequence[str]) -> dict[str, str]:
    """Returns each metric's row: its name, unless another row is called so."""
    taken, labels = {*_OWN_ROWS, *metrics}, dict[str, str]()
    for name in metrics:
        label = name
        while label in _OWN_ROWS or (label != name and label in taken):
            label += " (metric)"
        taken.add(label)
        labels[name] = label
    return labels


def _cells(
    first: Summary, each: Summary, metrics: Mapping[str, str], ascii_only: bool
) -> Iterator[tuple[str, str]]:
    reference = None if each is first else first
    yield "first loss", _known(number, mean(each.first_losses))
    yield "last loss", mean_text(each.last_losses, ascii_only=ascii_only)
    yield "loss curve", _curve(first, each, ascii_only)
    for name, label in metrics.items():
        yield label, mean_text(each.metric(name), ascii_only=ascii_only)
    yield "steps/s", _compared(_speed_text, lambda it: it.steps_per_second, each, reference)
    yield "peak memory", _known(bytes_text, each.peak_memory)
    yield "saved for backward", _compared(bytes_text, lambda it: it.saved_bytes, each, reference)
    yield "skipped", f"{each.skipped} of {each.optimizer_steps}" if each.optimizer_steps else ""
    yield "last scale", _scales(each)


def mean_text(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """Returns the mean, and half the distance between the extremes where there are several.

    Args:
        values: One value per seed.
        ascii_only: Whether to keep to characters that every terminal has.

    Example:
        >>> mean_text([0.97, 0.98]), mean_text([0.97]), mean_text([])
        ('0.975 ± 0.005', '0.97', '')
    """
    middle = mean(values)
    if middle is None:
        return ""
    if len(values) == 1:
        return number(middle)
    sign = "+-" if ascii_only else "±"
    return f"{number(middle)} {sign} {number(spread(values) / 2, 2)}"


def _curve(first: Summary, each: Summary, ascii_only: bool) -> str:
    if not each.trained:
        return ""
    reference = (first.trained or each.trained)[0].losses
    losses = each.trained[0].losses
    return sparkline(
        losses, width=_CURVE_WIDTH, limits=finite_limits(reference), ascii_only=ascii_only
    )


def _compared(
    text: Callable[[float], str],
    get: Callable[[Summary], float | None],
    each: Summary,
    reference: Summary | None,
) -> str:
    value = get(each)
    ratio = ratio_text(value, get(reference)) if reference else ""
    return _known(text, value) + (f" ({ratio})" if ratio else "")


def _known(text: Callable[[float], str], value: float | None) -> str:
    return "" if value is None else text(value)


def _speed_text(value: float) -> str:
    return number(value, digits=3)


def _scales(each: Summary) -> str:
    scales = each.each(lambda run: run.scale)
    low, high = min(scales, default=0.0), max(scales, default=0.0)
    if not scales:
        return ""
    return number(low) if low == high else f"{number(low)} to {number(high)}"
