"""What Keras calls a dtype policy and what halfstep calls a policy, each from the other."""

from dataclasses import dataclass
from typing import Any

import keras

from halfstep.core import LossScale, Plan, Policy, Rules
from halfstep.errors import PolicyError
from halfstep.keras._private import backend

LOW = ("float16", "bfloat16")

_MIXED = {("float32", "float16"): "mixed_float16", ("float32", "bfloat16"): "mixed_bfloat16"}


@dataclass(frozen=True)
class Chosen:
    """A policy in both forms.

    Args:
        policy: halfstep's. Of a policy map, that of its default.
        keras_policy: The one that Keras gives to new layers.
    """

    policy: Policy
    keras_policy: Any


def read(value: Any) -> Chosen:
    """Returns the policy that somebody wrote.

    Args:
        value: A name, a halfstep policy or its text or dict, or a policy or policy map of Keras.

    Raises:
        PolicyError: It is none of these, or Keras cannot express it.

    Example:
        >>> read("mixed_bfloat16").keras_policy.compute_dtype
        'bfloat16'
        >>> read("bfloat16").policy.param_dtype
        'bfloat16'
    """
    if isinstance(value, keras.DTypePolicy):
        return Chosen(_from_keras(value), value)
    if isinstance(value, str) and value not in Policy.names() and _known_to_keras(value):
        return read(keras.dtype_policies.get(value))
    if isinstance(value, dict) and any(map(_is_keras_policy, value.values())):
        raise PolicyError(
            f"A policy for Keras by the paths of layers needs a policy map, got {value!r}. Write"
            " keras.dtype_policies.DTypePolicyMap('float32', {...})."
        )
    if not isinstance(value, (str, dict, Policy, Plan)):
        raise PolicyError(
            "A policy for Keras needs a name, a halfstep.Policy or a keras.DTypePolicy, got"
            f" {value!r}. Write 'mixed_float16'."
        )
    policy = Policy.of(value)
    return Chosen(policy, keras.DTypePolicy(_keras_name(policy)))


def parts(keras_policy: Any) -> tuple[Any, ...]:
    """Returns the policies that a policy map may give to a layer, or the policy itself.

    Example:
        >>> import keras
        >>> chosen = keras.DTypePolicy("mixed_float16")
        >>> parts(chosen) == (chosen,)
        True
    """
    if isinstance(keras_policy, keras.dtype_policies.DTypePolicyMap):
        return (keras_policy.default_policy, *keras_policy.values())
    return (keras_policy,)


def is_low(keras_policy: Any) -> bool:
    """Returns whether anything computes in a 16-bit format by it.

    Example:
        >>> import keras
        >>> is_low(keras.DTypePolicy("float32"))
        False
    """
    return any(each.compute_dtype in LOW for each in parts(keras_policy))


def needs_scale(keras_policy: Any) -> bool:
    """Returns whether gradients by it can leave the range of their format.

    Example:
        >>> import keras
        >>> needs_scale(keras.DTypePolicy("mixed_bfloat16"))
        False
    """
    return any(each.compute_dtype == "float16" for each in parts(keras_policy))


def _is_keras_policy(value: Any) -> bool:
    return isinstance(value, keras.DTypePolicy)


def _known_to_keras(name: str) -> bool:
    try:
        keras.dtype_policies.get(name)
    except (TypeError, ValueError):
        return False
    return True


def _from_keras(keras_policy: Any) -> Policy:
    compute = keras_policy.compute_dtype
    if compute is None or not backend.is_float_dtype(compute):
        raise PolicyError(
            f"A policy for Keras needs a floating-point format, got {keras_policy!r}."
            " Write 'mixed_float16'."
        )
    scale = LossScale.dynamic() if needs_scale(keras_policy) else LossScale.none()
    return Policy(keras_policy.variable_dtype, compute, scale=scale)


def _keras_name(policy: Policy) -> str:
    if policy.rules != Rules():
        raise PolicyError(
            "Keras takes the dtype of a layer, not of an operation, so it can follow no rules, got"
            f" rules={policy.rules}. Give the layers a dtype=..., or a keras DTypePolicyMap by"
            " their paths; safe=False keeps nothing wide that Keras does not."
        )
    if policy.output_dtype not in ("float32", policy.compute_dtype):
        raise PolicyError(
            "A policy for Keras needs an output_dtype of float32 or its compute_dtype, got"
            f" {policy.output_dtype!r} with compute_dtype={policy.compute_dtype!r}."
        )
    kept, computed = policy.param_dtype, policy.compute_dtype
    name = kept if kept == computed else _MIXED.get((kept, computed))
    if name is None:
        raise PolicyError(
            "Keras needs variables in float32 or in the compute_dtype, got"
            f" param_dtype={kept!r} with compute_dtype={computed!r}. Write param_dtype='float32'."
        )
    return name
