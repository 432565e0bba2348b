"""A comparison, or one run, as a JSON file."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halfstep import __version__
from halfstep.core import Policy
from halfstep.errors import UsageError
from halfstep.run._compare import Comparison
from halfstep.run._footprint import Footprint
from halfstep.run._runs import RunResult
from halfstep.run._script import Script
from halfstep.run._summary import Summary, summarise
from halfstep.run._target import Target
from halfstep.run._verdict import verdict

_FORMAT = "halfstep-compare-1"
_MEMORY_FORMAT = "halfstep-memory-1"
_RUN_FORMAT = "halfstep-run-1"
_STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_SYSTEM_FOLDERS = ("/dev/fd/", "/dev/stderr", "/proc/")


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
        "policy": str(Policy.parse(each.policy)),
        "steps_per_second": each.steps_per_second,
        "peak_memory": each.peak_memory,
        "saved_bytes": each.saved_bytes,
        "steps": each.steps,
        "optimizer_steps": each.optimizer_steps,
        "skipped": each.skipped,
        "verdict": "" if each is first else verdict(first, each),
    }


def check_writable(path: str) -> None:
    """Refuses a file that could not be written at the end of a long job."""
    target = Path(os.path.realpath(path))
    place = Path(path) if _is_special(path) else target.parent
    if not is_stdout(path) and (target.is_dir() or not os.access(place, os.W_OK)):
        raise UsageError(
            f"--json needs a file in a folder that exists and can be written to, got {path!r}."
            " Create the folder first, or name another file."
        )


def is_stdout(path: str) -> bool:
    """Returns whether a path stands for this process's standard output."""
    return path in _STDOUT


def write_json(path: str, data: Mapping[str, Any]) -> None:
    """Writes a file that is either all there or as it was before.

    Args:
        path: The file. A link stays one: what it points to is written. A pipe or a device is
            written to, never replaced; `-` is standard output.
        data: JSON types.
    """
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    try:
        _write(path, text)
    except OSError as error:
        raise UsageError(
            f"--json needs a file that can be written, got {path!r}: {error}. "
            "Make room, or name a file on another disk."
        ) from error


def _write(path: str, text: str) -> None:
    if is_stdout(path):
        sys.stdout.write(text)
        sys.stdout.flush()
    elif _is_special(path):
        # At the end, in case that it is another name of an open file, such as /dev/stderr.
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    else:
        _replace(Path(os.path.realpath(path)), text)


def _is_special(path: str) -> bool:
    """Returns whether a path leads to something that must stay what it is."""
    stays = Path(path).exists() and not Path(path).is_file()
    return stays or os.path.abspath(path).startswith(_SYSTEM_FOLDERS)


def _replace(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".json")
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
