"""One policy for every model and optimizer of the process."""

import contextlib
import functools
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.core import Auto, Plan, Policy, emit, listening, quiet
from halfstep.errors import UsageError
from halfstep.torch._auto import device_in_use, settled
from halfstep.torch._dtypes import HALF
from halfstep.torch._engine import _state
from halfstep.torch._patches import after, before, replace
from halfstep.torch._prepare import prepare
from halfstep.torch._private import in_backward
from halfstep.torch._region import Region
from halfstep.torch._regions._attach import checked_masters, followed, runnable, uncompiled
from halfstep.torch._regions._forward import device_of, forward_of, is_exporting
from halfstep.torch._regions._guard import Guard, guard

_FLOAT32 = Policy.named("float32")
_lock = threading.RLock()


class _Local(threading.local):
    is_suspended = False


_local = _Local()


class _Everywhere:
    """What a global policy puts in place, and how to take it away again.

    It keeps nothing alive: a region is held by its module, a guard by its optimizer.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: Policy | Auto) -> None:
        self.policy = policy
        self._regions: weakref.WeakSet[Region] = weakref.WeakSet()
        self._copies = 0
        # How many regions were told of, by their policies.
        self.made: Counter[str] = Counter()
        # What each guard has seen of copies and of its optimizer's parameters.
        self._seen: weakref.WeakKeyDictionary[Guard, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._left_alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._undo = [
            replace(nn.Module, "__call__", before(self.enclose)),
            replace(Optimizer, "__init__", after(self.watch)),
            # How a copy is made, and what was pickled.
            replace(Optimizer, "__setstate__", after(self.watch)),
        ]
        for each in gc.get_objects():
            # Not isinstance, which asks objects that warn of being asked.
            if issubclass(type(each), Optimizer):
                self.watch(each)

    def enclose(self, module: nn.Module) -> None:
        """Makes a module that is called from outside of any region a region."""
        # Within a backward pass it is a checkpoint that computes its part again, as it was.
        if _state.entered() or in_backward() or _local.is_suspended or is_exporting():
            return
        kind: Any = type(module)
        if isinstance(module, torch.jit.ScriptModule) or _is_of_keras(kind):
            return
        module = uncompiled(module)
        if forward_of(module) or module in self._left_alone or not is_fit(module):
            return
        if not isinstance(self.policy, Policy) and policy_for(module) == _FLOAT32:
            self._left_alone.add(module)
            return
        with _lock:
            if forward_of(module):  # made so by another thread meanwhile
                return
            region = self._prepared(module)
            self._adopt(region)
            for each in list(self._seen):
                self._join(each, region)

    def _prepared(self, module: nn.Module) -> Region:
        with quiet("region"):
            region = prepare(module, policy=self.policy)
        text = str(region.policy)  # of `auto`, what it stands for there
        self.made[text] += 1
        if listening():
            emit("region", policy=text, automatic=True)
        return region

    def _adopt(self, region: Region) -> None:
        region._on_misfit = functools.partial(self._leave_alone, weakref.ref(region))
        region._on_copy = self._adopt_copy
        region._automatic = True
        self._regions.add(region)

    def _adopt_copy(self, region: Region) -> None:
        # Which parameters it has, and who trains them, is not known before all is copied.
        with _lock:
            self._copies += 1
            self._adopt(region)

    def _leave_alone(self, ref: Callable[[], Region | None], _error: UsageError) -> None:
        region = ref()
        module = None if region is None else region._module()
        if region is not None and module is not None:
            self._left_alone.add(module)
            region.remove()

    def watch(self, optimizer: Optimizer) -> None:
        """Makes an optimizer skip steps from gradients that are not finite."""
        with _lock:
            found = guard(optimizer)
            found.keeper = self.look
            # Where `auto` is float32, a training is as it would be without.
            found.is_strict = isinstance(self.policy, Policy)
            self.look(found, optimizer)

    def look(self, found: Guard, optimizer: Optimizer) -> None:
        """Lets a guard join the regions whose parameters its optimizer trains, if any are new."""
        # One whose `__init__` failed has none.
        groups = getattr(optimizer, "param_groups", ())
        seen = self._copies, sum(len(group["params"]) for group in groups)
        if self._seen.get(found) == seen:
            return
        with _lock:
            self._seen[found] = seen
            for region in list(self._regions):
                self._join(found, region)

    def _join(self, found: Guard, region: Region) -> None:
        module, optimizer = region._module(), found.optimizer()
        if module is None or optimizer is None or region in found.regions:
            return
        own = {id(parameter) for parameter in module.parameters()}
        groups = getattr(optimizer, "param_groups", ())
        if any(id(each) in own for group in groups for each in group["params"]):
            found.join(region)

    def remove(self) -> None:
        """Takes everything away again."""
        regions = self.end()
        for each in list(self._seen):
            self.free(each, regions)

    def end(self) -> list[Region]:
        """Takes everything away but the guards, and returns the regions that there were."""
        for undo in self._undo:
            undo()
        regions = list(self._regions)
        for region in regions:
            region.remove()
        return regions

    def free(self, found: Guard, regions: list[Region]) -> None:
        """Takes a guard away, if nobody else needs it."""
        found.keeper = None
        for region in regions:
            found.part(region)
        found.release()


def is_fit(module: nn.Module) -> bool:
    """Returns whether there is anything to cast; half precision was someone's own choice."""
    dtypes = {(each.dtype, each.requires_grad) for each in module.parameters()}
    wide = any(dtype is torch.float32 for dtype, _ in dtypes)
    return wide and not any(trained and dtype in HALF for dtype, trained in dtypes)


@functools.cache
def _is_of_keras(kind: Any) -> bool:
    """Returns whether a class of modules is one of Keras' layers, which follow its own policy."""
    return any(each.__module__.startswith("keras.") for each in kind.__mro__)


_everywhere: _Everywhere | None = None


def set_global_policy(policy: Policy | Plan | str) -> None:
    """Makes every model and every optimizer of the process train by a policy.

    A module with parameters that is called from outside of any other becomes a region, as if it
    had been given to `prepare` with every optimizer that trains a part of it. Every optimizer skips
    steps from gradients that are not finite, also one that trains no region; if it does so on and
    on, a SkippedStepsWarning says so. Copies of models and optimizers follow the policy, too.
    `float32` sets everything back to what it was. In all threads. Nothing is kept alive.

    It cannot see a model that runs without being called (a method other than its `forward`: then
    each module inside is a region of its own), parameters that are used by a function rather than
    a module, modules that are called only within a function given to `torch.compile`, and
    optimizers that are not a `torch.optim.Optimizer`. What runs inside `halfstep.torch.autocast`,
    and models that train parameters in half precision, read tensors with gradients that are not
    theirs, or were prepared already, are left alone, though not their optimizers.

    An optimizer also skips a step if a gradient overflowed and was made finite since its
    `zero_grad` was called; `model.zero_grad()` is not seen.

    Args:
        policy: The policy, or its text; or a plan, or the path of its file. `auto` is what the
            device of each model is fast in, measured when the first one is called there.

    Example:
        >>> import torch
        >>> set_global_policy("mixed_bfloat16")
        >>> model = torch.nn.Linear(4, 2)
        >>> model(torch.ones(1, 4)).dtype, str(global_policy())
        (torch.float32, 'mixed_bfloat16')
        >>> set_global_policy("float32")
    """
    chosen = checked_everywhere(policy)
    put_in_force(chosen)
    if listening():
        emit("policy", policy=str(chosen))


def checked_everywhere(policy: Policy | Plan | str) -> Policy | Auto:
    """Returns the policy that counts where somebody asks for one, if every model can follow it."""
    chosen = followed(policy)
    if isinstance(chosen, Policy):
        checked_masters("cast", runnable(chosen), None, None)
    return chosen


def put_in_force(policy: Policy | Auto) -> "_Everywhere | None":
    """Lets a policy take the place of the one in force, and returns it, None for float32."""
    global _everywhere
    with _lock:
        if _everywhere is not None:
            _everywhere.remove()
        _everywhere = None if policy == _FLOAT32 else _Everywhere(policy)
        return _everywhere


def take_out_of_force(everywhere: "_Everywhere") -> bool:
    """Lets no policy be in force, the guards stay; returns whether it was this one until now."""
    global _everywhere
    with _lock:
        was_in_force = _everywhere is everywhere
        _everywhere = None if was_in_force else _everywhere
        return was_in_force


def global_policy() -> Policy:
    """Returns the policy that `set_global_policy` set, `float32` if it did not.

    Of `auto`, what it stands for on the device in use.

    Example:
        >>> str(global_policy())
        'float32'
    """
    return settled(_in_force(), device_in_use())


def policy_for(module: nn.Module) -> Policy:
    """Returns the policy by which a module is made a region when it is called."""
    found = _in_force()
    return found if isinstance(found, Policy) else settled(found, device_of(module), module)


def _in_force() -> Policy | Auto:
    return _FLOAT32 if _everywhere is None or _local.is_suspended else _everywhere.policy


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Lets models run in this thread as they are, without the policy, until the block ends.

    A model that is no region although it was called was left alone, and is to be so again.

    Example:
        >>> set_global_policy("mixed_bfloat16")
        >>> with suspended():
        ...     print(global_policy())
        float32
        >>> set_global_policy("float32")
    """
    was_suspended, _local.is_suspended = _local.is_suspended, True
    try:
        yield
    finally:
        _local.is_suspended = was_suspended
