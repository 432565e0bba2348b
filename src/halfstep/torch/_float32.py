"""The state dict of a model with the exact float32 values of its parameters."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from halfstep.errors import UsageError
from halfstep.torch._dtypes import HALF, name_of
from halfstep.torch._masters._kept import true_value, without_masters


def float32_state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns the state dict of a model with the exact float32 values of its parameters.

    Args:
        model: A model, with masters or not. Tensors in half precision come as new ones in float32;
            the others share memory with the model, as in its own state dict.

    Raises:
        UsageError: It is not a module.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False).bfloat16()
        >>> float32_state_dict(model)["weight"].dtype
        torch.float32
    """
    _refuse_other("float32_state_dict", model)
    state: dict[str, Any] = model.state_dict()
    # By where they lie: hooks may change the names.
    own = {_place(each): each for each in model.parameters()}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dtype in HALF:
            state[name] = true_value(own.get(_place(value), value))
    return state


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride()


def load_float32_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
) -> Any:
    """Loads a float32 state dict into a model, every bit of it, or not at all.

    `model.load_state_dict` does the same where parameters have masters, and rounds where a model is
    in half precision without any.

    Args:
        model: A model whose trained parameters are in float32, or have masters.
        state_dict: What `float32_state_dict` returned, or the state dict of a float32 model.
        strict: Whether the names must be those of the model.

    Returns:
        What `model.load_state_dict` returns.

    Raises:
        UsageError: It is not a module, or has trained parameters that would be rounded.

    Example:
        >>> import torch
        >>> from halfstep.torch import keep_masters
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> masters = keep_masters(torch.optim.SGD(model.parameters()), param_dtype="bfloat16")
        >>> load_float32_state_dict(model, {"weight": torch.tensor([[1.0 + 2.0**-20]])})
        <All keys matched successfully>
        >>> float32_state_dict(model)["weight"].item() == 1.0 + 2.0**-20
        True
    """
    _refuse_other("load_float32_state_dict", model)
    _refuse_rounding(model)
    return model.load_state_dict(state_dict, strict=strict)


def _refuse_other(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{function} needs a torch.nn.Module, got {type(model).__name__}. Pass the model first."
        )


def _refuse_rounding(model: nn.Module) -> None:
    for name, parameter in without_masters(model):
        raise UsageError(
            f"load_float32_state_dict needs masters, got {name} in {name_of(parameter.dtype)} "
            "without one, which would be rounded. Call prepare or keep_masters before, or "
            "model.load_state_dict to round."
        )
