"""What `halfstep run` says when the script has ended."""

from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from halfstep.launch import (
    LIKELY_REASONS,
    NO_REGION,
    UNSCALED,
    RunResult,
    asked_text,
    policy_text,
    why_ineffective,
    why_untrained,
)
from halfstep.report import bytes_text, number, sparkline

_CURVE_WIDTH = 24
_SHOWN_REASONS = 3


def show_ending(console: Console, script: str, run: RunResult, *, chosen: bool) -> None:
    """Prints one screen about a run.

    Args:
        console: Where to.
        script: What was run, as the user wrote it.
        run: How it went.
        chosen: Whether halfstep chose the policy.
    """
    if not run.steps:
        if not run.error:  # which says all there is to say
            why = why_untrained(run)
            console.print(Text(f"halfstep: nothing was trained in {script}: {why}."))
        return
    rows = dict(_rows(run, chosen, console.options.ascii_only))
    width = max(map(len, rows))
    console.print(Text.assemble("halfstep: ", (script, "bold")))
    for label, text in rows.items():
        console.print(Text(f"  {label:<{width}}  {text}"), soft_wrap=True)
    versions = ", ".join(f"{name} {version}" for name, version in run.versions)
    console.print(Text(f"  {run.device}; {versions}", style="dim"), soft_wrap=True)
    if run.ineffective:
        why = f"halfstep: {run.policy} did not take effect, because {why_ineffective(run)}."
        console.print(Text(why, style="bold red"), soft_wrap=True)
        if NO_REGION in why:
            console.print(Text(LIKELY_REASONS), soft_wrap=True)
    if run.unscaled:
        console.print(Text(f"halfstep: {UNSCALED}.", style="bold red"), soft_wrap=True)


def _rows(run: RunResult, chosen: bool, ascii_only: bool) -> Iterator[tuple[str, str]]:
    yield "policy", _policy(run, chosen)
    if run.why:
        yield "why", " ".join(run.why)
    yield "steps", _steps(run)
    if run.optimizer_steps:
        yield "skipped", _skipped(run)
    if run.losses:
        yield "loss", _loss(run, ascii_only)
    if run.steps_per_second is not None:
        yield "steps/s", number(run.steps_per_second, digits=3)
    if run.peak_memory is not None:
        yield "peak memory", f"{bytes_text(run.peak_memory)} ({run.peak_memory_kind})"
    if run.saved_bytes is not None:
        yield "saved for backward", f"{bytes_text(run.saved_bytes)} in one step"
    if run.scale is not None:
        yield "last scale", number(run.scale)


def _policy(run: RunResult, chosen: bool) -> str:
    text = policy_text(run)
    if text == asked_text(run) and chosen:
        return f"{text} (chosen for this device; --policy sets it)"
    return text


def _steps(run: RunResult) -> str:
    if not run.scalers:
        return f"{run.steps} (backward passes; no optimizer was seen, so nothing could be skipped)"
    if run.scalers < 2:
        return str(run.steps)
    return f"{run.steps} of the first of {run.scalers} optimizers, {run.optimizer_steps} of all"


def _skipped(run: RunResult) -> str:
    counts = Counter(skip.reason for skip in run.skipped).most_common()
    reasons = "; ".join(f"{reason} ({count}x)" for reason, count in counts[:_SHOWN_REASONS])
    more = f"; and {len(counts) - _SHOWN_REASONS} more reasons" if counts[_SHOWN_REASONS:] else ""
    total = f"{len(run.skipped)} of {run.optimizer_steps}"
    return f"{total}: {reasons}{more}" if counts else total


def _loss(run: RunResult, ascii_only: bool) -> str:
    curve = sparkline(run.losses, width=_CURVE_WIDTH, ascii_only=ascii_only)
    first, last = (number(value) for value in (run.losses[0], run.last_loss or 0.0))
    return f"{first} to {last} (mean of the last tenth)  {curve}"
