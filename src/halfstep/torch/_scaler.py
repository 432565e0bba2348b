"""The drop-in replacement of `torch.amp.GradScaler`."""

import functools
import numbers
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.core import emit, listening
from halfstep.errors import NoCheckError
from halfstep.torch._scaling._checkpoint import read_state, saved_state
from halfstep.torch._scaling._clipping import Clipped, watch
from halfstep.torch._scaling._gradients import ParameterNames, gradients_of
from halfstep.torch._scaling._iteration import State, fresh_state
from halfstep.torch._scaling._modes import PassThrough, Scaling
from halfstep.torch._scaling._one_pass import checked_max_norm
from halfstep.torch._scaling._optimizers import PerOptimizer
from halfstep.torch._scaling._outputs import LossWatch
from halfstep.torch._scaling._records import Facts
from halfstep.torch._scaling._scale_cell import FLOAT32_MAX, ScaleCell
from halfstep.torch._scaling._settings import checked_limit, device_type, loss_scale
from halfstep.torch._scaling._steps import NOT_YET, History, Lazy, StepRecord
from halfstep.torch._scaling._surface import Surface
from halfstep.torch._scaling._widening import narrow_gradients
from halfstep.torch._telling import telling

_WAYS: dict[bool, Scaling | PassThrough] = {True: Scaling(), False: PassThrough()}
_NOT_SAVED = ("_clips", "_losses", "_per_optimizer_states", "_steps")


def _accepts_old_form(init: Callable[..., None]) -> Callable[..., None]:
    """Lets `torch.cuda.amp.GradScaler`'s positions work, where the scale came first."""

    @functools.wraps(init)
    def wrapper(self: "GradScaler", *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], numbers.Real):
            args = (kwargs.pop("device", None), *args)
        init(self, *args, **kwargs)

    return wrapper


class GradScaler(Surface, torch.amp.GradScaler):
    """Scales the loss so that small gradients survive half precision, and skips bad steps.

    Code written for `torch.amp.GradScaler` runs unchanged; it is a subclass on purpose, because
    Lightning and accelerate ask `isinstance`, but no method is inherited. What it does beyond it:

    * `last_step` and `history` tell whether a step was skipped, why, and which parameters held
      inf or NaN. To let a scheduler count real steps only, write
      `if not scaler.last_step.skipped: scheduler.step()`.
    * The scale stays between `min_scale` and `max_scale`. An overflow at the floor raises
      `NonFiniteError`; many skipped steps in a row warn. A loss that is already not finite skips
      the step but leaves the scale alone, because no scale would help.
    * Losses in half precision are scaled in float32, and a scale that the gradient of a float16
      loss could not hold is lowered first.
    * Closures work, by position and by name: each evaluation is unscaled and checked, and a
      non-finite one undoes the whole step.
    * Gradients written to after `unscale_` are checked again, and clipping gradients that are
      still scaled raises an error.
    * Parameters in float16 train through float32 masters: the optimizer sees a master and keeps its
      state in float32, and the parameter receives the rounded result. From `unscale_` to the end
      of the step their `.grad` is float32, so that small gradients, norms and clipping are right.
      A master follows its parameter if anything else changes it, and is in the state dict of the
      optimizer. To resume, call `keep_masters(optimizer)` before `optimizer.load_state_dict`, which
      would round the state.

    Under a policy that `halfstep compare` sets, that policy's loss scale wins.

    Args:
        device: The type of device, by default the current accelerator or else the CPU. The scale
            lives where the first scaled tensor is. A number is taken as `init_scale`, the first
            argument of `torch.cuda.amp.GradScaler`.
        init_scale: The scale to begin with.
        growth_factor: What the scale is multiplied by after `growth_interval` finite steps.
        backoff_factor: What the scale is multiplied by after an overflow.
        growth_interval: How many finite steps in a row it takes to grow.
        enabled: Whether to scale at all; if not, `step` only steps the optimizer.
        min_scale: The floor of the scale.
        max_scale: The cap of the scale.
        hysteresis: From which overflow since the last growth on the scale backs off.
        max_consecutive_skips: After how many skipped steps in a row to raise `NonFiniteError`.
        named_parameters: A module, or pairs of name and parameter, for messages and records;
            unneeded if the optimizer was made from `model.named_parameters()`.

    Example:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([("weight", parameter)], lr=0.1)
        >>> scaler = GradScaler("cpu", init_scale=8.0)
        >>> scaler.scale((parameter * torch.tensor([1.0, torch.inf])).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.last_step.skipped, scaler.last_step.reason, scaler.last_step.nonfinite
        (True, 'the loss was not finite', (('weight', 'inf'),))
    """

    @_accepts_old_form
    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 2.0**-16,
        max_scale: float = FLOAT32_MAX,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
        named_parameters: nn.Module | Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        self._device = device_type(device)
        rule, scaled = loss_scale(
            self._device,
            enabled,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis=hysteresis,
        )
        self._cell = ScaleCell(rule)
        self._way = _WAYS[scaled]
        self._names = ParameterNames(named_parameters)
        self._history = History(checked_limit(max_consecutive_skips))
        self._last_step = StepRecord(skipped=True, reason=NOT_YET)
        self._resumed = False
        self._start()

    def _start(self) -> None:
        """Sets what is not kept in a pickle."""
        self._steps: PerOptimizer[StepRecord] = PerOptimizer()
        self._unseen_updates = 0
        self._losses = LossWatch()
        self._clips: deque[Clipped] = deque(maxlen=16)
        self._begin_iteration()
        if self._way.enabled:
            watch(self)

    def _begin_iteration(self) -> None:
        for state in getattr(self, "_per_optimizer_states", {}).values():
            narrow_gradients(state["widened"])
        self._per_optimizer_states: dict[int, State] = defaultdict(fresh_state)
        self._losses = self._losses.renewed()
        self._clips.clear()
        self._clip_watch = False
        self._clipped_finite: tuple[list[int], list[int]] | None = None
        self._scale_calls = 0
        self._norm: Lazy[float | None] = None

    def scale(self, outputs: Any) -> Any:
        """Returns a tensor, or any nesting of tensors, multiplied by the scale.

        Args:
            outputs: The loss, or a list, tuple or other iterable of losses or outputs.
        """
        return self._way.scale(self, outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides an optimizer's gradients by the scale, so that they can be clipped or looked at.

        Args:
            optimizer: Whose gradients; once per iteration, after the last backward.
        """
        self._way.unscale_(self, optimizer)

    def step(
        self, optimizer: Optimizer, *args: Any, max_norm: float | None = None, **kwargs: Any
    ) -> Any:
        """Unscales the gradients if need be, and steps the optimizer if all of them are finite.

        Args:
            optimizer: The optimizer to step.
            args: Handed on to `optimizer.step`; a closure is welcome.
            max_norm: Clips the true-valued gradients to this norm, with no pass of its own.
            kwargs: Handed on as well.

        Returns:
            What `optimizer.step` returned, or None for a skipped step.
        """
        limit = None if max_norm is None else checked_max_norm(max_norm, "GradScaler.step()")
        with telling():
            return self._way.step(self, optimizer, args, kwargs, limit)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale on; belongs once at the end of an iteration, after every step.

        Args:
            new_scale: Sets the scale to this instead.
        """
        self._way.update(self, new_scale)

    @property
    def last_step(self) -> StepRecord:
        """What the latest `step` did."""
        return self._last_step

    def last_step_of(self, optimizer: Optimizer) -> StepRecord:
        """Returns what the latest `step` of one optimizer did."""
        return self._steps.get(optimizer) or StepRecord(skipped=True, reason=NOT_YET)

    @property
    def history(self) -> History:
        """How many steps were taken and skipped, and how the scale changed and why."""
        return self._history

    def get_scale(self) -> float:
        """Returns the scale as a number, 1.0 if scaling is disabled; waits for an accelerator."""
        self._clip_watch = False
        return self._cell.read().scale

    @property
    def _enabled(self) -> bool:
        return self._way.enabled

    @_enabled.setter
    def _enabled(self, enabled: bool) -> None:
        self._way = _WAYS[bool(enabled)]

    def is_enabled(self) -> bool:
        """Returns whether anything is scaled."""
        return self._way.enabled

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, in the form of PyTorch; empty if disabled."""
        return saved_state(self._cell.rule, self._cell.read()) if self._way.enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned, also PyTorch's, before or after the first use.

        Args:
            state_dict: The state of an enabled scaler.
        """
        if not self._way.enabled:
            return
        rule, state = read_state(state_dict, self._cell.rule)
        scale = min(max(state.scale, rule.min_scale), rule.max_scale)
        self._history.changed(self._cell.read().scale, state.scale, "load_state_dict()")
        self._history.changed(state.scale, scale, "load_state_dict(), then min_scale or max_scale")
        self._cell.rule, self._resumed = rule, True
        self._cell.put(state._replace(scale=scale))
        self._cell.initial = self._cell.read()

    def __repr__(self) -> str:
        if not self._way.enabled:
            return "GradScaler(enabled=False)"
        rule, state = self._cell.rule, self._cell.known()
        scale = "on the device" if state is None else f"{state.scale:g}"
        return f"GradScaler(scale={scale}, rule={rule})"

    def _start_if_resumed(self, optimizer: Optimizer) -> None:
        """Lets a scaler with a loaded state begin with any call; there is no loss to wait for."""
        if self._resumed and self._cell.scale is None:
            for gradient in gradients_of(optimizer)[:1]:
                self._cell.start(gradient.device)

    def _facts(self) -> Facts:
        return Facts(self._names, self._scale_now(), self._losses.lazily(), norm=self._norm)

    def _scale_now(self) -> Lazy[float]:
        known = self._cell.known_scale()
        if known is not None:
            return known
        scale, _ = self._check_scale_growth_tracker("step")
        return scale.detach().clone().item

    def _record(self, optimizer: Optimizer, record: StepRecord) -> None:
        self._last_step = self._steps[optimizer] = record
        if listening():
            emit("step", record=record)
        self._history.add(optimizer, record)

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise NoCheckError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at "
                "the end after scaler.update(). Pickle or copy it there."
            )
        resumed = self._resumed or self._cell.scale is not None
        kept = {key: value for key, value in self.__dict__.items() if key not in _NOT_SAVED}
        return {**kept, "_resumed": resumed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()
