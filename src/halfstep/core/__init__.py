"""The part of halfstep that knows no framework: values, rules and the loss scale's transition."""

from halfstep.core._auto import FamilyTimes as FamilyTimes
from halfstep.core._auto import Size as Size
from halfstep.core._auto import brief as brief
from halfstep.core._auto_name import AUTO as AUTO
from halfstep.core._auto_name import Auto as Auto
from halfstep.core._auto_name import is_auto as is_auto
from halfstep.core._caches import cache_folder as cache_folder
from halfstep.core._changes import LATER as LATER
from halfstep.core._changes import Change as Change
from halfstep.core._changes import Together as Together
from halfstep.core._changes import together as together
from halfstep.core._changes import written as written
from halfstep.core._chosen import CHOSEN as CHOSEN
from halfstep.core._chosen import Chosen as Chosen
from halfstep.core._cut import Boundary as Boundary
from halfstep.core._cut import cheapest as cheapest
from halfstep.core._diagnosis import Diagnosis as Diagnosis
from halfstep.core._diagnosis import Fault as Fault
from halfstep.core._events import emit as emit
from halfstep.core._events import listening as listening
from halfstep.core._events import metric as metric
from halfstep.core._events import quiet as quiet
from halfstep.core._events import subscribe as subscribe
from halfstep.core._evidence import Candidate as Candidate
from halfstep.core._evidence import Machine as Machine
from halfstep.core._evidence import Measured as Measured
from halfstep.core._exponents import LOW_FORMATS as LOW_FORMATS
from halfstep.core._exponents import Exponents as Exponents
from halfstep.core._fitting import needs_wider as needs_wider
from halfstep.core._fitting import rules_for as rules_for
from halfstep.core._formats import FORMATS as FORMATS
from halfstep.core._formats import Format as Format
from halfstep.core._moments import Moment as Moment
from halfstep.core._observation import Observation as Observation
from halfstep.core._observation import Observed as Observed
from halfstep.core._override import override_policy as override_policy
from halfstep.core._override import overriding_policy as overriding_policy
from halfstep.core._pasting import complete as complete
from halfstep.core._pasting import policy_text as policy_text
from halfstep.core._pasting import policy_words as policy_words
from halfstep.core._pasting import quoted as quoted
from halfstep.core._pasting import rules_text as rules_text
from halfstep.core._patches import replace as replace
from halfstep.core._plan import Plan as Plan
from halfstep.core._plan import StalePlanWarning as StalePlanWarning
from halfstep.core._plan import plan_of as plan_of
from halfstep.core._plan import tell_if_stale as tell_if_stale
from halfstep.core._policy import Policy as Policy
from halfstep.core._processor import processor as processor
from halfstep.core._race import Entry as Entry
from halfstep.core._race import Race as Race
from halfstep.core._race import begun as begun
from halfstep.core._range import BACKWARD as BACKWARD
from halfstep.core._range import FORWARD as FORWARD
from halfstep.core._range import Range as Range
from halfstep.core._ranges import Ranges as Ranges
from halfstep.core._report import Report as Report
from halfstep.core._report_parts import SEVERITIES as SEVERITIES
from halfstep.core._report_parts import Cast as Cast
from halfstep.core._report_parts import Finding as Finding
from halfstep.core._report_parts import Step as Step
from halfstep.core._rule import ACTIONS as ACTIONS
from halfstep.core._rule import FAMILIES as FAMILIES
from halfstep.core._rule import Rule as Rule
from halfstep.core._rules import Rules as Rules
from halfstep.core._samples import Reading as Reading
from halfstep.core._samples import Sample as Sample
from halfstep.core._scale import LossScale as LossScale
from halfstep.core._scale import ScaleState as ScaleState
from halfstep.core._skips import Culprits as Culprits
from halfstep.core._skips import SkippedStepsWarning as SkippedStepsWarning
from halfstep.core._skips import culprits_text as culprits_text
from halfstep.core._skips import levels_to_user as levels_to_user
from halfstep.core._skips import overflow_reason as overflow_reason
from halfstep.core._skips import tell_skips as tell_skips
from halfstep.core._skips import where_from as where_from
from halfstep.core._summed import summed as summed
from halfstep.core._unmatched import UnmatchedRuleWarning as UnmatchedRuleWarning
from halfstep.core._unmatched import unmatched as unmatched
from halfstep.core._window import Window as Window
from halfstep.core._words import operation_word as operation_word

__all__ = [
    "ACTIONS",
    "AUTO",
    "BACKWARD",
    "CHOSEN",
    "FAMILIES",
    "FORMATS",
    "FORWARD",
    "LATER",
    "LOW_FORMATS",
    "SEVERITIES",
    "Auto",
    "Boundary",
    "Candidate",
    "Cast",
    "Change",
    "Chosen",
    "Culprits",
    "Diagnosis",
    "Entry",
    "Exponents",
    "FamilyTimes",
    "Fault",
    "Finding",
    "Format",
    "LossScale",
    "Machine",
    "Measured",
    "Moment",
    "Observation",
    "Observed",
    "Plan",
    "Policy",
    "Race",
    "Range",
    "Ranges",
    "Reading",
    "Report",
    "Rule",
    "Rules",
    "Sample",
    "ScaleState",
    "Size",
    "SkippedStepsWarning",
    "StalePlanWarning",
    "Step",
    "Together",
    "UnmatchedRuleWarning",
    "Window",
    "begun",
    "brief",
    "cache_folder",
    "cheapest",
    "complete",
    "culprits_text",
    "emit",
    "is_auto",
    "levels_to_user",
    "listening",
    "metric",
    "needs_wider",
    "operation_word",
    "overflow_reason",
    "override_policy",
    "overriding_policy",
    "plan_of",
    "policy_text",
    "policy_words",
    "processor",
    "quiet",
    "quoted",
    "replace",
    "rules_for",
    "rules_text",
    "subscribe",
    "summed",
    "tell_if_stale",
    "tell_skips",
    "together",
    "unmatched",
    "where_from",
    "written",
]

# Pickles, reprs and tracebacks show the public path, which outlives the private files.
for _value in (
    Candidate,
    Cast,
    Change,
    Chosen,
    Diagnosis,
    Entry,
    Exponents,
    FamilyTimes,
    Fault,
    Finding,
    Format,
    LossScale,
    Machine,
    Measured,
    Moment,
    Observation,
    Observed,
    Plan,
    Policy,
    Race,
    Range,
    Ranges,
    Reading,
    Report,
    Rule,
    Rules,
    Sample,
    ScaleState,
    SkippedStepsWarning,
    StalePlanWarning,
    Step,
    Together,
    UnmatchedRuleWarning,
    Window,
):
    _value.__module__ = __name__
del _value
