"""One policy for every model and optimizer of the process."""

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.core import Policy
from halfstep.torch._engine import _state
from halfstep.torch._region import Region, prepare
from halfstep.torch._regions._attach import checked_policy
from halfstep.torch._regions._forward import Forward
from halfstep.torch._regions._guard import Guard, guard
from halfstep.torch._regions._strays import HALF
from halfstep.torch._scaling._gradients import parameters_of

_FLOAT32 = Policy.named("float32")
_lock = threading.RLock()


class _Everywhere:
    """What a global policy puts in place, and how to take it away again.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._regions: list[Region] = []
        self._guards: list[Guard] = []
        self._left_alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._call, self._init = nn.Module.__call__, Optimizer.__init__
        nn.Module.__call__ = _calling(self._call, self.enclose)  # type: ignore[method-assign]
        Optimizer.__init__ = _making(self._init, self.watch)  # type: ignore[method-assign]
        for each in gc.get_objects():
            # Not isinstance, which asks objects that warn of being asked.
            if issubclass(type(each), Optimizer):
                self.watch(each)

    def enclose(self, module: nn.Module) -> None:
        """Makes a module that is called from outside of any region a region."""
        module = module.__dict__.get("_modules", {}).get("_orig_mod", module)
        if _state.entered() or isinstance(module.__dict__.get("forward"), Forward):
            return
        if module in self._left_alone:
            return
        dtypes = {each.dtype for each in module.parameters() if each.requires_grad}
        # Without parameters there is nothing to scale; half ones were someone's own choice.
        if not dtypes or dtypes & HALF or isinstance(module, torch.jit.ScriptModule):
            return
        with _lock:
            region = prepare(module, policy=self.policy)
            region._on_misfit = lambda _: self._leave_alone(module, region)
            self._regions.append(region)
            for each in self._guards:
                self._join(each, region)

    def _leave_alone(self, module: nn.Module, region: Region) -> None:
        self._left_alone.add(module)
        region.remove()

    def watch(self, optimizer: Optimizer) -> None:
        """Makes an optimizer skip steps from gradients that are not finite."""
        with _lock:
            found = guard(optimizer)
            found.kept = True
            self._guards.append(found)
            for region in self._regions:
                self._join(found, region)

    def _join(self, found: Guard, region: Region) -> None:
        module, optimizer = region._module(), found.optimizer()
        if module is None or optimizer is None:
            return
        own = {id(parameter) for parameter in module.parameters()}
        if not own.isdisjoint(map(id, parameters_of(optimizer))):
            found.join(region)

    def remove(self) -> None:
        """Takes everything away again."""
        nn.Module.__call__ = self._call  # type: ignore[method-assign]
        Optimizer.__init__ = self._init  # type: ignore[method-assign]
        for region in self._regions:
            region.remove()
            for each in self._guards:
                each.part(region)
        for each in self._guards:
            each.kept = False
            each.release()


_everywhere: _Everywhere | None = None


def set_global_policy(policy: Policy | str) -> None:
    """Makes every model and every optimizer of the process train by a policy.

    A module with parameters that is called from outside of any other becomes a region, as if it
    had been given to `prepare` with every optimizer that trains a part of it.
    `float32` sets everything back to what it was. In all threads.

    It cannot see a model that runs without being called (a method other than its `forward`: then
    each module inside is a region of its own), parameters that are used by a function rather than
    a module, modules that are called only within a function given to `torch.compile`, and
    optimizers that are not a `torch.optim.Optimizer`. What runs inside `halfstep.torch.autocast`,
    and models that train parameters in half precision, read tensors with gradients that are not
    theirs, or were prepared already, are left alone.

    Args:
        policy: The policy, or its text.

    Example:
        >>> import torch
        >>> set_global_policy("mixed_bfloat16")
        >>> model = torch.nn.Linear(4, 2)
        >>> model(torch.ones(1, 4)).dtype, str(global_policy())
        (torch.float32, 'mixed_bfloat16')
        >>> set_global_policy("float32")
    """
    global _everywhere
    chosen = checked_policy(policy)
    with _lock:
        if _everywhere is not None:
            _everywhere.remove()
        _everywhere = None if chosen == _FLOAT32 else _Everywhere(chosen)


def global_policy() -> Policy:
    """Returns the policy that `set_global_policy` set, `float32` if it did not.

    Example:
        >>> str(global_policy())
        'float32'
    """
    return _FLOAT32 if _everywhere is None else _everywhere.policy


def _calling(call: Callable[..., Any], enclose: Callable[[nn.Module], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def inner(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            enclose(self)
        return call(self, *args, **kwargs)

    return inner


def _making(init: Callable[..., None], watch: Callable[[Optimizer], None]) -> Callable[..., None]:
    @functools.wraps(init)
    def inner(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        watch(self)

    return inner
