"""Runs a training script, once per policy and seed, and says how the runs compare."""

from halfstep.run._cells import table_rows
from halfstep.run._compare import DEFAULT_POLICIES, Comparison, Watcher, run_all
from halfstep.run._document import check_writable, document, is_stdout, write_json
from halfstep.run._runs import MetricValue, RunResult, Skip
from halfstep.run._summary import Summary, summarise
from halfstep.run._verdict import verdict

__all__ = [
    "DEFAULT_POLICIES",
    "Comparison",
    "MetricValue",
    "RunResult",
    "Skip",
    "Summary",
    "Watcher",
    "check_writable",
    "document",
    "is_stdout",
    "run_all",
    "summarise",
    "table_rows",
    "verdict",
    "write_json",
]
