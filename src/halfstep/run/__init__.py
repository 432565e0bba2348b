"""Runs training scripts: one as it is, or once per policy and seed to say how the runs compare."""

from halfstep.run._cells import table_rows
from halfstep.run._compare import DEFAULT_POLICIES, Comparison, Watcher, run_all
from halfstep.run._document import document, memory_document, run_document
from halfstep.run._footprint import Activations, Footprint, Kept
from halfstep.run._footprint_cells import activation_rows, footprint_notes, layout_rows
from halfstep.run._here import load_here
from halfstep.run._layouts import LAYOUTS, Layout, Trained
from halfstep.run._measured import MemoryWatcher, measure, processes
from halfstep.run._summary import Summary, summarise
from halfstep.run._target import Target
from halfstep.run._verdict import verdict

__all__ = [
    "DEFAULT_POLICIES",
    "LAYOUTS",
    "Activations",
    "Comparison",
    "Footprint",
    "Kept",
    "Layout",
    "MemoryWatcher",
    "Summary",
    "Target",
    "Trained",
    "Watcher",
    "activation_rows",
    "document",
    "footprint_notes",
    "layout_rows",
    "load_here",
    "measure",
    "memory_document",
    "processes",
    "run_all",
    "run_document",
    "summarise",
    "table_rows",
    "verdict",
]
