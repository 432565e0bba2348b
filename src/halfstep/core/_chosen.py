"""What `auto` stands for on a machine: measured once, and kept in a file of the user's."""

import contextlib
import hashlib
import json
import logging
import math
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from halfstep.core._auto import FamilyTimes, Size, choose
from halfstep.core._caches import cache_folder
from halfstep.core._events import emit
from halfstep.core._evidence import Machine
from halfstep.core._policy import Policy
from halfstep.core._reading import plain, record

Times = tuple[FamilyTimes, ...]

_log = logging.getLogger("halfstep.auto")
# Nothing may fail because something that only saves time did: there may be no such folder.
_NO_FILE = (OSError, RuntimeError, AttributeError)


@dataclass(frozen=True)
class Kept:
    """What was measured on a machine.

    Args:
        machine: The machine.
        times: How long operations take there.

    Example:
        >>> Kept(Machine("cpu", "AMD EPYC"), ()).times
        ()
    """

    machine: Machine
    times: Times


class Chosen:
    """The policies that `auto` stands for, as far as this process knows them.

    Args:
        folder: Returns the folder of files.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> machine = Machine("cpu", "AMD EPYC")
        >>> measured = lambda: (FamilyTimes("matmul", "large", 2.0, 1.0, 60.0),)
        >>> print(Chosen(lambda: folder).policy(machine, measured))
        mixed_bfloat16
        >>> print(Chosen(lambda: folder).policy(machine, lambda: "not measured again"))
        mixed_bfloat16
    """

    def __init__(self, folder: Callable[[], Path] = cache_folder) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._known: dict[Machine, Times] = {}
        self._told: set[str] = set()

    def policy(
        self, machine: Machine, measure: Callable[[], Times], size: Size = "large", **limits: bool
    ) -> Policy:
        """Returns the policy that `auto` stands for on a machine, and tells of it.

        Args:
            machine: The machine.
            measure: Measures how long operations take there; not called where that is known.
            size: What the policy is for.
            limits: What `choose` takes besides.

        Example:
            >>> import pathlib, tempfile
            >>> chosen = Chosen(lambda: pathlib.Path(tempfile.mkdtemp()))
            >>> print(chosen.policy(Machine("cpu", "AMD EPYC"), lambda: ()))
            float32
        """
        choice = choose(self._times(machine, measure), machine.name, size, **limits)
        if choice.why not in self._told:
            self._told.add(choice.why)
            _log.info(choice.why)
        emit("auto", policy=str(choice.policy), why=choice.why)
        return choice.policy

    def forget(self) -> None:
        """Forgets what this process knows, so that files count again.

        Example:
            >>> Chosen().forget()
        """
        with self._lock:
            self._known.clear()
            self._told.clear()

    def _times(self, machine: Machine, measure: Callable[[], Times]) -> Times:
        with self._lock:
            if machine not in self._known:
                kept = self._kept(machine)
                self._known[machine] = self._agreed(machine, measure()) if kept is None else kept
            return self._known[machine]

    def _path(self, machine: Machine) -> Path:
        digest = hashlib.sha256(repr(machine).encode()).hexdigest()
        return self._folder() / f"auto-{digest[:32]}.json"

    def _kept(self, machine: Machine) -> Times | None:
        """Returns what the file of a machine says, None where there is none that can be read."""
        with contextlib.suppress(*_NO_FILE, ValueError):
            kept = record(Kept, json.loads(self._path(machine).read_text("utf-8")), "Kept")
            return kept.times if kept.machine == machine else None
        return None

    def _agreed(self, machine: Machine, times: Times) -> Times:
        """Writes a file, and returns what it says in the end, of whichever process was first.

        What the machine had no time for is to be measured again.
        """
        if any(math.isinf(each.float32) for each in times):
            return times
        with contextlib.suppress(*_NO_FILE):
            path = self._path(machine)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                written = Path(folder, path.name)
                written.write_text(json.dumps(plain(Kept(machine, times)), indent=1), "utf-8")
                self._publish(written, path, machine)
        kept = self._kept(machine)
        return times if kept is None else kept

    def _publish(self, written: Path, path: Path, machine: Machine) -> None:
        try:
            os.link(written, path)
        except OSError:  # there is one, or there are no links
            if self._kept(machine) is None:
                os.replace(written, path)


CHOSEN = Chosen()
