"""Optimizers by name, and the state that they keep."""

import ast
import functools
import inspect
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import MissingExtraError, UsageError
from halfstep.torch._masters._convert import splittable
from halfstep.torch._memory import MakeOptimizer, trained_by
from halfstep.torch._scaling._closure import needs_closure
from halfstep.torch._storages import StorageCounter
from halfstep.torch._telling import telling

# Two shapes of a real parameter: what their states differ by is what the values cost.
_PROBES = ((64, 64), (64, 128))


def maker(text: str) -> MakeOptimizer:
    """Returns what makes an optimizer of torch.optim.

    Args:
        text: Its name, and its options after commas.

    Example:
        >>> make = maker("SGD, momentum=0.9")
        >>> make(list(nn.Linear(2, 2).parameters())).defaults["momentum"]
        0.9
    """
    name, options = _parsed(text)
    kind: Any = getattr(torch.optim, name, None)
    if not _is_optimizer(kind):
        names = ", ".join(each for each in dir(torch.optim) if _is_optimizer_name(each))
        raise UsageError(
            f"--optimizer needs the name of an optimizer of torch.optim, got {name!r}. "
            f"Write one of {names}."
        )
    if needs_closure(kind):
        raise UsageError(
            f"--optimizer needs one whose step can do without a closure, got {name!r}. Name a "
            "script that trains with it: halfstep memory train.py"
        )
    return functools.partial(kind, **options)


def eight_bit_maker(text: str, name: str) -> MakeOptimizer:
    """Returns what makes the same optimizer with states in 8 bits.

    Args:
        text: The optimizer with states in float32, and its options.
        name: What torchao calls the other one.
    """
    try:
        kind = getattr(import_module("torchao.optim"), name)
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            f"8-bit states need torchao.optim.{name}, got: {error}. "
            "Install it: python -m pip install 'halfstep[torchao]'."
        ) from error
    return functools.partial(kind, **_parsed(text)[1])


def optimizer_name(text: str) -> str:
    """Returns the name without the options."""
    return _parsed(text)[0]


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    try:
        call: Any = ast.parse(f"f({text})", mode="eval").body
        (name,) = call.args
        return name.id, {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AttributeError) as error:
        raise UsageError(
            f"--optimizer needs a name and options such as 'SGD, momentum=0.9', got {text!r}. "
            "Write the name first, and a number or a word in quotes for each option."
        ) from error


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer


def _is_optimizer_name(name: str) -> bool:
    kind = getattr(torch.optim, name)
    return _is_optimizer(kind) and not needs_closure(kind)


def _accepted(kind: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns the defaults that are options: a class may add others for the one it derives from."""
    options = inspect.signature(kind).parameters
    return {name: value for name, value in defaults.items() if name in options}


@dataclass(frozen=True)
class State:
    """Bytes that an optimizer keeps for its parameters.

    Args:
        per_value: For each value, None where it could not be found out.
        per_tensor: For each parameter, however large.
        reason: Why it could not be found out.
    """

    per_value: float | None = None
    per_tensor: float = 0.0
    reason: str = ""


def describe(optimizers: Iterable[Optimizer], modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Returns what optimizers train and the state that others like them keep.

    Args:
        optimizers: The optimizers.
        modules: Where the parameters are; those of no module cannot have a master.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> (found,) = describe([torch.optim.AdamW(model.parameters())], model.modules())
        >>> found["sizes"], found["unsplit"], found["per_value"]
        ([4, 1], 0, 8.0)
    """
    seen, found = set[int](), list[dict[str, Any]]()
    # One by one: what a compiler makes of a module may hold its parameters in another way.
    split = {id(each) for module in modules for each in splittable([module])}
    for optimizer in optimizers:
        trained = [each for each in trained_by(optimizer) if id(each) not in seen]
        seen |= {id(each) for each in trained}
        options = _accepted(type(optimizer), optimizer.defaults)
        found.append(
            {
                "optimizer": type(optimizer).__name__,
                "sizes": [each.numel() for each in trained],
                "unsplit": sum(each.numel() for each in trained if id(each) not in split),
                "dtypes": sorted({str(each.dtype).removeprefix("torch.") for each in trained}),
                **asdict(state_of(type(optimizer), options, _device(trained))),
            }
        )
    return found


def _device(tensors: list[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


def state_of(kind: Any, options: dict[str, Any], device: torch.device | str = "cpu") -> State:
    """Returns what an optimizer keeps, from one step with a small parameter.

    Args:
        kind: Its class.
        options: Its options.
        device: Where the parameter is, which some options ask for.

    Example:
        >>> state_of(torch.optim.SGD, {"momentum": 0.9})
        State(per_value=4.0, per_tensor=0.0, reason='')
    """
    if needs_closure(kind):
        return State(reason=f"{kind.__name__} needs a closure to step, which only the script has")
    try:
        small, large = (_probed(kind, options, shape, device) for shape in _PROBES)
    except Exception as error:  # of a class that may be anybody's
        text = str(error).partition("\n")[0]
        return State(reason=f"a step of {kind.__name__} with one small parameter failed: {text}")
    first, second = (rows * columns for rows, columns in _PROBES)
    per_value = (large - small) / (second - first)
    return State(per_value, small - per_value * first)


def _probed(kind: Any, options: dict[str, Any], shape: tuple[int, ...], device: Any) -> int:
    parameter = nn.Parameter(torch.zeros(shape, device=device))
    optimizer = kind([parameter], **options)
    parameter.grad = torch.ones_like(parameter)
    with telling():  # so that nobody takes this step for one of the script
        optimizer.step()
    return StorageCounter().count(optimizer.state)
