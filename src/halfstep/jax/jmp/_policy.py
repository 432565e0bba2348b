"""jmp's policies: which dtype parameters, computations and outputs are cast to."""

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy

from halfstep.core._text import suggestion
from halfstep.errors import PolicyError

Tree = TypeVar("Tree")

dtype_to_names = {
    jnp.bfloat16: ("bf16", "bfloat16"),
    jnp.float16: ("f16", "float16"),
    jnp.float32: ("full", "f32", "float32"),
    jnp.float64: ("f64", "float64"),
}
name_to_dtype = {name: dtype for dtype, names in dtype_to_names.items() for name in names}

_SHORT = {jnp.dtype(dtype).name: names[0] for dtype, names in dtype_to_names.items()}
_KEYS = {"p": "param", "params": "param", "c": "compute", "compute": "compute"}
_KEYS |= {"o": "output", "output": "output"}


@dataclass(frozen=True)
class Policy:
    """The dtypes of parameters, computations and outputs.

    Args:
        param_dtype: What parameters are kept in.
        compute_dtype: What operations run in.
        output_dtype: What is handed back.

    Example:
        >>> import jax.numpy as jnp
        >>> policy = Policy(jnp.float32, jnp.bfloat16, jnp.float32)
        >>> policy.cast_to_compute({"steps": jnp.arange(2), "x": jnp.ones(2)})
        {'steps': Array([0, 1], dtype=int32), 'x': Array([1, 1], dtype=bfloat16)}
        >>> str(policy)
        'p=full,c=bf16,o=full'
    """

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any

    def cast_to_param(self, x: Tree) -> Tree:
        """Returns the tree with its floating-point arrays in `param_dtype`."""
        return _cast_floating(x, self.param_dtype)

    def cast_to_compute(self, x: Tree) -> Tree:
        """Returns the tree with its floating-point arrays in `compute_dtype`."""
        return _cast_floating(x, self.compute_dtype)

    def cast_to_output(self, x: Tree) -> Tree:
        """Returns the tree with its floating-point arrays in `output_dtype`."""
        return _cast_floating(x, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> "Policy":
        """Returns the policy with another dtype of outputs."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        names = (jnp.dtype(getattr(self, field.name)).name for field in dataclasses.fields(self))
        return "p={},c={},o={}".format(*(_SHORT.get(name, name) for name in names))


def get_policy(policy_name: str) -> Policy:
    """Reads a policy such as `half`, `c=f16` or `params=float32,compute=half,output=full`.

    Parameters are float32 if nothing is said; computations follow parameters, outputs follow
    computations.

    Args:
        policy_name: A dtype for all three, or pairs of `p`, `c` and `o` and a dtype.

    Raises:
        PolicyError: If it cannot be read.

    Example:
        >>> str(get_policy("c=bf16"))
        'p=full,c=bf16,o=bf16'
    """
    if "=" not in policy_name:
        return Policy(*[parse_dtype(policy_name)] * 3)
    given: dict[str, Any] = {}
    for part in policy_name.split(","):
        key, separator, value = part.partition("=")
        if key not in _KEYS or not separator:
            raise PolicyError(
                f"Unknown key {key!r} in {policy_name!r}: get_policy needs pairs of params, "
                f"compute or output and a dtype. Write for example 'params=f32,compute=f16'."
            )
        given[_KEYS[key]] = parse_dtype(value)
    param = given.get("param", jnp.float32)
    compute = given.get("compute", param)
    return Policy(param, compute, given.get("output", compute))


def cast_to_full(tree: Tree) -> Tree:
    """Returns the tree with its floating-point arrays in float32.

    Example:
        >>> import jax.numpy as jnp
        >>> cast_to_full({"name": "input", "x": jnp.ones(2, jnp.float16)})
        {'name': 'input', 'x': Array([1., 1.], dtype=float32)}
    """
    return _cast_floating(tree, jnp.float32)


def cast_to_half(tree: Tree) -> Tree:
    """Returns the tree with its floating-point arrays in the half precision of this backend.

    Example:
        >>> import jax.numpy as jnp
        >>> cast_to_half(jnp.ones(2)).dtype == half_dtype()
        True
    """
    return _cast_floating(tree, half_dtype())


def half_dtype() -> Any:
    """Returns bfloat16 where the first device is a TPU, else float16.

    Example:
        >>> half_dtype().__name__
        'float16'
    """
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def parse_dtype(value: str) -> Any:
    """Returns the dtype of a name such as `half`, `f16` or `float16`."""
    if value == "half":
        return half_dtype()
    if value not in name_to_dtype:
        known = ("half", *name_to_dtype)
        raise PolicyError(
            f"Unknown dtype {value!r}: a policy needs one of {', '.join(known)}."
            f"{suggestion(value, known) or ' Write for example half.'}"
        )
    return name_to_dtype[value]


def _cast_floating(tree: Tree, dtype: Any) -> Tree:
    def cast(leaf: Any) -> Any:
        is_array = isinstance(leaf, (numpy.ndarray, jax.Array))
        floating = is_array and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if floating else leaf

    return jax.tree.map(cast, tree)
