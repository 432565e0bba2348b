"""All that is measured in this process while it runs a script."""

import atexit
import contextlib
import random
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from platform import python_version
from typing import Any

from halfstep import __version__, core
from halfstep.core import Policy
from halfstep.errors import HalfstepError
from halfstep.run._memory import MemoryGrowth
from halfstep.run._probe import NoProbe, Probe, processor_name, torch_probe
from halfstep.run._recorder import Recorder, Send
from halfstep.run._when_imported import when_imported

_FRONT_END = "halfstep.torch"
_UNSUPPORTED = 2


class Session:
    """Watches the script, from the moment that it imports a framework.

    Args:
        send: Receives one message at a time, JSON types only.
        policy: What the script trains under, whatever it passes to halfstep itself; "" leaves
            the choice to it, and else to the framework's front-end.
        seed: What the random generators are seeded with, None to leave them alone.
        probe: Makes what measures PyTorch.
        memory: Whether to tell what is kept after the first steps.
    """

    def __init__(
        self,
        send: Send,
        *,
        policy: str,
        seed: int | None = None,
        probe: Callable[[], Probe] = torch_probe,
        memory: bool = False,
    ) -> None:
        self._send, self._policy, self._seed, self._make_probe = send, policy, seed, probe
        self._probe: Probe = NoProbe()
        self._met, self._used, self._looks_at_memory = False, "", memory
        self._recorder, self._memory = Recorder(self._probe, send), MemoryGrowth()

    def start(self) -> None:
        """Begins to listen."""
        self._send({"kind": "start", "date": datetime.now(UTC).isoformat(timespec="seconds")})
        self._send_versions()
        core.subscribe(self._recorder)
        if self._policy:
            self._override()
        if self._seed is not None:
            random.seed(self._seed)
            when_imported("numpy", self._seed_numpy)
        when_imported("torch", self._meet_torch)
        when_imported(_FRONT_END, self._meet_front_end)

    def _override(self) -> None:
        """Makes the policy win until the process ends, in threads that outlive the script too."""
        stack = contextlib.ExitStack()
        stack.enter_context(core.override_policy(self._policy))
        atexit.register(stack.close)

    def finish(self) -> None:
        """Sends what is left and what is known only at the end."""
        with contextlib.suppress(RuntimeError):  # such as a device that an error has disabled
            self._recorder.flush()
        peak, kind = self._probe.peak_memory() or (self._memory.bytes(), self._memory.kind)
        device = self._probe.device() or processor_name()
        self._send({"kind": "end", "peak_memory": peak, "peak_memory_kind": kind, "device": device})

    def _seed_numpy(self) -> None:
        sys.modules["numpy"].random.seed(self._seed)

    def _meet_torch(self) -> None:
        # A script may import the front-end first, which then is not ready yet.
        if _FRONT_END not in sys.modules:
            self._meet_front_end()

    def _meet_front_end(self) -> None:
        if self._met:
            return
        self._met = True
        try:
            self._probe = self._make_probe()
        except HalfstepError as error:  # this PyTorch lacks what halfstep needs
            self._send_versions(torch=str(sys.modules["torch"].__version__))
            sys.stderr.write(f"halfstep: {error}\n")
            raise SystemExit(_UNSUPPORTED) from None
        if self._seed is not None:
            self._probe.seed(self._seed)
        self._probe.watch()
        if self._looks_at_memory:
            self._probe.watch_kept(self._send_kept)
        self._set_policy()
        self._recorder.use(self._probe)
        self._memory = MemoryGrowth()
        self._send_versions()

    def _send_kept(self, found: dict[str, Any]) -> None:
        self.finish()  # whoever listens may have heard enough
        self._send({"kind": "kept", **found})

    def _set_policy(self) -> None:
        if not self._policy:
            self._probe.choose_policy(self._use)
        elif Policy.parse(self._policy) != Policy.named("float32"):
            self._probe.set_policy(self._policy)

    def _use(self, policy: str) -> None:
        self._recorder.forget_regions(self._used)
        self._used = policy
        self._probe.set_policy(policy)
        self._send({"kind": "policy", "policy": policy})

    def _send_versions(self, **others: str) -> None:
        own = {"python": python_version(), "halfstep": __version__}
        self._send({"kind": "versions", "versions": own | self._probe.versions() | others})
