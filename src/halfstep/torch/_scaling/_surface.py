"""The names of PyTorch's scaler, public and private, through which others reach its insides."""

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import NoCheckError
from halfstep.torch._scaling._clipping import Clipped, refuse_clipped
from halfstep.torch._scaling._gradients import (
    Found,
    ParameterNames,
    by_kind,
    fingerprint,
    gradients_of,
    unscale,
)
from halfstep.torch._scaling._iteration import State, is_bad
from halfstep.torch._scaling._master import step_optimizer
from halfstep.torch._scaling._scale_cell import ScaleCell
from halfstep.torch._scaling._settings import changed_rule
from halfstep.torch._scaling._widening import widen_gradients


def _of_rule(name: str) -> property:
    def get(self: "Surface") -> Any:
        return getattr(self._cell.rule, name)

    def put(self: "Surface", value: Any) -> None:
        self._cell.rule = changed_rule(self._cell.rule, **{name: value})

    return property(get, put)


class Surface:
    """What users set one by one, and what other libraries and PyTorch's tests read or replace."""

    _cell: ScaleCell
    _clip_watch: bool
    _clips: deque[Clipped]
    _names: ParameterNames
    _per_optimizer_states: dict[int, State]

    _growth_factor = _of_rule("growth_factor")
    _backoff_factor = _of_rule("backoff_factor")
    _growth_interval = _of_rule("growth_interval")

    def get_growth_factor(self) -> float:
        """Returns what the scale is multiplied by when it grows."""
        return self._cell.rule.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets what the scale is multiplied by when it grows."""
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """Returns what the scale is multiplied by after an overflow."""
        return self._cell.rule.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets what the scale is multiplied by after an overflow."""
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """Returns how many finite steps in a row it takes to grow."""
        return self._cell.rule.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets how many finite steps in a row it takes to grow."""
        self._growth_interval = new_interval

    @property
    def _scale(self) -> Tensor | None:
        return self._cell.scale

    @_scale.setter
    def _scale(self, scale: Tensor | None) -> None:
        self._cell.scale = scale

    @property
    def _growth_tracker(self) -> Tensor | None:
        return self._cell.tracker

    @_growth_tracker.setter
    def _growth_tracker(self, tracker: Tensor | None) -> None:
        self._cell.tracker = tracker

    @property
    def _init_scale(self) -> float:
        return self._cell.initial.scale

    @_init_scale.setter
    def _init_scale(self, scale: float) -> None:
        self._cell.initial = self._cell.initial._replace(scale=scale)

    @property
    def _init_growth_tracker(self) -> int:
        return self._cell.initial.finite_steps

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, steps: int) -> None:
        self._cell.initial = self._cell.initial._replace(finite_steps=steps)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        scale, tracker = self._cell.scale, self._cell.tracker
        if scale is None or tracker is None:
            name = "_scale" if scale is None else "_growth_tracker"
            raise NoCheckError(
                f"Attempted {funcname} but {name} is None. This may indicate your script did not "
                "use scaler.scale(loss or outputs) earlier in the iteration. Call "
                "scaler.scale(loss).backward() first."
            )
        return scale, tracker

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._cell.tracker is not None:
            raise NoCheckError(
                "_growth_tracker initialized before _scale. Leave both to scaler.scale()."
            )
        self._cell.start(dev)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> Found:
        gradients, state = gradients_of(optimizer), self._per_optimizer_states[id(optimizer)]
        if self._clips:
            refuse_clipped(self._clips, gradients)
        kinds = by_kind(gradients)
        if not allow_fp16 and any(dtype is torch.float16 for _, dtype, _ in kinds):
            state["widened"] += widen_gradients(optimizer, self._names)
            gradients = gradients_of(optimizer)
            kinds = by_kind(gradients)
        enlarges = inv_scale.item() > 1.0 if inv_scale.is_cpu else self._cell.may_be_below_one()
        found = unscale(kinds, inv_scale, found_inf, again=enlarges)
        if not state["in_step"]:
            state["seen"] = fingerprint(gradients)
        return found

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        one = torch.ones((), dtype=torch.float32, device=scale.device)
        found = self._unscale_grads_(optimizer, one, torch.zeros_like(one), True)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        found: Found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return found

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: State, *args: Any, **kwargs: Any
    ) -> Any:
        if is_bad(optimizer_state):
            return None
        return step_optimizer(optimizer, args, kwargs)

    def _get_scale_async(self) -> Tensor | None:
        self._clip_watch = False
        return self._cell.scale

    def _get_growth_tracker(self) -> int:
        return self._cell.read().finite_steps
