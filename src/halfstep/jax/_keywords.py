"""What to write in place of arguments that an `autocast` has elsewhere."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from halfstep.core._text import suggestion
from halfstep.errors import UsageError

_KNOWN = ("policy", "scale")
_DEVICES = ("cuda", "cpu", "gpu", "tpu", "rocm", "mps", "xpu")
_POLICIES = {
    **dict.fromkeys(("float16", "half", "fp16", "f16"), "mixed_float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "mixed_bfloat16"),
    **dict.fromkeys(("float32", "float", "single", "full", "fp32", "f32"), "float32"),
}


def check(policy: Any, more: Sequence[Any], others: dict[str, Any]) -> None:
    """Says what to write in place of arguments that do not exist.

    Args:
        policy: What was given as the policy, which may be a dtype instead.
        more: What was given by position after it.
        others: What was given by name and is no argument.

    Raises:
        UsageError: There is any.
    """
    for given, instead in _refused(policy, more, others):
        raise UsageError(
            f"autocast needs a function, a policy and perhaps scale=, got {given}. {instead}"
        )


def _refused(policy: Any, more: Sequence[Any], others: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what cannot be followed, and what to write in its place."""
    if isinstance(policy, type | np.dtype) or type(policy).__module__ == "torch":
        yield f"{shown(policy)} in place of the policy", _policy_in(policy)
    for name, value in others.items():
        instead = _INSTEAD.get(name, _unknown(name))
        yield f"{name}={shown(value)}", "Leave it out." if value is None else instead(value)
    for value in more:
        yield f"{shown(value)} after the policy", _as_scale(value)


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
    return _dtype(value) or getattr(value, "__name__", f"a {type(value).__name__}")


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
    policy = _POLICIES.get(_dtype(value) or str(value))
    if policy is None:
        return "Policies compute in float16, bfloat16 or float32: write policy='mixed_bfloat16'."
    return f"Write the policy that computes in it: autocast(function, {policy!r})."


def _as_policy(value: Any) -> str:
    return f"Write policy={value if isinstance(value, str) else 'mixed_float16'!r}."


def _as_scale(value: Any) -> str:
    if isinstance(value, str):
        return f"Write policy='mixed_float16, scale={value}'."
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"Write scale={value if number else 'state'}, by name; all else is part of the policy."


def _enabled(value: Any) -> str:
    if value is True:
        return "Leave it out."
    condition = "" if value is False else "'mixed_bfloat16' if enabled else "
    return f"Write policy={condition}'float32'."


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
