"""The interface of jmp 0.0.4, with what is wrong there put right.

Change `import jmp` to `from halfstep.jax import jmp`; a program stays as it is.
"""

from halfstep.jax._finite import all_finite as all_finite
from halfstep.jax._finite import select_tree as select_tree
from halfstep.jax._scale import NoOpLossScale as NoOpLossScale
from halfstep.jax._scale import StaticLossScale as StaticLossScale
from halfstep.jax.jmp._loss_scale import DynamicLossScale as DynamicLossScale
from halfstep.jax.jmp._loss_scale import LossScale as LossScale
from halfstep.jax.jmp._policy import Policy as Policy
from halfstep.jax.jmp._policy import cast_to_full as cast_to_full
from halfstep.jax.jmp._policy import cast_to_half as cast_to_half
from halfstep.jax.jmp._policy import get_policy as get_policy
from halfstep.jax.jmp._policy import half_dtype as half_dtype

# Of the jmp whose interface this is.
__version__ = "0.0.4"

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "select_tree",
]

# Pickles, reprs and tracebacks show the public path, which outlives the private files.
for _value in (DynamicLossScale, Policy, cast_to_full, cast_to_half, get_policy, half_dtype):
    _value.__module__ = __name__
del _value
