"""Collects what the processes tell that measure memory."""

from collections.abc import Callable
from typing import Any

from halfstep.errors import UsageError
from halfstep.launch import RunResult, why_untrained
from halfstep.run._footprint import Activations, Footprint, Kept
from halfstep.run._layouts import EIGHT_BIT, LAYOUTS, Layout, Trained, predicted, unpredictable

_OTHER = "the script keeps its masters in another way"
_ONLY_PREDICTED = "a script is run as it is, and would have to ask for this"
_NOT_COUNTED = (
    "they are counted in the second step, and not in a script that ends sooner or has hooks of its "
    "own for what is saved"
)


class Findings:
    """What is known so far of one target."""

    def __init__(self) -> None:
        self.error, self.steps = "", 0
        self.batch: int | None = None
        self.activations: list[Activations] = []
        self._trained: tuple[Trained, ...] = ()
        self._measured: dict[str, dict[str, Any]] = {}
        self._unmeasured: dict[str, str] = {}

    def footprint(self, target: str, run: RunResult) -> Footprint:
        """Returns all of it.

        Args:
            target: What was measured.
            run: The process that tells where.
        """
        return Footprint(
            target,
            trained=self._trained,
            layouts=tuple(map(self._layout, LAYOUTS if self._trained else ())),
            activations=tuple(self.activations),
            batch=self.batch,
            steps=self.steps,
            error=self.error,
            device=run.device,
            versions=run.versions,
        )

    def _set_trained(self, trained: list[dict[str, Any]]) -> None:
        self._trained = tuple(
            Trained(**each | {"sizes": tuple(each["sizes"]), "dtypes": tuple(each["dtypes"])})
            for each in trained
        )

    def _layout(self, layout: Layout) -> Kept:
        measured = self._measured.get(layout.name)
        why = unpredictable(layout, self._trained)
        return Kept(
            layout.name,
            predicted=None if why else predicted(layout, self._trained),
            measured=measured,
            unpredicted=why,
            unmeasured="" if measured else self._unmeasured.get(layout.name, ""),
        )


class ModelFindings(Findings):
    """What the process of a model tells.

    Args:
        show: Shows what is being measured.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self.readers: dict[str, Callable[..., None]] = {
            "refused": self._refuse,
            "model": self._model,
            "begin": lambda name: show(name),
            "layout": self._layout_found,
            "activations": lambda **values: self.activations.append(Activations(**values)),
        }

    def end(self, run: RunResult) -> None:
        """Learns that the process has ended, and explains what it did not tell of."""
        self.error = run.error
        for layout in LAYOUTS if run.failed else ():
            self._unmeasured.setdefault(layout.name, f"the process ended: {run.ending}")

    def _refuse(self, error: str) -> None:
        raise UsageError(error)

    def _model(self, trained: list[dict[str, Any]], **values: Any) -> None:
        self._set_trained(trained)
        self.batch, self.steps = values["batch"], values["steps"]

    def _layout_found(
        self, name: str, kept: dict[str, Any] | None = None, reason: str = ""
    ) -> None:
        if kept:
            self._measured[name] = kept
        else:
            self._unmeasured[name] = reason


class ScriptFindings(Findings):
    """What the runs of a script tell."""

    def __init__(self) -> None:
        super().__init__()
        self._unmeasured = {layout.name: _ONLY_PREDICTED for layout in LAYOUTS}
        self._unmeasured["cast masters"] = _OTHER

    def add(self, policy: str, run: RunResult, last: dict[str, Any]) -> None:
        """Takes one run.

        Args:
            policy: What it trained under.
            run: How it went.
            last: What it told last of the bytes that are kept, nothing if it took no step.
        """
        why = ended(run) or ("" if last else _untrained(run))
        if policy == "float32":
            self.error, self.steps = run.error or why, last.get("steps", 0)
            self._set_trained(last.get("trained", []))
        shown = _shown_layout(policy, last)
        if last and shown:
            self._measured[shown.name] = last["kept"]
        elif shown:
            self._unmeasured[shown.name] = why
        reason = "" if run.saved_bytes is not None else why or _NOT_COUNTED
        self.activations.append(Activations(policy, run.saved_bytes, reason=reason))


def _shown_layout(policy: str, last: dict[str, Any]) -> Layout | None:
    """Returns the layout that a run of a script shows; the last policy shows no other one."""
    kept = last.get("kept", {})
    found = {
        "masters": "split" if kept.get("remainder") else "cast",
        "eight_bit": any(
            each["optimizer"] in EIGHT_BIT.values() for each in last.get("trained", [])
        ),
        "release": not kept.get("gradients", 1),
    }
    alike = [each for each in LAYOUTS if each.policy == policy]
    exact = (each for each in alike if all(getattr(each, n) == v for n, v in found.items()))
    return next(exact, None) or next(iter(alike), None)


def ended(run: RunResult) -> str:
    """Returns the last line of a run's error, "" where there was none.

    Example:
        >>> ended(RunResult(policy="float32", error="ValueError: x"))
        'ValueError: x'
    """
    return run.error.splitlines()[-1] if run.error else ""


def _untrained(run: RunResult) -> str:
    return (
        f"no optimizer took a step: {why_untrained(run)}. Name a script that trains, or what "
        "builds the model: halfstep memory FILE.py:CALLABLE"
    )
