"""Mixed precision for JAX: a function transformation, loss scales, and steps of optax."""

from importlib.util import find_spec

from halfstep.errors import MissingExtraError

if find_spec("jax") is None:
    raise MissingExtraError(
        "halfstep.jax needs JAX, and it is not installed. Run: pip install 'halfstep[jax]'"
    )

from halfstep.core import UnmatchedRuleWarning as UnmatchedRuleWarning
from halfstep.jax._autocast import autocast as autocast
from halfstep.jax._diagnose import diagnose as diagnose
from halfstep.jax._explain import Explanation as Explanation
from halfstep.jax._explain import explain as explain
from halfstep.jax._finite import all_finite as all_finite
from halfstep.jax._finite import select_tree as select_tree
from halfstep.jax._masters import WithMastersState as WithMastersState
from halfstep.jax._masters import master_params as master_params
from halfstep.jax._masters import with_masters as with_masters
from halfstep.jax._rows import OperationRow as OperationRow
from halfstep.jax._scale import DynamicLossScale as DynamicLossScale
from halfstep.jax._scale import NoOpLossScale as NoOpLossScale
from halfstep.jax._scale import StaticLossScale as StaticLossScale
from halfstep.jax._scale import loss_scale as loss_scale
from halfstep.jax._transformations._norms import clip_by_global_norm as clip_by_global_norm
from halfstep.jax._transformations._norms import global_norm as global_norm
from halfstep.jax._transformations._skipping import ApplyIfFiniteState as ApplyIfFiniteState
from halfstep.jax._transformations._skipping import apply_if_finite as apply_if_finite
from halfstep.jax._transformations._telling import check_skips as check_skips
from halfstep.jax._transformations._telling import nonfinite as nonfinite
from halfstep.jax._transformations._updates import apply_updates as apply_updates
from halfstep.jax._unscaled import UnscaledGradientsWarning as UnscaledGradientsWarning

__all__ = [
    "ApplyIfFiniteState",
    "DynamicLossScale",
    "Explanation",
    "NoOpLossScale",
    "OperationRow",
    "StaticLossScale",
    "UnmatchedRuleWarning",
    "UnscaledGradientsWarning",
    "WithMastersState",
    "all_finite",
    "apply_if_finite",
    "apply_updates",
    "autocast",
    "check_skips",
    "clip_by_global_norm",
    "diagnose",
    "explain",
    "global_norm",
    "loss_scale",
    "master_params",
    "nonfinite",
    "select_tree",
    "with_masters",
]

# Pickles, reprs and tracebacks show the public path, which outlives the private files.
for _name in __all__:
    if globals()[_name].__module__.startswith(__name__):
        globals()[_name].__module__ = __name__
del _name
