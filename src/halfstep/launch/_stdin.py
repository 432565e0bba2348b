"""The same standard input for every run."""

import contextlib
import itertools
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from typing import IO

_CHUNK = 65536


class SharedInput:
    """Gives each run what the command was given: a file from its start, a pipe as it arrived.

    A terminal is not handed on: the same words would have to be typed once per run.

    Args:
        descriptor: The command's own standard input.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        mode = _mode(descriptor)
        self._start = os.lseek(descriptor, 0, os.SEEK_CUR) if stat.S_ISREG(mode) else None
        is_stream = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        self._replay = _Replay(descriptor) if is_stream else None

    def for_process(self) -> int:
        """Returns what `Popen` takes as `stdin`."""
        if self._replay:
            return subprocess.PIPE
        if self._start is None:
            return subprocess.DEVNULL
        os.lseek(self._descriptor, self._start, os.SEEK_SET)
        return self._descriptor

    def feed(self, sink: IO[bytes] | None) -> None:
        """Starts to write into the pipe that `for_process` asked for, if it did."""
        if self._replay and sink:
            self._replay.feed(sink)


class _Replay:
    """Reads a stream once and writes it to any number of sinks, each from the start.

    Both sides are threads that nobody waits for: the stream may never end, and a script may
    never read.
    """

    def __init__(self, descriptor: int) -> None:
        self._chunks: list[bytes] = []
        self._ended = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(descriptor,), daemon=True).start()

    def feed(self, sink: IO[bytes]) -> None:
        threading.Thread(target=self._write, args=(sink,), daemon=True).start()

    def _read(self, descriptor: int) -> None:
        # os.read: a thread that waits in sys.stdin would hold its lock when the program ends.
        while chunk := os.read(descriptor, _CHUNK):
            self._add(chunk)
        self._add(b"", ended=True)

    def _add(self, chunk: bytes, *, ended: bool = False) -> None:
        with self._changed:
            self._chunks.append(chunk)
            self._ended = ended
            self._changed.notify_all()

    def _write(self, sink: IO[bytes]) -> None:
        with contextlib.suppress(BrokenPipeError), sink:
            for chunk in self._all():
                sink.write(chunk)
                sink.flush()

    def _all(self) -> Iterator[bytes]:
        for index in itertools.count():
            with self._changed:
                while index == len(self._chunks) and not self._ended:
                    self._changed.wait()
                if index == len(self._chunks):
                    return
            yield self._chunks[index]


def _mode(descriptor: int) -> int:
    try:
        return os.fstat(descriptor).st_mode
    except OSError:  # closed, as under some process managers
        return 0
