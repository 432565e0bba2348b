"""A global policy for scripts that ask for no precision themselves."""

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfstep.core import Policy, emit, subscribe
from halfstep.torch._called import put
from halfstep.torch._global import checked_everywhere, put_in_force, take_out_of_force
from halfstep.torch._patches import Undo, replace
from halfstep.torch._private import in_backward
from halfstep.torch._watch import is_capturing


class _GivesWay(BaseException):
    """Ends a call of a model, inside of which the script asks for a precision."""


class _Local(threading.local):
    inside = False


class Offer:
    """A policy that every model trains by until the script asks for a precision itself.

    What the event "precision" tells of ends it, in all threads. Where that comes up in a call of a
    model that runs by the policy already, the call begins anew without it: buffers and generators
    of random numbers are as they were before.

    Args:
        policy: The policy.

    Example:
        >>> offer = Offer("mixed_float16")
        >>> model = torch.nn.Linear(4, 2)
        >>> _ = model(torch.ones(1, 4))
        >>> emit("precision", how="torch.autocast", form="bfloat16", source="train.py:7")
        >>> from halfstep.torch import global_policy
        >>> str(global_policy())
        'float32'
    """

    def __init__(self, policy: Policy | str) -> None:
        self._local = _Local()
        self._everywhere = put_in_force(checked_everywhere(policy))
        # Whether gradients of its regions may be on their way.
        self._pending = False
        self._undo: list[Undo] = []
        if self._everywhere is not None:
            self._undo = [
                replace(nn.Module, "__call__", self._call),
                subscribe(self._listen),
            ]

    def _listen(self, event: str, values: dict[str, Any]) -> None:
        if event == "update" and self._everywhere is not None:
            # Several optimizers step one after the other.
            trains = [each for each in list(self._everywhere._seen) if each.regions]
            self._pending = self._pending and len(trains) > 1
        if event != "precision":
            return
        if self._local.inside:
            raise _GivesWay
        self._give_way()

    def _give_way(self) -> None:
        """Ends the policy; optimizers are guarded until they have stepped from its gradients."""
        everywhere, self._everywhere = self._everywhere, None
        while self._undo:
            self._undo.pop()()
        if everywhere is None:
            return
        for policy, made in everywhere.made.items():
            emit("region", policy=policy, automatic=True, count=-made)
        if take_out_of_force(everywhere):
            guarded = Guarded(everywhere, everywhere.end())
            if not self._pending:
                guarded.free()

    def _call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._local.inside or in_backward() or is_capturing():
            return original(module, *args, **kwargs)
        put_back = _kept(module)
        self._local.inside = True
        try:
            output = original(module, *args, **kwargs)
            self._pending |= torch.is_grad_enabled()
            return output
        except _GivesWay:
            self._local.inside = False
            put_back()
            self._give_way()
        finally:
            self._local.inside = False
        return original(module, *args, **kwargs)


class Guarded:
    """Guards that are taken away once their optimizers have stepped.

    Args:
        everywhere: The policy that has put them there.
        regions: Its regions, of which gradients may be on their way.
    """

    def __init__(self, everywhere: Any, regions: list[Any]) -> None:
        self._everywhere, self._regions = everywhere, regions
        self._end = subscribe(self._listen)
        for each in list(everywhere._seen):
            each.keeper = None
            if not each.regions:
                self._free(each)

    def _listen(self, event: str, values: dict[str, Any]) -> None:
        if event != "update":
            return
        found = {id(each.optimizer()): each for each in list(self._everywhere._seen)}
        if values.get("scaler") in found:
            self._free(found[values["scaler"]])
        else:  # a scaler of halfstep, which tells of itself after all of its optimizers
            self.free()

    def free(self) -> None:
        """Takes all of them away."""
        for each in list(self._everywhere._seen):
            self._free(each)
        self._end()

    def _free(self, guard: Any) -> None:
        self._everywhere.free(guard, self._regions)
        self._everywhere._seen.pop(guard, None)
        if not self._everywhere._seen:
            self._end()


def _kept(module: nn.Module) -> Callable[[], None]:
    """Returns what gives buffers and random generators back what they are now."""
    buffers = [(each, each.clone()) for each in module.buffers()]
    states = [_drawn(random.getstate, random.setstate)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states.append(_drawn(numpy.random.get_state, numpy.random.set_state))
    states.append(_drawn(torch.get_rng_state, torch.set_rng_state))
    if torch.cuda.is_initialized():
        states.append(_drawn(torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all))

    def put_back() -> None:
        put(buffers)
        for each in states:
            each()

    return put_back


def _drawn(read: Callable[[], Any], write: Callable[[Any], Any]) -> Callable[[], None]:
    state = read()
    return lambda: write(state)
