"""The process that measures a model: each layout, then each policy."""

import sys
from platform import python_version
from typing import TYPE_CHECKING, Any

from halfstep import __version__
from halfstep.errors import HalfstepError, UsageError
from halfstep.launch import Job, Send, processor_name, torch_probe
from halfstep.run._compare import DEFAULT_POLICIES
from halfstep.run._layouts import EIGHT_BIT, LAYOUTS, Layout
from halfstep.run._target import Target

if TYPE_CHECKING:
    from halfstep.torch._meter import Meter


def measure_model(job: Job, send: Send) -> None:
    """Measures the model that a callable builds, and tells of each finding as it comes.

    Args:
        job: Its `script` names the callable.
        send: Receives one message at a time, JSON types only.
    """
    target = Target(job.script)
    sys.path.insert(0, target.folder)
    try:
        meter = _meter(target, job)
        about = meter.about()
    except UsageError as error:
        send({"kind": "refused", "error": str(error)})
        return
    send({"kind": "model", **about})
    for layout in LAYOUTS:
        send({"kind": "begin", "name": layout.name})
        send({"kind": "layout", "name": layout.name, **_layout(meter, layout, about)})
    for policy in DEFAULT_POLICIES if about["has_inputs"] else ():
        send({"kind": "begin", "name": f"what {policy} keeps for backward"})
        send({"kind": "activations", "policy": policy, **_activations(meter, policy)})
    _send_place(send)


def _meter(target: Target, job: Job) -> "Meter":
    from halfstep.torch._meter import Meter as TorchMeter

    return TorchMeter(target.load(), target.name, job.optimizer, job.seed)


def _layout(meter: "Meter", layout: Layout, about: dict[str, Any]) -> dict[str, Any]:
    name = about["trained"][0]["optimizer"]
    if layout.eight_bit and name not in EIGHT_BIT:
        return {"reason": f"torchao.optim has no {name} with 8-bit states"}
    try:
        eight_bit = EIGHT_BIT[name] if layout.eight_bit else ""
        found = meter.layout(layout.policy, layout.masters, eight_bit, layout.release)
    except Exception as error:  # of a model that is anybody's, or of memory that has run out
        return {"reason": _text(error)}
    return {"kept": found}


def _activations(meter: "Meter", policy: str) -> dict[str, Any]:
    try:
        return meter.activations(policy)
    except Exception as error:
        return {"reason": _text(error)}


def _text(error: Exception) -> str:
    if isinstance(error, HalfstepError):
        return str(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _send_place(send: Send) -> None:
    probe = torch_probe()
    send({"kind": "end", "device": probe.device() or processor_name()})
    own = {"python": python_version(), "halfstep": __version__}
    send({"kind": "versions", "versions": own | probe.versions()})
