"""The public names, frozen: whoever changes one changes the interface and its changelog."""

from importlib import import_module

import pytest

NAMES = {
    "halfstep": [
        "Format",
        "LossScale",
        "Policy",
        "Rule",
        "Rules",
        "ScaleState",
        "__version__",
        "errors",
        "metric",
    ],
    "halfstep.core": [
        "ACTIONS",
        "FAMILIES",
        "FORMATS",
        "Format",
        "LossScale",
        "Policy",
        "Rule",
        "Rules",
        "ScaleState",
        "emit",
        "listening",
        "metric",
        "override_policy",
        "overriding_policy",
        "quiet",
        "subscribe",
    ],
    "halfstep.errors": [
        "CheckpointError",
        "FormatError",
        "HalfstepError",
        "MissingExtraError",
        "MissingFileError",
        "MissingKeyError",
        "NoCheckError",
        "NonFiniteError",
        "PolicyError",
        "RefusedOperationError",
        "RuleError",
        "ScaleError",
        "ScalerStateError",
        "UnsupportedVersionError",
        "UsageError",
    ],
    "halfstep.cli": [
        "main",
    ],
    "halfstep.run": [
        "Activations",
        "Comparison",
        "DEFAULT_POLICIES",
        "Footprint",
        "Kept",
        "LAYOUTS",
        "LIKELY_REASONS",
        "Layout",
        "MemoryWatcher",
        "MetricValue",
        "NO_REGION",
        "RunResult",
        "Script",
        "Skip",
        "Summary",
        "Target",
        "Trained",
        "Watcher",
        "activation_rows",
        "check_writable",
        "document",
        "footprint_notes",
        "is_stdout",
        "layout_rows",
        "load_here",
        "measure",
        "memory_document",
        "policy_text",
        "processes",
        "run_all",
        "run_document",
        "runnable_policy",
        "summarise",
        "table_rows",
        "verdict",
        "why_ineffective",
        "why_untrained",
        "write_json",
    ],
    "halfstep.report": [
        "ASCII_UNKNOWN",
        "FittingTable",
        "Progress",
        "Row",
        "UNKNOWN",
        "bytes_text",
        "finite_limits",
        "number",
        "ratio_text",
        "seconds_text",
        "sparkline",
    ],
    "halfstep.torch": [
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
        "accumulate",
        "autocast",
        "custom_bwd",
        "custom_fwd",
        "float32_state_dict",
        "global_policy",
        "keep_masters",
        "load",
        "load_float32_state_dict",
        "lost_updates",
        "prepare",
        "save",
        "saved_bytes",
        "set_global_policy",
    ],
}


@pytest.mark.parametrize("package", NAMES)
def test_all_is_the_frozen_list(package):
    assert sorted(import_module(package).__all__) == NAMES[package]


@pytest.mark.parametrize("package", NAMES)
def test_every_name_is_there(package):
    module = import_module(package)
    assert [name for name in NAMES[package] if not hasattr(module, name)] == []


def test_the_root_stays_small():
    assert len(NAMES["halfstep"]) <= 15
