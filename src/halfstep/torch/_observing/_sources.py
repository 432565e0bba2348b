"""In which line an autocast was made, where that is known."""

import contextlib
import functools
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import typing_extensions

import halfstep

_NAME = "_halfstep_source"
_TORCH, _HALFSTEP = (
    f"{os.path.dirname(each.__file__ or '')}{os.sep}" for each in (torch, halfstep)
)
# What runs functions of somebody else, in some of which autocasts are made for whoever asks.
_BETWEEN = (
    _HALFSTEP,
    *(os.path.join(_TORCH, part, "") for part in ("amp", "cuda/amp", "cpu/amp", "xpu/amp")),
    *(each.__file__ or "" for each in (contextlib, functools, typing_extensions, warnings)),
)


class _Local(threading.local):
    source = ""


_local = _Local()


def here() -> str:
    """Returns the innermost line outside of PyTorch and halfstep, as "file:line"."""
    own = (each for each in _frames() if not each.f_code.co_filename.startswith(_TORCH))
    frame = next(own, None)
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def by_torch() -> bool:
    """Returns whether PyTorch makes an autocast for itself, as in the threads of a model."""
    frame = next(_frames(), None)
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_BETWEEN):
            yield frame
        frame = frame.f_back


def marked(made: Any, source: str) -> Any:
    """Returns an autocast, which from now on tells the line that it was made in."""
    setattr(made, _NAME, source)
    return made


def source_of(made: Any) -> str:
    """Returns the line that an autocast was made in, "" where it is not known.

    Example:
        >>> import torch
        >>> source_of(marked(torch.autocast("cpu"), "train.py:7"))
        'train.py:7'
    """
    return str(getattr(made, _NAME, ""))


def entering() -> str:
    """Returns the line of the autocast that this thread enters, "" where it is not known."""
    return _local.source


@contextlib.contextmanager
def entered(source: str) -> Iterator[None]:
    """Lets an autocast that is entered in the block be the one of a line."""
    before, _local.source = _local.source, source
    try:
        yield
    finally:
        _local.source = before
