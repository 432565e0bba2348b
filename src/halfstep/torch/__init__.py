"""Mixed precision for PyTorch."""

from halfstep.torch import _checkpoint
from halfstep.torch._autocast import autocast as autocast
from halfstep.torch._custom import custom_bwd as custom_bwd
from halfstep.torch._custom import custom_fwd as custom_fwd
from halfstep.torch._explain import Explanation as Explanation
from halfstep.torch._saved import saved_bytes as saved_bytes

_checkpoint.install()

__all__ = ["Explanation", "autocast", "custom_bwd", "custom_fwd", "saved_bytes"]
