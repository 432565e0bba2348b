"""Runs training scripts: one as it is, or once per policy and seed to say how the runs compare."""

from halfstep.run._cells import table_rows
from halfstep.run._compare import DEFAULT_POLICIES, Comparison, Watcher, run_all, runnable_policy
from halfstep.run._document import (
    check_writable,
    document,
    is_stdout,
    memory_document,
    run_document,
    write_json,
)
from halfstep.run._effect import LIKELY_REASONS, NO_REGION, UNSCALED, policy_text, why_ineffective
from halfstep.run._footprint import Activations, Footprint, Kept
from halfstep.run._footprint_cells import activation_rows, footprint_notes, layout_rows
from halfstep.run._here import load_here
from halfstep.run._layouts import LAYOUTS, Layout, Trained
from halfstep.run._measured import MemoryWatcher, measure, processes
from halfstep.run._runs import MetricValue, RunResult, Skip
from halfstep.run._script import Script
from halfstep.run._summary import Summary, summarise
from halfstep.run._target import Target
from halfstep.run._untrained import why_untrained
from halfstep.run._verdict import verdict

__all__ = [
    "DEFAULT_POLICIES",
    "LAYOUTS",
    "LIKELY_REASONS",
    "NO_REGION",
    "UNSCALED",
    "Activations",
    "Comparison",
    "Footprint",
    "Kept",
    "Layout",
    "MemoryWatcher",
    "MetricValue",
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
]
