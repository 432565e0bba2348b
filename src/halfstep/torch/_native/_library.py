"""The compiled library: `kernel.c`, built for this very machine the first time that it is worth it.

It is kept between processes in a folder that only its owner can write to, under a name that changes
with the source, the compiler and the processor, and that tells what is in the file: loading one
that was cut short would end the process.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from halfstep.core import cache_folder

_SOURCE = Path(__file__).with_name("kernel.c")
# A product and a sum that are one operation are rounded once, and PyTorch rounds twice.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fPIC")
_LIMIT_SECONDS = 20.0


def load() -> ctypes.CDLL | None:
    """Returns the library if it can be built and loaded, else None.

    The threads are those of the OpenMP library that PyTorch has loaded: this one is compiled for
    OpenMP but not linked to any, so that it brings none, and does not load where PyTorch has none.
    """
    for flags in ((*_FLAGS, "-fopenmp"), _FLAGS):
        # Nothing may fail because something that only saves time did.
        try:
            return ctypes.CDLL(str(_library(flags)))
        except Exception:
            continue
    return None


def _library(flags: tuple[str, ...]) -> Path:
    """Returns the path of the library built with these flags, building it if there is none."""
    compiler = next(_compilers())
    macros = _run(*compiler, *flags, "-dM", "-E", "-x", "c", os.devnull)
    # The macros tell the version of the compiler and all that `native` stands for.
    parts = [_SOURCE.read_bytes(), *map(str.encode, (*compiler, *flags)), macros]
    stem = cache_folder() / f"kernel-{_digest(b'|'.join(parts))}"
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
        compiled, linked = Path(folder, "kernel.o"), Path(folder, "kernel.so")
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


def _run(*command: str) -> bytes:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=_LIMIT_SECONDS,
    )
    return done.stdout
