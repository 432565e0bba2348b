"""Collects what the process of a script tells into a report."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from halfstep.core import Cast, Diagnosis, Fault, Range, Ranges, Report, Step, summed
from halfstep.diagnose._asking import Own, own_text
from halfstep.launch import RunLog, RunResult, policy_text


@dataclass(frozen=True)
class Look:
    """A step that was looked at closely.

    Args:
        report: What was seen, in a step that it names.
        failed: Whether it was looked at because it was skipped or its loss was not finite.
        outside: Whether what is not finite came from outside of every model.
        line: Where the backward pass began, as "file:line"; empty where it is not known.
        sizes: The largest number of the data and the norms of the models, None if not known.
        only: The name and the class of the model, None where there are several or it is not known.
        derived: Whether gradients were taken before that the loss may be made of, as of a penalty.
    """

    report: Report
    failed: bool
    outside: bool
    line: str = ""
    sizes: tuple[float, dict[str, float]] | None = None
    only: tuple[str, str] | None = None
    derived: bool = False

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.report.sampled[0]


@dataclass(frozen=True)
class Evidence:
    """What findings are made of.

    Args:
        report: The report without findings, and with the diagnosis of the last sampled step.
        run: How the process ran.
        looks: The steps that were looked at closely.
        unseen: Step and reason of each that could not be looked at.
        frameworks: Which frameworks the script has imported.
        notes: What there is to say of how it ran.
        overrides: Whether the policy was to win over those of the script itself.
        asked: What the script asks for itself.
    """

    report: Report
    run: RunResult
    looks: tuple[Look, ...] = ()
    unseen: tuple[tuple[int, str], ...] = ()
    frameworks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    overrides: bool = True
    asked: tuple[Own, ...] = ()

    @property
    def taken(self) -> list[Look]:
        """The looks at steps that went well, in which numbers are as they usually are."""
        skipped = {step.number for step in self.report.skipped}
        return [look for look in self.looks if not (look.failed or look.step in skipped)]

    @property
    def half(self) -> str:
        """The format of 16 bits that the script keeps its parameters in, empty for none."""
        return half_of(self.report.ranges)

    @property
    def ineffective(self) -> bool:
        """Whether nothing ran under the policy, and the script chose no other one itself."""
        chosen = self.asked or self.run.region_policies or self.half
        return self.run.ineffective and (self.overrides or not chosen)


_SEVERAL = 2
_Told = TypeVar("_Told", Cast, Fault, Range)
Findings: TypeAlias = Callable[[Evidence], Report]


@dataclass
class Heard:
    """What a script has told so far.

    Args:
        policy: The text of the policy that it trains under.
        overrides: Whether that wins over the policies of the script itself.

    Example:
        >>> heard = Heard("mixed_float16")
        >>> heard.add({"kind": "unseen", "step": 3, "why": "no copy"})
        >>> heard.text
        '0 steps'
    """

    policy: str
    overrides: bool = True
    _steps: list[Step] = field(default_factory=list)
    _looks: list[Look] = field(default_factory=list)
    _unseen: list[tuple[int, str]] = field(default_factory=list)
    _frameworks: tuple[str, ...] = ()
    _notes: list[str] = field(default_factory=list)
    _asked: list[Own] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._log = RunLog(self.policy, 0)
        self._readers: dict[str, Callable[..., None]] = {
            "steps": self._add_steps,
            "look": self._add_look,
            "unseen": self._add_unseen,
            "frameworks": self._add_frameworks,
            "note": self._add_note,
            "precision": self._add_precision,
        }

    def add(self, message: dict[str, Any]) -> None:
        """Takes one message."""
        read = self._readers.get(message["kind"])
        if read is None:
            self._log.add(message)
        else:
            read(**{name: value for name, value in message.items() if name != "kind"})

    @property
    def text(self) -> str:
        """How far the script is, for a progress line."""
        last = next((it.loss for it in reversed(self._steps) if it.loss is not None), None)
        loss = "" if last is None else f", loss {last:.4g}"
        looks = f", {len(self._looks)} looked at" if self._looks else ""
        return f"{len(self._steps)} steps{loss}{looks}"

    @property
    def error(self) -> str:
        """The traceback that the script ended with, "" where there was none."""
        return self._log.error

    def report(
        self, script: str, error: str, findings: Findings, *, stopped: bool = False
    ) -> Report:
        """Returns what happened, once the process has ended.

        Args:
            script: What was run.
            error: Why it failed, "" where it did not.
            findings: Adds what there is to know.
            stopped: Whether somebody ended it before its end.
        """
        run = self._log.result(exit_code=bool(error), error=error, seconds=0.0)
        looks = _named(self._looks)
        sampled = [look.report for look in looks if not look.failed]
        last = sampled[-1] if sampled else Report(script="", policy="")
        ranges = summed(_usual(sampled, self._steps))
        report = Report(
            script=script,
            policy=self._policy_text(run, ranges),
            versions=run.versions,
            device=run.device,
            date=run.date,
            steps=tuple(self._steps),
            sampled=tuple(each.sampled[0] for each in sampled),
            diagnosis=_worst(sampled),
            ranges=ranges,
            power=last.power,
            casts=_first_casts(sampled),
            error=error,
            stopped=stopped,
        )
        others = (self._frameworks, tuple(self._notes), self.overrides, tuple(self._asked))
        return findings(Evidence(report, run, tuple(looks), tuple(self._unseen), *others))

    def _policy_text(self, run: RunResult, ranges: Ranges) -> str:
        """Returns what a run trained under, and who chose it."""
        if self.overrides:
            return f"{self.policy} (--policy)"
        if self._frameworks == ("jax",):
            return "the script's own formats"
        if "keras" in dict(run.versions):
            return policy_text(run)  # whoever sets it, Keras has one
        half = half_of(ranges) if self._asked or run.ineffective else ""
        if self._asked or half:
            return own_text(self._asked, half)
        text = policy_text(run)
        return f"{text} (doctor's choice: the script asks for none)" if text == run.policy else text

    def _add_steps(self, report: dict[str, Any]) -> None:
        self._steps += Report.from_dict(report).steps

    def _add_look(self, report: dict[str, Any], only: Any = None, **values: Any) -> None:
        model = None if only is None else tuple(only)
        self._looks.append(Look(Report.from_dict(report), only=model, **values))

    def _add_unseen(self, step: int, why: str) -> None:
        self._unseen.append((step, why))

    def _add_precision(self, **asked: Any) -> None:
        own = Own(**asked)
        # A scaler is told of once more when it is in use.
        same = [each for each in self._asked if each.scales and own.scales]
        for each in [each for each in same if (each.how, each.source) == (own.how, own.source)]:
            self._asked.remove(each)
        self._asked.append(own)

    def _add_note(self, text: str) -> None:
        self._notes.append(text)

    def _add_frameworks(self, frameworks: list[str]) -> None:
        self._frameworks = tuple(frameworks)


def _named(looks: list[Look]) -> list[Look]:
    """Returns looks in which a model that is not the only one of the script has its name."""
    if len({look.only for look in looks}) < _SEVERAL:
        return looks
    return [
        replace(look, report=_below(*look.only, look.report)) if look.only else look
        for look in looks
    ]


def _below(name: str, kind: str, report: Report) -> Report:
    """Returns a report with the name of its model in front of those of its modules."""

    def told(each: _Told) -> _Told:
        return replace(each, module=name if each.module == kind else f"{name}.{each.module}")

    seen, found = report.ranges, report.diagnosis
    ranges = replace(seen, rows=tuple(map(told, seen.rows)))
    diagnosis = replace(found, faults=tuple(map(told, found.faults)))
    casts = tuple(map(told, report.casts))
    return replace(report, ranges=ranges, diagnosis=diagnosis, casts=casts)


def _usual(sampled: list[Report], steps: list[Step]) -> list[Ranges]:
    """Returns the ranges of the steps that were taken, or else of those that were not."""
    skipped = {step.number for step in steps if step.skipped}
    taken = [each for each in sampled if each.sampled[0] not in skipped]
    return [each.ranges for each in taken or sampled]


def _worst(sampled: list[Report]) -> Diagnosis:
    """Returns the first diagnosis of inf or NaN in a forward pass, or the last one."""
    found = [each.diagnosis for each in sampled]
    broken = (each for each in found if each.first and each.first.breaks)
    return next(broken, found[-1] if found else Diagnosis())


def half_of(ranges: Ranges) -> str:
    """Returns the format of 16 bits that parameters are in, empty for none.

    Example:
        >>> half_of(Ranges())
        ''
    """
    forms = (row.form for row in ranges.rows if row.role == "weight")
    return next((each for each in forms if each in HALF), "")


HALF = ("float16", "bfloat16")


def _first_casts(found: list[Report]) -> tuple[Cast, ...]:
    return next((each.casts for each in found if each.casts), ())
