"""The region in which operations run in the precision that the rules choose."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import torch

from halfstep.core import Plan, Policy, Rules, is_auto, overriding_policy
from halfstep.errors import RuleError, UsageError
from halfstep.torch._auto import asked_policy, settled
from halfstep.torch._devices import check_device, default_device
from halfstep.torch._dtypes import checked, compute_dtype
from halfstep.torch._engine import _state
from halfstep.torch._engine._observe import Observer
from halfstep.torch._engine._ops import overloads
from halfstep.torch._explain import Explanation
from halfstep.torch._private import autocast_devices, never_compile
from halfstep.torch._tracing import constant, ready

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Settings(NamedTuple):
    """What a region enters with: constants, so that a compiled graph can hold them."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cached: bool
    rules: str


class autocast:
    """A region in which each operation runs in the precision that the rules choose.

    Replaces `torch.autocast` (and accepts the call forms of `torch.cuda.amp.autocast`). It differs
    where that one is wrong: the rules can be edited, mean the same on every device and do not
    change with an upgrade; an instance can be entered again while it is entered; the copies of
    weights follow an optimizer step inside the region; a compiled backward runs outside of it.

    Args:
        device_type: Such as "cuda" or "cpu". Default: the accelerator in use, else the CPU.
        dtype: The low dtype, `torch.float16` or `torch.bfloat16`; `torch.float32` is the same as
            `enabled=False`. Default: PyTorch's for the device (CPU bfloat16, CUDA float16).
        enabled: Whether operations are cast; `False` makes an island inside another region.
        cache_enabled: Whether matrix products, convolutions and recurrent cells remember the low
            copies of weights until the region ends. Worth it where a region uses a weight many
            times, such as a loop over time steps. In-place changes are noticed, writes through
            `.data` are not. Default: no; each use makes its copy, in PyTorch's own kernels.
        rules: A rule set or its text, such as "torch-2.13" or "halfstep-1 + softmax=full". Default:
            those of the region around, else "halfstep-1".
        policy: A policy or its text, instead of `dtype` and `rules`. `auto` is what the device is
            fast in, measured when the region is first entered.

    Raises:
        UsageError: The device type is unknown or not there, or arguments contradict each other.
        PolicyError: The dtype or the policy is not one that operations can run in.
        RuleError: The rules name an operation that does not exist.

    Example:
        >>> import torch
        >>> layer, inputs = torch.nn.Linear(4, 2), torch.ones(1, 4)
        >>> with autocast("cpu", dtype=torch.bfloat16):
        ...     layer(inputs).dtype
        torch.bfloat16
        >>> with autocast("cpu", rules="halfstep-1 + matmul=full"):
        ...     layer(inputs).dtype
        torch.float32
    """

    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        rules: Rules | str | None = None,
        policy: Policy | Plan | str | None = None,
    ) -> None:
        if isinstance(device_type, bool):  # torch.cuda.amp.autocast(enabled, dtype, cache_enabled)
            device_type, enabled, cache_enabled = None, device_type, enabled
        self._given = device_type, dtype, enabled, cache_enabled, rules, policy
        # What `auto` is may depend on what the script is still to choose, such as the devices.
        is_open = is_auto(policy) or is_auto(overriding_policy())
        self._found = None if is_open else _settings(*self._given)

    @property
    def _settings(self) -> Settings:
        if self._found is None:
            self._found = _settings(*self._given)
        return self._found

    @property
    def device(self) -> str:
        """The type of device that the region is for."""
        return self._settings.device_type

    @property
    def fast_dtype(self) -> torch.dtype:
        """The low dtype; named as in `torch.autocast`."""
        return self._settings.dtype

    @property
    def rules(self) -> Rules:
        """The rules of the region; without any of its own, those it would have here."""
        settings = self._settings
        return Rules.parse(settings.rules or _state.rules_in_force(settings.device_type))

    @property
    def enabled(self) -> bool:
        """Whether operations are cast."""
        return self._settings.enabled

    def __enter__(self) -> Self:
        _refuse_export()
        _enter(self._settings)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _state.leave()

    def __call__(self, function: _Function) -> _Function:
        """Decorates a function, whose body then runs inside the region."""
        if not callable(function) or _is_suspended(function):
            raise UsageError(
                f"autocast(...) decorates a function that runs in one go, got {function!r}. "
                "Write `with autocast(...):` around the part that computes."
            )

        settings = self._settings

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with Inside(settings):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    @contextlib.contextmanager
    def explain(self) -> Iterator[Explanation]:
        """Enters the region and records every operation that runs in it; slow, for looking.

        Yields:
            The record, which can be printed; it is complete when the region ends.

        Example:
            >>> import torch
            >>> layer, inputs = torch.nn.Linear(4, 2), torch.ones(1, 4)
            >>> with autocast("cpu", dtype=torch.bfloat16).explain() as explanation:
            ...     _ = layer(inputs).softmax(-1)
            >>> [(row.operation, row.action) for row in explanation.rows]
            [('aten::linear', 'lower'), ('aten::softmax', 'keep')]
        """
        explanation = Explanation()
        observer = Observer(explanation, _state.below_autocast)
        with _state.observed(observer), self, observer:
            yield explanation

    def __repr__(self) -> str:
        device_type, dtype, enabled, *_ = self._settings
        rules = str(self.rules)
        return f"autocast({device_type!r}, dtype={dtype}, enabled={enabled}, rules={rules!r})"


# Run for real by a tracer, which answers the question itself, and not in every version right.
@constant
def _refuse_export() -> None:
    if torch.compiler.is_exporting():
        raise UsageError(
            "autocast inside of a model that is exported would be lost, since an exported program "
            "holds no rules. Export it without, and run the program inside autocast."
        )


def _is_suspended(function: Any) -> bool:
    """Whether calling it only makes something that runs later, outside of the region."""
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    call = getattr(function, "__call__", None)  # noqa: B004 - the method of an object that is called
    return any(is_kind(candidate) for is_kind in kinds for candidate in (function, call))


def _enter(region: Settings) -> None:
    ready()
    # One by one: a tracer can read the fields of a constant, but not in every version unpack it.
    rules = region.rules or _state.rules_in_force(region.device_type)
    _state.enter(region.device_type, region.dtype, region.enabled, region.cached, rules)


class Inside:
    """A region made where it is entered, which is what a compiled function can hold."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __enter__(self) -> None:
        _enter(self._settings)

    def __exit__(self, *error: object) -> None:
        _state.leave()


def settings_of(policy: Policy, device_type: str) -> Settings:
    """Returns what a region by a policy enters with."""
    low = compute_dtype(policy.compute_dtype)
    _check(policy.rules)
    device = check_device(device_type, enabled=True)
    return Settings(device, low, low is not torch.float32, False, str(policy.rules))


def settings_by_device(policy: Policy) -> Callable[[str], Settings]:
    """Returns what a region by a policy enters with, made once for each type of device."""
    known: dict[str, Settings] = {}

    # A function of a constant, which every tracer can run.
    @constant
    def settings(device_type: str) -> Settings:
        if device_type not in known:
            known[device_type] = settings_of(policy, device_type)
        return known[device_type]

    return settings


@constant
def _settings(
    device_type: str | None,
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
    rules: Rules | str | None,
    policy: Policy | Plan | str | None,
) -> Settings:
    if policy is not None and (dtype is not None or rules is not None):
        raise UsageError(
            f"autocast needs either policy= or dtype= and rules=, got policy={policy!r}, "
            f"dtype={dtype}, rules={rules!r}. Write the dtype and the rules into the policy."
        )
    device = check_device(default_device() if device_type is None else device_type, enabled=enabled)
    followed = overriding_policy() or (None if policy is None else asked_policy(policy))
    if followed is not None:
        chosen = settled(followed, device)
        low = compute_dtype(chosen.compute_dtype)
        asked: Rules | None = chosen.rules
    else:
        low = checked(torch.get_autocast_dtype(device) if dtype is None else dtype)
        asked = None if rules is None else Rules.of(rules)
    if asked is not None:
        _check(asked)
    enabled = bool(enabled) and low is not torch.float32
    return Settings(device, low, enabled, enabled and bool(cache_enabled), str(asked or ""))


@functools.lru_cache(maxsize=256)
def _check(rules: Rules) -> None:
    """Raises where a rule names an operation that does not exist, before anything runs."""
    for edit in rules.edits:
        if "::" in edit.target:
            overloads(edit.target)
        if edit.device and edit.device not in autocast_devices():
            raise RuleError(
                f"A rule needs device= one of {', '.join(autocast_devices())}, got {edit.device!r}."
            )


# These run around what is compiled, or are traced into it; as frames of their own they are noise.
for _function in (
    autocast.__init__,
    autocast.__enter__,
    autocast.__exit__,
    Inside.__enter__,
    Inside.__exit__,
):
    never_compile(_function)
