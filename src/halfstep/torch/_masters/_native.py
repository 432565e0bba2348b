"""The compiled kernel: `split.c`, built for this very machine the first time that it is worth it.

Whatever goes wrong on the way, there is just no kernel: it changes how long a step takes, and not
one bit of the result. The library is kept between processes in a folder that only its owner can
write to, under a name that changes with the source, the compiler and the processor, and that tells
what is in the file: loading one that was cut short would end the process.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from halfstep.torch._masters._pieces import is_dense

Function: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]

# Smaller tensors are done by one thread, and do not lead to a kernel being built.
LARGE = 2**15
# One thread of the kernel is as fast as this many of PyTorch's operations.
_WORTH_THREADS = 4

_SOURCE = Path(__file__).with_name("split.c")
_FLAGS = ("-O3", "-march=native", "-fPIC")
_LIMIT_SECONDS = 20.0


@dataclass(frozen=True)
class Kernel:
    """The functions of a loaded library, for tensors that `takes` accepts."""

    library: ctypes.CDLL

    @functools.cached_property
    def is_threaded(self) -> bool:
        """Whether the library can use the threads of PyTorch."""
        return bool(self.library.halfstep_threads(ctypes.c_int64(1)))

    def is_worthwhile(self, count: int) -> bool:
        """Returns whether so many elements are done faster than by PyTorch's operations."""
        return self.is_threaded or count < LARGE or torch.get_num_threads() <= _WORTH_THREADS

    def split(self, master: Tensor, low: Tensor, remainder: Tensor) -> None:
        """Splits a master into a bfloat16 parameter and its remainder."""
        _call(self.library.halfstep_split, master, low, remainder)
        torch.autograd.graph.increment_version((low, remainder))

    def merge(self, low: Tensor, remainder: Tensor, out: Tensor) -> None:
        """Merges a bfloat16 parameter and its remainder into a master."""
        _call(self.library.halfstep_merge, low, remainder, out)
        torch.autograd.graph.increment_version(out)

    def squares(self, tensors: Sequence[Tensor]) -> list[float]:
        """Returns the sums of the squares of dense bfloat16 tensors."""
        counts = [each.numel() for each in tensors]
        starts = [each.data_ptr() for each in tensors]
        sums = (ctypes.c_float * len(counts))()
        _, threads = _shared(sum(counts))
        self.library.halfstep_squares(
            (ctypes.c_void_p * len(counts))(*starts),
            (ctypes.c_int64 * len(counts))(*counts),
            sums,
            len(counts),
            threads,
        )
        return list(sums)


def takes(low: Tensor, remainder: Tensor, wide: Tensor) -> bool:
    """Returns whether these are plain tensors on the CPU that lie in memory alike."""
    tensors = (low, remainder, wide)
    return (
        (low.dtype, remainder.dtype, wide.dtype) == (torch.bfloat16, torch.int16, torch.float32)
        and all(type(each) in (Tensor, torch.nn.Parameter) and each.is_cpu for each in tensors)
        and all(each.layout is torch.strided for each in tensors)
        and low.shape == remainder.shape == wide.shape
        and (all(each.is_contiguous() for each in tensors) or _are_dense_alike(*tensors))
    )


def load(agrees: Callable[[Kernel], bool]) -> Kernel | None:
    """Returns the kernel if it can be built and loaded and passes a test, else None.

    The threads are those of the OpenMP library that PyTorch has loaded: this one is compiled for
    OpenMP but not linked to any, so that it brings none, and does not load where PyTorch has none.
    """
    for flags in ((*_FLAGS, "-fopenmp"), _FLAGS):
        # Nothing may fail because something that only saves time did.
        try:
            kernel = Kernel(_declared(ctypes.CDLL(str(_library(flags)))))
            if agrees(kernel):
                return kernel
        except Exception:
            continue
    return None


def _call(function: Callable[..., None], *tensors: Tensor) -> None:
    function(*[each.data_ptr() for each in tensors], *_shared(tensors[0].numel()))


def _shared(count: int) -> tuple[int, int]:
    """Returns how many elements are shared among how many threads."""
    return count, torch.get_num_threads() if count >= LARGE else 1


def _are_dense_alike(first: Tensor, *others: Tensor) -> bool:
    return is_dense(first) and all(first.stride() == each.stride() for each in others)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.halfstep_threads.restype = ctypes.c_int64
    for function in (library.halfstep_split, library.halfstep_merge, library.halfstep_squares):
        function.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int64]
        function.restype = None
    return library


def _library(flags: tuple[str, ...]) -> Path:
    """Returns the path of the library built with these flags, building it if there is none."""
    compiler = next(_compilers())
    macros = _run(*compiler, *flags, "-dM", "-E", "-x", "c", os.devnull)
    # The macros tell the version of the compiler and all that `native` stands for.
    parts = [_SOURCE.read_bytes(), *map(str.encode, (*compiler, *flags)), macros]
    stem = _folder() / f"split-{_digest(b'|'.join(parts))}"
    kept = [*stem.parent.glob(f"{stem.name}-*.so")]
    if whole := next(filter(_is_whole, kept), None):
        return whole
    built = _build(stem, compiler, flags)
    for broken in {*kept} - {built}:
        broken.unlink(missing_ok=True)
    return built


def _is_whole(path: Path) -> bool:
    try:
        return path.stem.endswith(f"-{_digest(path.read_bytes())}")
    except OSError:
        return False


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _build(stem: Path, compiler: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    """Builds a library that is there as a whole or not at all, whoever else builds it too."""
    with tempfile.TemporaryDirectory(dir=stem.parent) as folder:
        compiled, linked = Path(folder, "split.o"), Path(folder, "split.so")
        _run(*compiler, *flags, "-c", str(_SOURCE), "-o", str(compiled))
        _run(*compiler, "-shared", str(compiled), "-o", str(linked))
        path = stem.with_name(f"{stem.name}-{_digest(linked.read_bytes())}.so")
        os.replace(linked, path)
    return path


def _compilers() -> Iterator[tuple[str, ...]]:
    """Yields the commands of the C compilers that exist, the one that was asked for first."""
    named = (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang")
    for command in filter(None, named):
        name, *options = shlex.split(command)
        if found := shutil.which(name):
            yield found, *options


def _folder() -> Path:
    """Returns the folder of this user for libraries, which nobody else can write to."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache"
    folder = caches / "halfstep"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or writable:
        raise PermissionError(f"{folder} needs to be a folder that only its user can write to")
    return folder


def _run(*command: str) -> bytes:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=_LIMIT_SECONDS,
    )
    return done.stdout
