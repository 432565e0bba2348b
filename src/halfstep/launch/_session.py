"""All that is measured in this process while it runs a script."""

import atexit
import contextlib
import functools
import random
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from platform import python_version
from typing import Any

from halfstep import __version__, core
from halfstep.errors import HalfstepError
from halfstep.launch._beside import Beside
from halfstep.launch._joined import Joined
from halfstep.launch._memory import MemoryGrowth
from halfstep.launch._probe import (
    NoProbe,
    Probe,
    jax_probe,
    keras_probe,
    processor_name,
    torch_probe,
)
from halfstep.launch._recorder import Recorder, Send
from halfstep.launch._when_imported import when_imported

_PROBES = {"keras": keras_probe, "torch": torch_probe, "jax": jax_probe}
# Its steps are told of by whoever looks closely, and its functions choose their policy themselves.
_ONLY_LOOKED_AT = ("jax",)
_UNSUPPORTED = 2


class Session:
    """Watches the script, from the moment that it imports a framework.

    A layer of Keras may be a module of PyTorch, too: Keras is asked first.

    Args:
        send: Receives one message at a time, JSON types only.
        policy: What the script trains under; "" leaves the choice to it, and else is `auto`.
        overrides: Whether the policy wins over what the script passes to halfstep itself.
        seed: What the random generators are seeded with, None to leave them alone.
        memory: Whether to tell what is kept after the first steps.
        meet: Learns what measures, each time that a framework was imported.
    """

    def __init__(
        self,
        send: Send,
        *,
        policy: str,
        overrides: bool = True,
        seed: int | None = None,
        memory: bool = False,
        meet: Callable[[Probe], object] | None = None,
    ) -> None:
        self._send, self._policy, self._seed = send, policy, seed
        self._overrides = overrides
        self._probe: Probe = NoProbe()
        self._met: dict[str, Any] = {}
        self._looks_at_memory = memory
        self._tell_probe = meet
        self._recorder, self._memory = Recorder(self._probe, send), MemoryGrowth()

    def start(self) -> None:
        """Begins to listen."""
        self._send({"kind": "start", "date": datetime.now(UTC).isoformat(timespec="seconds")})
        self._send_versions()
        core.subscribe(self._recorder)
        if self._policy and self._overrides:
            self._override()
        if self._seed is not None:
            random.seed(self._seed)
            when_imported("numpy", self._seed_numpy)
        for framework in _PROBES:
            if framework in _ONLY_LOOKED_AT and self._tell_probe is None:
                continue
            when_imported(framework, functools.partial(self._meet_framework, framework))
            meet = functools.partial(self._meet, framework)
            when_imported(f"halfstep.{framework}", meet)

    def _override(self) -> None:
        """Makes the policy win until the process ends, in threads that outlive the script too."""
        stack = contextlib.ExitStack()
        stack.enter_context(core.override_policy(self._policy))
        atexit.register(stack.close)

    def finish(self) -> None:
        """Sends what is left and what is known only at the end."""
        with contextlib.suppress(RuntimeError):  # such as a device that an error has disabled
            self._recorder.flush()
        self._send_versions()  # of what was used, too
        peak, kind = self._probe.peak_memory() or (self._memory.bytes(), self._memory.kind)
        device = self._probe.device() or processor_name()
        self._send({"kind": "end", "peak_memory": peak, "peak_memory_kind": kind, "device": device})

    def _seed_numpy(self) -> None:
        sys.modules["numpy"].random.seed(self._seed)

    def _meet_framework(self, framework: str) -> None:
        # A script may import the front-end first, which then is not ready yet.
        if f"halfstep.{framework}" not in sys.modules:
            self._meet(framework)

    def _meet(self, framework: str) -> None:
        if framework in self._met:
            return
        try:
            self._met[framework] = NoProbe()  # making a probe imports the front-end
            self._met[framework] = probe = _PROBES[framework]()
            self._join()
            self._begin(probe)
        except HalfstepError as error:  # this version, or the policy, cannot be had
            self._send_versions(**{framework: str(sys.modules[framework].__version__)})
            sys.stderr.write(f"halfstep: {error}\n")
            raise SystemExit(_UNSUPPORTED) from None
        self._recorder.use(self._probe)
        self._memory = MemoryGrowth()
        self._send_versions()

    def _join(self) -> None:
        keras, torch, jax = (self._met.get(name) for name in ("keras", "torch", "jax"))
        main = torch if keras is None else Joined(keras, torch or NoProbe())
        if jax is None or (keras and "jax" in keras.versions()):
            self._probe = main or NoProbe()
        else:
            both: Any = Beside(main, jax)
            self._probe = both if main else jax

    def _begin(self, probe: Any) -> None:
        if self._seed is not None:
            probe.seed(self._seed)
        probe.watch()
        if self._tell_probe is not None:
            self._tell_probe(self._probe)
        if self._looks_at_memory:
            self._probe.watch_kept(self._send_kept)
        probe.set_policy(self._policy or core.AUTO)

    def _send_kept(self, found: dict[str, Any]) -> None:
        self.finish()  # whoever listens may have heard enough
        self._send({"kind": "kept", **found})

    def _send_versions(self, **others: str) -> None:
        own = {"python": python_version(), "halfstep": __version__}
        self._send({"kind": "versions", "versions": own | self._probe.versions() | others})
