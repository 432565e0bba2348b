"""Mixed precision for Keras, on its TensorFlow, JAX and PyTorch backends."""

from halfstep.keras._explain import Explanation as Explanation
from halfstep.keras._explain import LayerRow as LayerRow
from halfstep.keras._explain import explain as explain
from halfstep.keras._global import global_policy as global_policy
from halfstep.keras._global import set_global_policy as set_global_policy

__all__ = [
    "Explanation",
    "LayerRow",
    "explain",
    "global_policy",
    "set_global_policy",
]
