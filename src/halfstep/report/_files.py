"""Results as files."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.errors import UsageError

_STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
_SYSTEM_FOLDERS = ("/dev/fd/", "/dev/stderr", "/proc/")


def check_writable(path: str, option: str = "--json", *kept: str | None) -> None:
    """Refuses a file that could not be written at the end of a long job, or must not be.

    Args:
        path: The file.
        option: Where the user named it.
        kept: Other files of the same command, such as the script.
    """
    for each in filter(None, kept):
        _check_apart(path, option, each)
    why = "" if is_stdout(path) else _why_not(path)
    if why:
        raise UsageError(
            f"{option} needs a file in a folder that exists and can be written to, got {path!r}: "
            f"{why}"
        )


def _check_apart(path: str, option: str, other: str) -> None:
    if is_stdout(path) and is_stdout(other):
        raise UsageError(
            f"{option} needs an output of its own, got {path!r}, where something else is written. "
            "Name a file."
        )
    same = os.path.realpath(other) == os.path.realpath(path)
    if same and not (is_stdout(path) or _is_special(path)):
        raise UsageError(
            f"{option} needs a file of its own, got {path!r}, which would replace {other!r}."
            " Name another file."
        )


def _why_not(path: str) -> str:
    """Returns why a file cannot be written, "" where it can."""
    target = Path(os.path.realpath(path))
    place = Path(path) if _is_special(path) else target.parent
    reasons = (
        (target.is_dir(), "this is a folder. Name a file in it."),
        (
            path.startswith(_SYSTEM_FOLDERS) and not Path(path).exists(),
            "the system has no such file. Name another one.",
        ),
        (
            not place.exists(),
            f"there is no folder {place}. Create it first, or name another file.",
        ),
        (
            not os.access(place, os.W_OK),
            f"{place} cannot be written to. Name a file in another folder.",
        ),
        (
            target.exists() and not os.access(target, os.W_OK),
            "it is there and must not be changed. Name another file.",
        ),
    )
    return next((text for holds, text in reasons if holds), "")


def is_stdout(path: str) -> bool:
    """Returns whether a path stands for this process's standard output."""
    return path in _STDOUT


def write_json(path: str, data: Mapping[str, Any]) -> None:
    """Writes JSON types into a file, as `write_text` does."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n", "--json")


def write_text(path: str, text: str, option: str) -> None:
    """Writes a file that is either all there or as it was before.

    Args:
        path: The file. A link stays one: what it points to is written. A pipe or a device is
            written to, never replaced; `-` is standard output.
        text: What it holds.
        option: Where the user named it.
    """
    try:
        _write(path, text)
    except OSError as error:
        raise UsageError(
            f"{option} needs a file that can be written, got {path!r}: {error}. "
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
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
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
