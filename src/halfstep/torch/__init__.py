"""Mixed precision for PyTorch: replacements for `torch.amp`, and what they make possible."""

from importlib.util import find_spec

from halfstep.errors import MissingExtraError

if find_spec("torch") is None:
    raise MissingExtraError(
        "halfstep.torch needs PyTorch, and it is not installed. Run: pip install 'halfstep[torch]'"
    )

from halfstep.core import SkippedStepsWarning as SkippedStepsWarning
from halfstep.core import UnmatchedRuleWarning as UnmatchedRuleWarning
from halfstep.torch import _advice, _checkpoint
from halfstep.torch._autocast import autocast as autocast
from halfstep.torch._average import AveragedModel as AveragedModel
from halfstep.torch._custom import custom_bwd as custom_bwd
from halfstep.torch._custom import custom_fwd as custom_fwd
from halfstep.torch._diagnose import diagnose as diagnose
from halfstep.torch._explain import Explanation as Explanation
from halfstep.torch._files import load as load
from halfstep.torch._files import save as save
from halfstep.torch._float32 import float32_state_dict as float32_state_dict
from halfstep.torch._float32 import load_float32_state_dict as load_float32_state_dict
from halfstep.torch._global import global_policy as global_policy
from halfstep.torch._global import set_global_policy as set_global_policy
from halfstep.torch._lost import LostUpdates as LostUpdates
from halfstep.torch._lost import lost_updates as lost_updates
from halfstep.torch._master import Masters as Masters
from halfstep.torch._master import keep_masters as keep_masters
from halfstep.torch._observe import observe as observe
from halfstep.torch._observing._ranges import ranges as ranges
from halfstep.torch._observing._sampling import Watch as Watch
from halfstep.torch._observing._sampling import watch as watch
from halfstep.torch._plan import plan as plan
from halfstep.torch._prepare import prepare as prepare
from halfstep.torch._region import Region as Region
from halfstep.torch._regions._release import accumulate as accumulate
from halfstep.torch._regions._unused import UnusedRegionWarning as UnusedRegionWarning
from halfstep.torch._regions._widening import WidenedRegionWarning as WidenedRegionWarning
from halfstep.torch._saved import saved_bytes as saved_bytes
from halfstep.torch._scaler import GradScaler as GradScaler
from halfstep.torch._scaling._master import RoundedStateWarning as RoundedStateWarning
from halfstep.torch._scaling._steps import History as History
from halfstep.torch._scaling._steps import ScaleChange as ScaleChange
from halfstep.torch._scaling._steps import StepRecord as StepRecord

_advice.install()
_checkpoint.install()

__all__ = [
    "AveragedModel",
    "Explanation",
    "GradScaler",
    "History",
    "LostUpdates",
    "Masters",
    "Region",
    "RoundedStateWarning",
    "ScaleChange",
    "SkippedStepsWarning",
    "StepRecord",
    "UnmatchedRuleWarning",
    "UnusedRegionWarning",
    "Watch",
    "WidenedRegionWarning",
    "accumulate",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "diagnose",
    "float32_state_dict",
    "global_policy",
    "keep_masters",
    "load",
    "load_float32_state_dict",
    "lost_updates",
    "observe",
    "plan",
    "prepare",
    "ranges",
    "save",
    "saved_bytes",
    "set_global_policy",
    "watch",
]

# Pickles, warnings and tracebacks show the public path, which outlives the private files.
for _name in __all__:
    if globals()[_name].__module__.startswith(__name__):
        globals()[_name].__module__ = __name__
