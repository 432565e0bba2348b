"""`halfstep compare`."""

import contextlib
import re
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from halfstep.cli._consoles import output, progress
from halfstep.cli._interruptions import INTERRUPTED, terminated_like_interrupted
from halfstep.cli._options import IsModule, JsonFile, ScriptArgs, ScriptName, Verbose
from halfstep.core import Policy
from halfstep.launch import LIKELY_REASONS, RunResult, why_untrained
from halfstep.report import FittingTable, Progress, check_writable, is_stdout, write_json
from halfstep.run import (
    DEFAULT_POLICIES,
    Comparison,
    Summary,
    document,
    run_all,
    summarise,
    table_rows,
    verdict,
)

_SHOWN_LINES = 8
_FAILED = 1
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")  # differs from process to process
_FLOAT32 = Policy.named("float32")


def compare(
    script: ScriptName,
    args: ScriptArgs = None,
    module: IsModule = False,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="P",
            help="A policy to run under, repeated for each; the first is what the others are "
            f"compared with. Default: {', '.join(DEFAULT_POLICIES)}.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(metavar="N", help="Runs per policy, to know what chance does.")
    ] = 1,
    seed: Annotated[int, typer.Option(metavar="S", help="The first seed.")] = 0,
    json: JsonFile = None,
    verbose: Verbose = False,
) -> int:
    """Run a training script once per policy and show the results side by side.

    Any script for PyTorch or Keras will do. The policy comes from this command, whatever the script
    passes to halfstep.torch.autocast and halfstep.torch.GradScaler, if it uses them.
    """
    comparison = Comparison.of(
        script, args or (), policy or (), seeds=seeds, seed=seed, module=module
    )
    if json:
        check_writable(json, "--json", script)
    runs = _run(comparison, verbose)
    console = output(to_stderr=bool(json and is_stdout(json)))
    code = _show(console, script, runs)
    if json and runs:
        write_json(json, document(comparison, runs))
    return code if len(runs) == len(comparison.plan) else INTERRUPTED


def _run(comparison: Comparison, verbose: bool) -> list[RunResult]:
    """Returns the runs that were made: all, unless the user stopped them."""
    names = [f"{policy}, seed {seed}" for policy, seed in comparison.plan]
    runs: list[RunResult] = []
    shown = Progress(progress(), names)
    with contextlib.suppress(KeyboardInterrupt), terminated_like_interrupted(), shown:
        for run in run_all(comparison, _Lines(shown, verbose)):
            runs.append(run)  # one by one: an interruption keeps those that are done
    return runs


class _Lines:
    """Shows runs as lines of progress."""

    def __init__(self, progress: Progress, verbose: bool) -> None:
        self._progress, self._verbose = progress, verbose
        self.start, self.update = progress.start, progress.update

    def output(self, line: str) -> None:
        if self._verbose:
            self._progress.print(line)

    def finish(self, index: int, run: RunResult) -> None:
        loss = "" if run.last_loss is None else f", loss {run.last_loss:.4g}"
        text = run.error.splitlines()[-1] if run.failed else f"{run.steps} steps{loss}"
        self._progress.finish(index, text, failed=run.failed)


def _show(console: Console, script: str, runs: Sequence[RunResult]) -> int:
    """Prints the report and returns the exit code."""
    summaries = summarise(runs)
    failed = [run for run in runs if run.failed]
    trained = any(each.trained for each in summaries)
    if trained:
        _show_table(console, summaries)
    for alike in _failed_alike(failed):
        _show_failure(console, alike, of=len(runs))
    if not trained and len(failed) < len(runs):
        console.print(Text(_nothing_trained(script, runs)))
    return 0 if all(run.steps and not run.failed for run in runs) else _FAILED


def _show_table(console: Console, summaries: Sequence[Summary]) -> None:
    rows = table_rows(summaries, ascii_only=console.options.ascii_only)
    console.print()
    console.print(FittingTable("policy", rows))
    console.print()
    first, *others = summaries
    for other in others:
        console.print(Text.assemble((other.policy, "bold"), ": ", verdict(first, other)))
    if any(each.ineffective and not each.trained[0].regions for each in summaries):
        console.print(Text(LIKELY_REASONS))
    console.print(Text(_notes(summaries), style="dim"))


def _notes(summaries: Sequence[Summary]) -> str:
    run = next(run for each in summaries for run in each.trained)
    versions = ", ".join(f"{name} {version}" for name, version in run.versions)
    count = max(len(each.trained) for each in summaries)
    seeds = f"mean ± half the range over {count} seeds; " if count > 1 else ""
    return (
        f"{seeds}{_scalers(summaries)}{_torch_amp(summaries)}last loss: mean of the last tenth; "
        f"peak memory: {run.peak_memory_kind}; {run.device}; {versions}"
    )


def _scalers(summaries: Sequence[Summary]) -> str:
    count = max(each.scalers for each in summaries)
    if count < 2:
        return ""
    return (
        f"{count} optimizers or GradScalers: steps/s, saved for backward and last scale are those "
        "of the one that steps first, skipped is that of all; "
    )


def _torch_amp(summaries: Sequence[Summary]) -> str:
    full = [each for each in summaries if each.runs[0].asked == (_FLOAT32,)]
    if not any(run.torch_amp for each in full for run in each.trained):
        return ""
    return (
        f"the script has a torch.amp.GradScaler: {full[0].policy} is the script as it is, with its "
        "own torch.autocast; "
    )


def _failed_alike(failed: Sequence[RunResult]) -> Iterable[Sequence[RunResult]]:
    """Returns the runs in groups that failed in the same way: one traceback does for each."""
    groups: dict[tuple[int, str], list[RunResult]] = {}
    for run in failed:
        same = run.exit_code, _ADDRESS.sub("", run.error)
        groups.setdefault(same, []).append(run)
    return groups.values()


def _show_failure(console: Console, alike: Sequence[RunResult], *, of: int) -> None:
    run, *others = alike
    names = ", ".join(each.name for each in alike)
    who = f"all {of} runs" if others and len(alike) == of else names
    how = f"{run.ending}, the same in each" if others else run.ending
    console.print()
    console.print(Text(f"{who} failed ({how}):", style="bold red"))
    for line in run.error.splitlines()[-_SHOWN_LINES:]:
        console.print(Text.from_ansi(f"  {line}"), soft_wrap=True)


def _nothing_trained(script: str, runs: Sequence[RunResult]) -> str:
    run = next(run for run in runs if not run.failed)
    return f"halfstep: nothing was trained in {script}: {why_untrained(run)}."
