"""Mixed-precision training: low precision chosen per operation, and a loss scale that is safe."""

from halfstep import errors as errors
from halfstep.core import Diagnosis as Diagnosis
from halfstep.core import Exponents as Exponents
from halfstep.core import Fault as Fault
from halfstep.core import Format as Format
from halfstep.core import LossScale as LossScale
from halfstep.core import Plan as Plan
from halfstep.core import Policy as Policy
from halfstep.core import Report as Report
from halfstep.core import Rule as Rule
from halfstep.core import Rules as Rules
from halfstep.core import ScaleState as ScaleState
from halfstep.core import StalePlanWarning as StalePlanWarning
from halfstep.core import metric as metric

__version__ = "0.1.0"

__all__ = [
    "Diagnosis",
    "Exponents",
    "Fault",
    "Format",
    "LossScale",
    "Plan",
    "Policy",
    "Report",
    "Rule",
    "Rules",
    "ScaleState",
    "StalePlanWarning",
    "__version__",
    "errors",
    "metric",
]
