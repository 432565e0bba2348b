"""How results are shown: tables that fit the terminal, curves in a line, live progress."""

from halfstep.report._files import check_writable, is_stdout, write_json, write_text
from halfstep.report._numbers import (
    ASCII_UNKNOWN,
    UNKNOWN,
    bytes_text,
    number,
    ratio_text,
    seconds_text,
)
from halfstep.report._page import check_page, page
from halfstep.report._plan_text import PlanText
from halfstep.report._progress import Progress
from halfstep.report._report_text import ReportText
from halfstep.report._shares import share_text
from halfstep.report._sparkline import finite_limits, sparkline
from halfstep.report._table import FittingTable, Row
from halfstep.report._words import headline, outcome

__all__ = [
    "ASCII_UNKNOWN",
    "UNKNOWN",
    "FittingTable",
    "PlanText",
    "Progress",
    "ReportText",
    "Row",
    "bytes_text",
    "check_page",
    "check_writable",
    "finite_limits",
    "headline",
    "is_stdout",
    "number",
    "outcome",
    "page",
    "ratio_text",
    "seconds_text",
    "share_text",
    "sparkline",
    "write_json",
    "write_text",
]
