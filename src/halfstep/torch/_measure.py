"""What a comparison of runs asks of PyTorch: seeds, times, memory."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from halfstep.torch._engine import _state
from halfstep.torch._patches import Undo, replace
from halfstep.torch._private import in_backward
from halfstep.torch._saved import saved_bytes
from halfstep.torch._watch import watch

_HOOKS: Any = torch._C._autograd
# Whose hooks for saved tensors may be put inside of ours without hiding what is to be counted.
_COUNTED_ANYWAY = ("halfstep.", "torch.utils.checkpoint")


class Saved:
    """The bytes kept for backward within a block, None if they could not all be counted."""

    bytes: int | None = None
    given_up = False
    hooks: Any = None

    def may_end(self) -> bool:
        """Returns whether the count can end here without ending the script's own hooks."""
        return not in_backward() and _innermost_hooks() is self.hooks


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

    def watch_kept(self, report: Callable[[dict[str, Any]], None]) -> Undo:
        """Reports the bytes kept after each of the first steps, and returns what ends it."""
        from halfstep.torch._keeping import watch_kept

        return watch_kept(report)

    def look_closely(self) -> Any:
        """Returns what looks at the numbers of a step."""
        from halfstep.torch._looking import Looking

        return Looking()

    def set_policy(self, policy: str) -> None:
        """Makes every model of this process train under a policy; `float32` changes nothing.

        `auto` asks nothing of CUDA before the script starts it: that would fix what the script may
        still choose, such as the devices it sees.
        """
        from halfstep.torch import set_global_policy

        set_global_policy(policy)

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

    def has_lowered(self) -> bool:
        """Returns whether anything was to compute in low precision so far, however it came to."""
        return _state._ready_table.cache_info().misses > 0

    def may_count(self) -> bool:
        """Returns whether `saved_bytes` may begin here.

        Not within a backward pass, which ends all that began in it, nor within hooks of the
        script's own, which it would end in the wrong order.
        """
        return not in_backward() and _innermost_hooks() is None

    @contextlib.contextmanager
    def saved_bytes(self) -> Iterator[Saved]:
        """Counts the bytes kept for backward within the block.

        `torch.func.grad` cannot run while they are counted, and hooks of the script's own hide what
        is saved; the count is then given up.
        """
        result, thread = Saved(), threading.get_ident()
        counting = contextlib.ExitStack()

        def make_way(disable: Callable[[str], None], message: str) -> None:
            if _innermost_hooks() is result.hooks:
                result.given_up = True
                if in_backward():
                    _HOOKS._pop_saved_tensors_default_hooks()  # until this pass ends
                elif threading.get_ident() == thread:
                    counting.close()
            disable(message)

        def notice(push: Callable[..., None], pack: Any, unpack: Any) -> None:
            if not str(getattr(pack, "__module__", "")).startswith(_COUNTED_ANYWAY):
                result.given_up = True
            push(pack, unpack)

        with counting:
            counted = counting.enter_context(saved_bytes())
            result.hooks = _innermost_hooks()
            undo = [
                replace(_HOOKS, "_saved_tensors_hooks_disable", make_way),
                replace(_HOOKS, "_push_saved_tensors_default_hooks", notice),
            ]
            try:
                yield result
            finally:
                for each in undo:
                    each()
        # Nothing at all was saved by another thread, or not for backward.
        result.bytes = None if result.given_up else counted.bytes or None

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


def _innermost_hooks() -> Any:
    """Returns what unpacks the tensors that this thread would save now, None for no hooks."""
    hooks = _HOOKS._top_saved_tensors_default_hooks(True)
    return hooks and hooks[1]


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
