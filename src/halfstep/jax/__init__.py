"""Mixed precision for JAX: loss scales, optax transformations and a jmp that keeps its floor."""

from importlib.util import find_spec

from halfstep.errors import MissingExtraError

if find_spec("jax") is None:
    raise MissingExtraError(
        "halfstep.jax needs JAX, and it is not installed. Run: pip install 'halfstep[jax]'"
    )

from halfstep.jax._finite import all_finite as all_finite
from halfstep.jax._finite import select_tree as select_tree
from halfstep.jax._scale import DynamicLossScale as DynamicLossScale
from halfstep.jax._scale import NoOpLossScale as NoOpLossScale
from halfstep.jax._scale import StaticLossScale as StaticLossScale
from halfstep.jax._scale import loss_scale as loss_scale

__all__ = [
    "DynamicLossScale",
    "NoOpLossScale",
    "StaticLossScale",
    "all_finite",
    "loss_scale",
    "select_tree",
]

# Pickles, reprs and tracebacks show the public path, which outlives the private files.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
