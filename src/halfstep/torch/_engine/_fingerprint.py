"""The rules in force, written where `torch.compile` looks.

A compiled graph is guarded by PyTorch's autocast state: per device, whether autocast is on and in
which dtype. It knows nothing of rules. So a digest of the rules is written into that state for
devices that this machine does not have: a change of rules is then a change of state, which
recompiles, and a graph on disk is found again only under the same rules.
"""

import functools
import hashlib

import torch

_CANDIDATES = ("ipu", "maia", "hpu", "mtia", "xla")
_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)


@functools.cache
def carriers() -> dict[str, torch.dtype]:
    """Returns types of device that this machine does not have, and their usual dtypes."""
    accelerator = torch.accelerator.current_accelerator()
    present = None if accelerator is None else accelerator.type
    absent = [device for device in _CANDIDATES if device != present]
    return {device: torch.get_autocast_dtype(device) for device in absent}


def publish(text: str) -> None:
    """Writes a digest of the text into the autocast state; an empty text restores that state."""
    for device, dtype in _code(text):
        torch.set_autocast_enabled(device, bool(text))
        torch.set_autocast_dtype(device, dtype)


@functools.lru_cache(maxsize=256)
def _code(text: str) -> tuple[tuple[str, torch.dtype], ...]:
    if not text:
        return tuple(carriers().items())
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    code = []
    for device in carriers():
        digest, index = divmod(digest, len(_DTYPES))
        code.append((device, _DTYPES[index]))
    return tuple(code)
