"""Mixed precision for Keras, on its TensorFlow, JAX and PyTorch backends."""

from importlib.util import find_spec

from halfstep.errors import MissingExtraError

if find_spec("keras") is None:
    raise MissingExtraError(
        "halfstep.keras needs Keras, and it is not installed. Run: pip install 'halfstep[keras]'"
    )

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
