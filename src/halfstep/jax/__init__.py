"""Mixed precision for JAX: a function transformation, by rules that can be read and edited."""

from importlib.util import find_spec

from halfstep.errors import MissingExtraError

if find_spec("jax") is None:
    raise MissingExtraError(
        "halfstep.jax needs JAX, and it is not installed. Run: pip install 'halfstep[jax]'"
    )

from halfstep.jax._autocast import autocast as autocast
from halfstep.jax._explain import Explanation as Explanation
from halfstep.jax._explain import Row as Row
from halfstep.jax._explain import explain as explain

__all__ = [
    "Explanation",
    "Row",
    "autocast",
    "explain",
]

# Pickles, warnings and tracebacks show the public path, which outlives the private files.
for _name in __all__:
    globals()[_name].__module__ = __name__
