"""Checkpoints in files: saved whole or not at all, and loaded as data only."""

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable
from typing import IO, Any

import torch

from halfstep.errors import CheckpointError, MissingFileError, UsageError
from halfstep.torch._data import refuse_all_but_data
from halfstep.torch._faults import fault_of

try:
    import fcntl
except ImportError:  # where there are no such locks; what killed processes leave stays there
    fcntl = None  # type: ignore[assignment]

Path = str | os.PathLike[str]
MapLocation = str | torch.device | dict[str, str] | Callable[[Any, str], Any] | None


def save(state: object, path: Path) -> None:
    """Saves a checkpoint so that a crash at any moment leaves the old file or the new one, whole.

    It is written beside the file, in the format of `torch.save`, and takes the file's place when
    all of it is on the disk. The file keeps its permissions, and a link to it stays a link.

    Args:
        state: State dicts, tensors, numbers and texts, in containers as deep as you like.
        path: The file. It may exist, and may be in use by `load(..., mmap=True)`.

    Raises:
        UsageError: A part of the state is not data and could not be loaded again, or the path is
            not that of a file.
        MissingFileError: The directory does not exist.
        OSError: It cannot be written. The old file is still there.

    Example:
        >>> import os, tempfile, torch
        >>> model = torch.nn.Linear(4, 2)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = os.path.join(directory, "last.pt")
        ...     save({"model": model.state_dict(), "step": 100}, path)
        ...     load(path)["step"]
        100
    """
    # A link stays one: what it points to is replaced.
    target = os.path.realpath(_checked(path, "save"))
    refuse_all_but_data(state)
    mode = _mode_of(target)
    _remove_abandoned(target)
    _replace(target, state, mode)
    _sync_directory(os.path.dirname(target))


def load(path: Path, map_location: MapLocation = None, mmap: bool | None = None) -> Any:
    """Loads a checkpoint, which must be nothing but data.

    Args:
        path: The file, by `halfstep.torch.save` or `torch.save`.
        map_location: Which device tensors go to, as for `torch.load`.
        mmap: Whether tensors stay in the file until they are read.

    Raises:
        MissingFileError: There is no such file.
        CheckpointError: The file is cut off, damaged, not a checkpoint, or more than data.

    Example:
        >>> load("missing.pt")
        Traceback (most recent call last):
        ...
        halfstep.errors.MissingFileError: load needs a file that exists, got 'missing.pt'. ...
    """
    name = _checked(path, "load")
    try:
        return torch.load(name, map_location, weights_only=True, mmap=mmap)
    except FileNotFoundError as error:
        raise MissingFileError(
            f"load needs a file that exists, got {name!r}. Check the path, or start anew."
        ) from error
    except Exception as error:
        fault = fault_of(name, error)
        if fault is None:
            raise
        raise CheckpointError(f"load needs a whole checkpoint, got {name!r}, {fault}") from error


def _checked(path: object, caller: str) -> str:
    """Returns a path as text."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise UsageError(
            f"{caller} needs a path, got {type(path).__name__}. Call torch.{caller} for what is "
            "not a path, such as an open file."
        )
    return os.fsdecode(path)


def _mode_of(target: str) -> int | None:
    """Returns the permissions of a file that is going to be replaced, None if there is none."""
    try:
        found = os.stat(target).st_mode
    except FileNotFoundError:
        if os.path.isdir(os.path.dirname(target)):
            return None
        raise MissingFileError(
            f"save needs a directory that exists, got {os.path.dirname(target)!r}. Create it with "
            "os.makedirs()."
        ) from None
    if not stat.S_ISREG(found):
        what = "a directory" if stat.S_ISDIR(found) else "a device or a pipe"
        raise UsageError(
            f"save needs the path of a file, got {target!r}, which is {what}. Name a file."
        )
    # A file that may not be written to is not to be replaced either.
    os.close(os.open(target, os.O_WRONLY))
    return stat.S_IMODE(found)


def _replace(target: str, state: object, mode: int | None) -> None:
    """Puts a state in the place of a file, or leaves everything as it was."""
    temporary, file = _opened_beside(target)
    try:
        with file:
            _write(state, file, mode)
            if os.name == "nt":  # where an open file cannot be renamed
                file.close()
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _opened_beside(target: str) -> tuple[str, IO[bytes]]:
    """Returns a new file in the same directory, with its name, locked for as long as it is open."""
    directory, name = os.path.split(target)
    temporary = os.path.join(directory, f".{name}.tmp-{secrets.token_hex(4)}")
    # With these permissions `open` creates a file.
    file = os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666), "wb")
    # Without locks nobody takes it for abandoned.
    with contextlib.suppress(OSError):
        _lock(file.fileno(), wait=True)
    if os.path.exists(temporary):
        return temporary, file
    # Somebody has removed it before it was locked.
    file.close()
    return _opened_beside(target)


def _remove_abandoned(target: str) -> None:
    """Removes what killed processes have left beside a file, and nobody holds a lock of."""
    directory, name = os.path.split(target)
    for each in os.listdir(directory):
        if re.fullmatch(re.escape(f".{name}.tmp-") + "[0-9a-f]{8}", each):
            with contextlib.suppress(OSError):
                _remove_unlocked(os.path.join(directory, each))


def _remove_unlocked(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        _lock(descriptor, wait=False)
        os.unlink(path)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> None:
    """Locks an open file, for as long as it is open in any process."""
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "no locks")
    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def _write(state: object, file: IO[bytes], mode: int | None) -> None:
    """Writes a state, through to the disk."""
    if mode is not None and stat.S_IMODE(os.fstat(file.fileno()).st_mode) != mode:
        os.fchmod(file.fileno(), mode)
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # PyTorch tells what a full disk leads to, not that it is full.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(directory: str) -> None:
    """Waits until a new name in a directory is on the disk, where directories can be waited for."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
