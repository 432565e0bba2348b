"""What to write in place of arguments that an `autocast` has elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from halfstep.core._text import suggestion
from halfstep.errors import UsageError

_KNOWN = ("policy", "scale")
_DEVICES = ("cuda", "cpu", "gpu", "tpu", "rocm", "mps", "xpu")
_POLICIES = {"float16": "mixed_float16", "float32": "float32"}


def refuse(more: Sequence[Any], others: dict[str, Any]) -> NoReturn:
    """Says what to write in place of arguments that do not exist.

    Args:
        more: Those by position, after the policy.
        others: Those by name.

    Raises:
        UsageError: Always.
    """
    if others:
        name, value = next(iter(others.items()))
        given, instead = f"{name}={shown(value)}", _INSTEAD.get(name, _unknown(name))(value)
    else:
        given, instead = f"{shown(more[0])} after the policy", _as_scale(more[0])
    raise UsageError(
        f"autocast needs a function, a policy and perhaps scale=, got {given}. {instead}"
    )


def shown(value: Any) -> str:
    """Returns a value in few words.

    Example:
        >>> shown(2.0), shown(np.float16), shown({"many": "words"})
        ('2.0', 'float16', 'a dict')
    """
    if isinstance(value, str | bool | int | float | None):
        return repr(value)
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of shape {value.shape}"
    return _dtype(value) or f"a {type(value).__name__}"


def is_device(word: Any) -> bool:
    """Returns whether it is the name of a device, which others have in place of a function."""
    return isinstance(word, str) and word.partition(":")[0] in _DEVICES


def _dtype(value: Any) -> str:
    """Returns the name of a real dtype of NumPy, JAX or PyTorch, empty for anything else."""
    if not isinstance(value, type | np.dtype):
        return str(value).removeprefix("torch.") if str(value).startswith("torch.") else ""
    try:
        name = np.dtype(value).name
    except TypeError:
        return ""
    return name if "float" in name else ""


def _policy_in(value: Any) -> str:
    name = _dtype(value) or str(value)
    policy = _POLICIES.get(name, "mixed_bfloat16")
    return f"Write the policy that computes in it: autocast(function, {policy!r})."


def _as_policy(value: Any) -> str:
    return f"Write policy={value if isinstance(value, str) else 'mixed_float16'!r}."


def _as_scale(value: Any) -> str:
    if isinstance(value, str):
        return f"Write policy='mixed_float16, scale={value}'."
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"Write scale={value if number else 'state'}, by name; all else is part of the policy."


def _enabled(value: Any) -> str:
    return f"Write policy='mixed_bfloat16' if {shown(value)} else 'float32'."


def _in_policy(key: str) -> Callable[[Any], str]:
    return lambda value: (
        f"It is part of the policy: write policy='mixed_bfloat16, {key}={_dtype(value) or value}'."
    )


def _says(text: str) -> Callable[[Any], str]:
    return lambda value: text


def _unknown(name: str) -> Callable[[Any], str]:
    near = suggestion(name, [*_KNOWN, *_INSTEAD]).strip()
    return _says(near or "Arguments of the function are given where it is called.")


_DEVICE = _says("It runs where its arrays are: leave it out.")
_STATIC = _says("Leave it out: whatever is no array of real numbers is static.")
_INSTEAD: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("dtype", "compute_dtype", "half_dtype", "amp_dtype"), _policy_in),
    **dict.fromkeys(("dtype_policy", "mp_policy"), _as_policy),
    **dict.fromkeys(("loss_scale", "init_scale", "initial_scale", "loss_scaling"), _as_scale),
    **dict.fromkeys(("device", "device_type"), _DEVICE),
    **dict.fromkeys(("static_argnums", "static_argnames"), _STATIC),
    **{key: _in_policy(key) for key in ("rules", "param_dtype", "output_dtype")},
    "enabled": _enabled,
    "cache_enabled": _says("Leave it out: in jax.jit, what is cast is cast once."),
}
