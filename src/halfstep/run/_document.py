"""A comparison as a JSON file."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfstep import __version__
from halfstep.core import Policy
from halfstep.errors import UsageError
from halfstep.run._compare import Comparison
from halfstep.run._runs import RunResult
from halfstep.run._summary import Summary, summarise
from halfstep.run._verdict import verdict

_FORMAT = "halfstep-compare-1"


def document(comparison: Comparison, runs: Sequence[RunResult]) -> dict[str, Any]:
    """Returns everything that is known about a comparison, as JSON types."""
    summaries = summarise(runs)
    return {
        "format": _FORMAT,
        "halfstep": __version__,
        "script": comparison.script,
        "args": list(comparison.args),
        "policies": [_policy(summaries[0], each) for each in summaries],
        "runs": [run.to_dict() for run in runs],
    }


def _policy(first: Summary, each: Summary) -> dict[str, Any]:
    return {
        "name": each.policy,
        "policy": str(Policy.parse(each.policy)),
        "steps_per_second": each.steps_per_second,
        "peak_memory": each.peak_memory,
        "saved_bytes": each.saved_bytes,
        "steps": each.steps,
        "skipped": each.skipped,
        "verdict": "" if each is first else verdict(first, each),
    }


def check_writable(path: Path) -> None:
    """Refuses a file that could not be written at the end of a long job."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            f"--json needs a file in a folder that exists and can be written to, got {str(path)!r}."
            " Create the folder first, or name another file."
        )


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes a file that is either all there or as it was before."""
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    try:
        _replace(path, text)
    except OSError as error:
        raise UsageError(
            f"--json needs a file that can be written, got {str(path)!r}: {error}. "
            "Make room, or name a file on another disk."
        ) from error


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.absolute().parent, suffix=".json")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
