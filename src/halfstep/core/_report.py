"""What happened in a training: each step, what was cast, which numbers there were, what to do."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from halfstep.core._changes import Change, Together, changes_of, together
from halfstep.core._diagnosis import Diagnosis
from halfstep.core._exponents import LOW_FORMATS
from halfstep.core._formats import FORMATS
from halfstep.core._range import BACKWARD, Range
from halfstep.core._ranges import Ranges
from halfstep.core._reading import plain, record
from halfstep.core._report_parts import Cast, Finding, Step, check_among
from halfstep.errors import ReportError

REPORT_FORMAT = "halfstep-doctor-1"
_MADE = ("output", "grad_output")
# What `to_dict` writes besides the fields.
_FOLLOWS = ("format", "remedies")
_FORMATS = tuple(each.name for each in FORMATS)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What happened in a training; made by `halfstep doctor`.

    Args:
        script: What was run, as the user wrote it.
        policy: What it trained under.
        versions: (name, version) of Python, halfstep and the framework.
        device: What it computed on.
        date: When it started, ISO 8601, UTC.
        steps: The steps, in order.
        sampled: The numbers of the steps in which the numbers of tensors were looked at.
        diagnosis: The first inf or NaN, and what followed.
        ranges: The magnitudes of the tensors of each module, over all steps in which they were
            looked at.
        power: The exponent of the scale that multiplied the gradients in the last of them.
        casts: What the rules cast in one step.
        findings: What there is to know, the gravest first.
        error: Why the script failed, empty where it did not.
        stopped: Whether somebody stopped the script before its end.

    Example:
        >>> report = Report(script="train.py", policy="mixed_float16", steps=(Step(1), Step(2)))
        >>> len(report.skipped), Report.from_dict(report.to_dict()) == report
        (0, True)
    """

    script: str
    policy: str
    versions: tuple[tuple[str, str], ...] = ()
    device: str = ""
    date: str = ""
    steps: tuple[Step, ...] = ()
    sampled: tuple[int, ...] = ()
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    ranges: Ranges = field(default_factory=Ranges)
    power: int = 0
    casts: tuple[Cast, ...] = ()
    findings: tuple[Finding, ...] = ()
    error: str = ""
    stopped: bool = False

    def __post_init__(self) -> None:
        for fault in self.diagnosis.faults:
            check_among("Report", "diagnosis", fault.dtype, _FORMATS)
        for name in (self.ranges.form, *(row.form for row in self.ranges.rows)):
            check_among("Report", "ranges", name, _FORMATS)

    @property
    def skipped(self) -> tuple[Step, ...]:
        """The steps that the optimizer did not take.

        Example:
            >>> Report(script="a.py", policy="float32", steps=(Step(1, skipped=True),)).skipped
            (Step(number=1, loss=None, scale=None, skipped=True, reason='', nonfinite=()),)
        """
        return tuple(step for step in self.steps if step.skipped)

    @property
    def remedies(self) -> Together:
        """All remedies as one text, without those that contradict a graver one.

        Example:
            >>> low, high = (f"scaler = GradScaler(init_scale=2.0**{power})" for power in (4, 20))
            >>> overflow = Finding("error", "It overflows.", "a", low, (Change(low, "scaler"),))
            >>> lost = Finding("warning", "Much is lost.", "b", high, (Change(high, "scaler"),))
            >>> report = Report(script="a.py", policy="float32", findings=(overflow, lost))
            >>> print(report.remedies.text)
            from halfstep.torch import GradScaler
            scaler = GradScaler(init_scale=2.0**4)
            >>> report.remedies.later
            ('b: Much is lost.',)
        """
        return together(self._told)

    @property
    def is_manifold(self) -> bool:
        """Whether findings have remedies that differ.

        Example:
            >>> Report(script="a.py", policy="float32").is_manifold
            False
        """
        return len({changes for _, changes in self._told}) > 1

    @property
    def _told(self) -> list[tuple[str, tuple[Change, ...]]]:
        """What there is to mend, in words, and what is changed for that, the gravest first."""
        first = self.diagnosis.first
        told = [] if first is None else self.diagnosis._told
        told += [
            (": ".join(filter(None, [each.module, each.text])), changes_of(each))
            for each in self.findings
            if first is None or each.remedy != first.remedy
        ]
        if not (self.steps or self.findings):
            told.append((f"What does not fit {self.ranges.form}.", self.ranges.changes))
        return [pair for pair in told if pair[1]]

    @property
    def narrow(self) -> Ranges:
        """The ranges of the modules that computed in a format of 16 bits or less.

        Example:
            >>> from halfstep.core import Exponents
            >>> wide = Range("head", "output", Exponents(), Exponents(), "float32")
            >>> narrow = Range("ff", "output", Exponents(), Exponents(), "float16")
            >>> ranges = Ranges((wide, narrow))
            >>> Report(script="a.py", policy="mixed_float16", ranges=ranges).narrow.modules
            ('ff',)
        """
        rows = self.ranges.rows
        # Gradients of weights are seen in float32, whatever they were computed in.
        low = {row.module for row in rows if row.role in _MADE and row.form in LOW_FORMATS}
        return replace(self.ranges, rows=tuple(row for row in rows if row.module in low))

    def power_of(self, row: Range) -> int:
        """Returns the exponent of the scale that multiplied the numbers of a row.

        Args:
            row: One of the ranges.

        Example:
            >>> from halfstep.core import Exponents
            >>> report = Report(script="a.py", policy="mixed_float16", power=16)
            >>> nothing = Exponents()
            >>> report.power_of(Range("head", "grad_output", nothing, nothing))
            16
            >>> report.power_of(Range("head", "output", nothing, nothing))
            0
        """
        return self.power if row.role in BACKWARD else 0

    def lost(self, row: Range, form: str | None = None) -> float:
        """Returns the fraction of the numbers of a row that becomes 0 in a format, as scaled.

        Args:
            row: One of the ranges.
            form: The name of the format, without one that of the ranges.

        Example:
            >>> from halfstep.core import Exponents
            >>> found = Exponents({-30: 3, -4: 1}, largest=0.1)
            >>> row = Range("head", "grad_output", found, found)
            >>> Report(script="a.py", policy="mixed_float16").lost(row)
            0.75
        """
        return row.reference.flushed(form or self.ranges.form, self.power_of(row))

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON types; inf and NaN, which JSON lacks, as text.

        All remedies as one are there as "remedies", though they follow from the findings.

        Example:
            >>> Report(script="train.py", policy="float32").to_dict()["format"]
            'halfstep-doctor-1'
        """
        whole = self.remedies._asdict() | {"later": list(self.remedies.later)}
        return {"format": REPORT_FORMAT, **plain(self), "remedies": whole}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the report that `to_dict` wrote.

        Args:
            data: What was written, by whomever: nothing in it is executed.

        Raises:
            ReportError: If it is not such a report, with what is wrong and where.

        Example:
            >>> data = {"format": "halfstep-doctor-1", "script": "train.py", "policy": 16}
            >>> Report.from_dict(data)
            Traceback (most recent call last):
            halfstep.errors.ReportError: Report.policy needs to be a text, got 16. Pass what \
to_dict() made.
        """
        found = data.get("format") if isinstance(data, Mapping) else data
        if found != REPORT_FORMAT:
            raise ReportError(
                f"Report needs the format {REPORT_FORMAT!r}, got {str(found)[:40]!r}. Read it with "
                "the version of halfstep that wrote it, or run halfstep doctor again."
            )
        return record(cls, {key: data[key] for key in data if key not in _FOLLOWS}, "Report")
