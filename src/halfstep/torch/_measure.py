"""What a comparison of runs asks of PyTorch: seeds, times, memory."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from halfstep.torch._patches import Undo, replace
from halfstep.torch._saved import saved_bytes
from halfstep.torch._watch import watch

_FAST_FLOAT16 = (7, 0)  # the first CUDA devices with tensor cores


class Saved:
    """The bytes kept for backward within a block, None if they could not be counted to its end."""

    bytes: int | None = None
    given_up = False


class Probe:
    """Measures a training script without slowing the device down.

    Nothing here waits for an accelerator except `floats` and `seconds`, which are called on
    many values at once.

    Example:
        >>> probe = Probe()
        >>> probe.floats([probe.snapshot(torch.tensor(2.0)), 3.0])
        [2.0, 3.0]
    """

    def seed(self, seed: int) -> None:
        """Seeds the generators of every device."""
        torch.manual_seed(seed)

    def watch(self) -> Undo:
        """Makes scripts that do not use halfstep visible, and returns what ends it."""
        return watch()

    def set_policy(self, policy: str) -> None:
        """Makes every model of this process train under a policy; `float32` changes nothing."""
        from halfstep.torch import set_global_policy

        set_global_policy(policy)

    def choose_policy(self, use: Callable[[str], None]) -> None:
        """Calls `use` with bfloat16's policy, and with float16's once CUDA is in use and fast.

        CUDA is not asked before the script starts it: that would fix what the script may still
        choose, such as the devices it sees.
        """
        use("mixed_bfloat16")
        torch.cuda._lazy_call(lambda: use(_suitable_for_cuda()))

    def snapshot(self, value: Any) -> Any:
        """Returns a detached copy of a tensor, and anything else as it is.

        A copy, because a captured graph writes each step's loss to the same memory.
        """
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    def floats(self, values: Sequence[Any]) -> list[float]:
        """Returns snapshots as floats, with one wait per device instead of one per value."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        numbers = iter(_read(tensors))
        return [
            next(numbers) if isinstance(value, torch.Tensor) else float(value) for value in values
        ]

    def tick(self) -> Any:
        """Returns the time, on the device's own clock where CUDA is in use."""
        if not torch.cuda.is_initialized():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Returns the time from each mark to the next one on the same clock."""
        events = [mark for mark in marks if isinstance(mark, torch.cuda.Event)]
        if events:
            events[-1].synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
        return [after - before for before, after in pairwise(marks)]

    @contextlib.contextmanager
    def saved_bytes(self) -> Iterator[Saved]:
        """Counts the bytes kept for backward within the block.

        `torch.func.grad` cannot run while they are counted, so the count is then given up.
        """
        result, thread = Saved(), threading.get_ident()
        counting = contextlib.ExitStack()

        def make_way(disable: Callable[[str], None], message: str) -> None:
            if threading.get_ident() == thread:
                counting.close()
                result.given_up = True
            disable(message)

        undo = replace(torch._C._autograd, "_saved_tensors_hooks_disable", make_way)
        with counting:
            counted = counting.enter_context(saved_bytes())
            try:
                yield result
            finally:
                undo()
        result.bytes = None if result.given_up else counted.bytes

    def peak_memory(self) -> tuple[int, str] | None:
        """Returns the most bytes that PyTorch held on all CUDA devices, None without CUDA."""
        if not torch.cuda.is_initialized():
            return None
        devices = range(torch.cuda.device_count())
        return sum(map(torch.cuda.max_memory_allocated, devices)), "allocated on CUDA"

    def device(self) -> str:
        """Returns the name of the current CUDA device, "" where CUDA is not in use."""
        return torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""

    def versions(self) -> dict[str, str]:
        """Returns PyTorch's version."""
        return {"torch": str(torch.__version__)}


def _suitable_for_cuda() -> str:
    fast = torch.version.hip is not None or torch.cuda.get_device_capability() >= _FAST_FLOAT16
    return "mixed_float16" if fast else "mixed_bfloat16"


def _read(tensors: Sequence[torch.Tensor]) -> list[float]:
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    numbers = [0.0] * len(tensors)
    for indices in by_device.values():
        # The mean, because a loss of several elements is scaled and summed later.
        batch = torch.stack([tensors[index].float().mean() for index in indices])
        for index, number in zip(indices, batch.tolist(), strict=True):
            numbers[index] = number
    return numbers
