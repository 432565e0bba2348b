"""A comparison, or one run, as a JSON file."""

from collections.abc import Sequence
from typing import Any

from halfstep import __version__
from halfstep.launch import RunResult, Script
from halfstep.run._compare import Comparison
from halfstep.run._footprint import Footprint
from halfstep.run._summary import Summary, summarise
from halfstep.run._target import Target
from halfstep.run._verdict import verdict

_FORMAT = "halfstep-compare-1"
_MEMORY_FORMAT = "halfstep-memory-1"
_RUN_FORMAT = "halfstep-run-1"


def document(comparison: Comparison, runs: Sequence[RunResult]) -> dict[str, Any]:
    """Returns everything that is known about a comparison, as JSON types."""
    summaries = summarise(runs)
    return {
        "format": _FORMAT,
        "halfstep": __version__,
        "script": comparison.script,
        "module": comparison.module,
        "args": list(comparison.args),
        "policies": [_policy(summaries[0], each) for each in summaries],
        "runs": [run.to_dict() for run in runs],
    }


def run_document(script: Script, run: RunResult) -> dict[str, Any]:
    """Returns everything that is known about one run, as JSON types."""
    return {
        "format": _RUN_FORMAT,
        "halfstep": __version__,
        "script": script.name,
        "module": script.module,
        "args": list(script.args),
        "run": run.to_dict(),
    }


def memory_document(target: Target, footprint: Footprint) -> dict[str, Any]:
    """Returns everything that is known about the memory of a training, as JSON types."""
    return {
        "format": _MEMORY_FORMAT,
        "halfstep": __version__,
        "module": target.module,
        "args": list(target.args),
        **footprint.to_dict(),
    }


def _policy(first: Summary, each: Summary) -> dict[str, Any]:
    return {
        "name": each.policy,
        "policy": "; ".join(dict.fromkeys(str(p) for run in each.runs for p in run.asked)),
        "steps_per_second": each.steps_per_second,
        "peak_memory": each.peak_memory,
        "saved_bytes": each.saved_bytes,
        "steps": each.steps,
        "optimizer_steps": each.optimizer_steps,
        "skipped": each.skipped,
        "verdict": "" if each is first else verdict(first, each),
    }
