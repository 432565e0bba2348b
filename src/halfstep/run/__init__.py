"""Runs training scripts: one as it is, or once per policy and seed to say how the runs compare."""

from halfstep.run._cells import table_rows
from halfstep.run._compare import DEFAULT_POLICIES, Comparison, Watcher, run_all, runnable_policy
from halfstep.run._document import check_writable, document, is_stdout, run_document, write_json
from halfstep.run._effect import LIKELY_REASONS, policy_text, why_ineffective
from halfstep.run._here import load_here
from halfstep.run._runs import MetricValue, RunResult, Skip
from halfstep.run._script import Script
from halfstep.run._summary import Summary, summarise
from halfstep.run._untrained import why_untrained
from halfstep.run._verdict import verdict

__all__ = [
    "DEFAULT_POLICIES",
    "LIKELY_REASONS",
    "Comparison",
    "MetricValue",
    "RunResult",
    "Script",
    "Skip",
    "Summary",
    "Watcher",
    "check_writable",
    "document",
    "is_stdout",
    "load_here",
    "policy_text",
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
