"""The rules in force, written where `torch.compile` looks.

A compiled graph is guarded by PyTorch's autocast state: per device, whether autocast is on and in
which dtype. It knows nothing of rules. So a digest of the rules is written into that state for
devices that this machine does not have: a change of rules is then a change of state, which
recompiles, and a graph on disk is found again only under the same rules.
"""

import functools
import hashlib

import torch

_CANDIDATES = ("ipu", "maia", "hpu", "mtia")
_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)


@functools.cache
def carriers() -> tuple[str, ...]:
    """Returns three types of device that this machine does not have."""
    accelerator = torch.accelerator.current_accelerator()
    present = None if accelerator is None else accelerator.type
    return tuple(device for device in _CANDIDATES if device != present)[:3]


def publish(text: str) -> None:
    """Writes a digest of the text into the autocast state; an empty text switches it off."""
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    for device in carriers():
        digest, index = divmod(digest, len(_DTYPES))
        torch.set_autocast_enabled(device, bool(text))
        torch.set_autocast_dtype(device, _DTYPES[index])
