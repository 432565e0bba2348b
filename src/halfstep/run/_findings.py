"""Collects what the processes tell that measure memory."""

from collections.abc import Callable
from typing import Any

from halfstep.errors import UsageError
from halfstep.run._footprint import Activations, Footprint, Kept
from halfstep.run._layouts import LAYOUTS, Layout, Trained, predicted, unpredictable
from halfstep.run._runs import RunResult
from halfstep.run._untrained import why_untrained

# The policies of a script whose runs stand for a layout.
_SHOWN_BY = {"float32": "float32", "mixed_bfloat16": "cast masters"}
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
        shown = _SHOWN_BY.values()
        names = [layout.name for layout in LAYOUTS if layout.name not in shown]
        self._unmeasured = dict.fromkeys(names, _ONLY_PREDICTED)

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
        if policy in _SHOWN_BY:
            self._add_layout(_SHOWN_BY[policy], last, why)
        reason = "" if run.saved_bytes is not None else why or _NOT_COUNTED
        self.activations.append(Activations(policy, run.saved_bytes, reason=reason))

    def _add_layout(self, name: str, last: dict[str, Any], why: str) -> None:
        if last:
            self._measured[name] = last["kept"]
        else:
            self._unmeasured[name] = why


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
