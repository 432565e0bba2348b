"""What is wrong with a file that could not be loaded, and what to do about it."""

import errno
import os
from collections.abc import Callable
from pickle import UnpicklingError
from zipfile import BadZipFile, ZipFile

_EMPTY = "which is empty. Load an earlier one."
_CUT = "which is cut off. Load an earlier one."
_DAMAGED = "which is damaged. Load an earlier one."
_DIRECTORY = "which is a directory. Name a file in it."
_PROGRAM = "which is a TorchScript program. Load it with torch.jit.load()."
_OTHER = "which is not one. Pass a file that torch.save or halfstep.torch.save has written."
_UNSAFE = (
    "which holds more than data. Save it anew with halfstep.torch.save, or, if you trust whoever "
    "made it, load it with torch.load(..., weights_only=False)."
)


def fault_of(name: str, error: Exception) -> str | None:
    """Returns what is wrong with a file, None if something else is.

    Args:
        name: The file.
        error: What `torch.load` has raised.

    Example:
        >>> fault_of(".", IsADirectoryError())
        'which is a directory. Name a file in it.'
    """
    if os.path.isdir(name):
        return _DIRECTORY
    # Where an archive is cut off, it is read at places that do not exist.
    if isinstance(error, OSError) and error.errno != errno.EINVAL:
        return None
    with open(name, "rb") as file:
        head = file.read(64)
    if not head.strip(b"\0"):
        return _EMPTY
    for start, fault in _FAULTS.items():
        if head.startswith(start):
            return fault(name, error)
    return None if name.endswith(".safetensors") else _OTHER


def _of_archive(name: str, error: Exception) -> str | None:
    try:
        with ZipFile(name) as archive:
            return _of_records(archive, error)
    except BadZipFile:
        return _CUT


def _of_records(archive: ZipFile, error: Exception) -> str | None:
    # The directory is at the end, and Python finds it if only the last bytes are missing.
    if isinstance(error, OSError) or "central directory" in str(error):
        return _CUT
    records = {each.partition("/")[2]: each for each in archive.namelist()}
    if "constants.pkl" in records:
        return _PROGRAM
    if "data.pkl" not in records:
        return _OTHER
    sound = _is_sound(archive, records["data.pkl"])
    if sound and isinstance(error, UnpicklingError):
        return _UNSAFE
    return None if sound and "PytorchStreamReader" not in str(error) else _DAMAGED


def _is_sound(archive: ZipFile, record: str) -> bool:
    """Returns whether the checksum of a record is right."""
    try:
        archive.read(record)
    except BadZipFile:
        return False
    return True


def _of_stream(_name: str, error: Exception) -> str | None:
    if isinstance(error, EOFError) or "EOF" in str(error):
        return _CUT
    return _UNSAFE if isinstance(error, UnpicklingError) else None


# What `torch.save` writes begins with the first, and what it wrote before 1.6 with the second.
_FAULTS: dict[bytes, Callable[[str, Exception], str | None]] = {
    b"PK\x03\x04": _of_archive,
    b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19": _of_stream,
}
