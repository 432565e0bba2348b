"""Mixed precision for Keras 3, on its TensorFlow, JAX and PyTorch backends."""

from importlib.util import find_spec

from halfstep.errors import MissingExtraError

if find_spec("keras") is None:
    raise MissingExtraError(
        "halfstep.keras needs Keras, and it is not installed. Run: pip install 'halfstep[keras]'"
    )

from halfstep.core import SkippedStepsWarning as SkippedStepsWarning
from halfstep.keras._diagnose import diagnose as diagnose
from halfstep.keras._explain import Explanation as Explanation
from halfstep.keras._explain import LayerRow as LayerRow
from halfstep.keras._explain import explain as explain
from halfstep.keras._global import global_policy as global_policy
from halfstep.keras._global import set_global_policy as set_global_policy
from halfstep.keras._loss_scale_optimizer import LossScaleOptimizer as LossScaleOptimizer
from halfstep.keras._master_optimizer import MasterOptimizer as MasterOptimizer
from halfstep.keras._monitor import Monitor as Monitor
from halfstep.keras._monitoring._summary import SkippedSteps as SkippedSteps
from halfstep.keras._monitoring._summary import TrainingSummary as TrainingSummary
from halfstep.keras._stepping._skips import StepCounts as StepCounts
from halfstep.keras._stepping._usage import UnscaledLossWarning as UnscaledLossWarning

__all__ = [
    "Explanation",
    "LayerRow",
    "LossScaleOptimizer",
    "MasterOptimizer",
    "Monitor",
    "SkippedSteps",
    "SkippedStepsWarning",
    "StepCounts",
    "TrainingSummary",
    "UnscaledLossWarning",
    "diagnose",
    "explain",
    "global_policy",
    "set_global_policy",
]

# Saved models, warnings and tracebacks show the public path, which outlives the private files.
for _name in __all__:
    if globals()[_name].__module__.startswith(__name__):
        globals()[_name].__module__ = __name__
