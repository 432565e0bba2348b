"""A policy that was found by measuring, and the file that keeps it."""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from halfstep.core import _plan_file
from halfstep.core._evidence import Candidate, Machine, Measured
from halfstep.core._policy import Policy
from halfstep.core._reading import plain
from halfstep.core._skips import levels_to_user
from halfstep.errors import MissingFileError, PlanError

SUFFIX = ".toml"


@dataclass(frozen=True)
class Plan:
    """A policy, where it was found to be the best one, and the measurements that say so.

    It is kept as a TOML file that a person can read and edit. Whoever takes a policy takes a plan,
    or the path of its file, too.

    Args:
        policy: The policy that was chosen.
        machine: Where.
        candidates: The policies that were timed, the chosen one first.
        measured: The operations, those first that take the longest.
        made: The date, year first.

    Example:
        >>> plan = Plan(Policy.named("mixed_bfloat16"), Machine("cpu", "AMD EPYC"), (
        ...     Candidate("mixed_bfloat16", 0.010), Candidate("float32", 0.015)))
        >>> plan.speedup
        1.5
        >>> Plan.parse(plan.to_toml()) == plan
        True
    """

    policy: Policy
    machine: Machine
    candidates: tuple[Candidate, ...] = ()
    measured: tuple[Measured, ...] = ()
    made: str = ""

    @property
    def speedup(self) -> float | None:
        """How many times as fast a step is as in float32, None where that was not measured.

        Example:
            >>> Plan(Policy.named("float32"), Machine("cpu", "x")).speedup
        """
        chosen, wide = self._chosen_and_wide
        return wide.seconds / chosen.seconds if chosen and wide else None

    @property
    def saved(self) -> float | None:
        """What is kept for backward, over what float32 keeps, None where that is not known.

        Example:
            >>> Plan(Policy.named("float32"), Machine("cpu", "x")).saved
        """
        chosen, wide = self._chosen_and_wide
        if chosen is None or wide is None or not wide.saved_bytes:
            return None
        return chosen.saved_bytes / wide.saved_bytes

    @property
    def _chosen_and_wide(self) -> tuple[Candidate | None, Candidate | None]:
        wide = (each for each in self.candidates if each.policy == "float32")
        return next(iter(self.candidates), None), next(wide, None)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data.

        Example:
            >>> Plan(Policy.named("float32"), Machine("cpu", "x")).to_dict()["policy"]
            'float32'
        """
        parts = ("machine", "candidates", "measured", "made")
        return {"policy": str(self.policy), **{name: plain(getattr(self, name)) for name in parts}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the plan of a dict that `to_dict` made.

        Raises:
            PlanError: A key or a value that cannot be.

        Example:
            >>> plan = Plan(Policy.named("float32"), Machine("cpu", "x"))
            >>> Plan.from_dict(plan.to_dict()) == plan
            True
        """
        return cls(**_plan_file.read_plain(cls, data))

    def to_toml(self) -> str:
        """Returns the text of its file.

        Example:
            >>> print(Plan(Policy.named("float32"), Machine("cpu", "x")).to_toml().splitlines()[2])
            [policy]
        """
        # Unlike JSON, TOML has numbers for inf and NaN.
        return _plan_file.write(self.policy, dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: str, name: str = "The plan") -> Self:
        """Reads the text of a file.

        Args:
            text: The text.
            name: What errors call it, such as the path of the file.

        Raises:
            PlanError: A key, a rule or a value that cannot be; it says in which line.

        Example:
            >>> Plan.parse("[polcy]", "my.toml")
            Traceback (most recent call last):
            halfstep.errors.PlanError: my.toml, line 1, column 2: A plan needs keys among policy, \
rules, machine, candidates, measured, made, got 'polcy'. Did you mean 'policy'?
        """
        return cls(**_plan_file.read(text, name))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file.

        Raises:
            MissingFileError: There is none.
            PlanError: It cannot be read, or is not a plan; it says in which line.

        Example:
            >>> Plan.load("none.toml")
            Traceback (most recent call last):
            halfstep.errors.MissingFileError: A plan needs a file that exists, got 'none.toml'. \
Write one with `halfstep plan train.py`.
        """
        try:
            # Editors on Windows put a mark before the text, which TOML does not know.
            text = Path(path).read_text("utf-8-sig")
        except FileNotFoundError:
            raise MissingFileError(
                f"A plan needs a file that exists, got {os.fspath(path)!r}. Write one with "
                "`halfstep plan train.py`."
            ) from None
        except UnicodeDecodeError:
            raise PlanError(
                f"A plan needs a file in TOML, got {os.fspath(path)!r}, which is no text."
            ) from None
        except OSError as error:
            raise PlanError(
                f"A plan needs a file that can be read, got {os.fspath(path)!r}: {error.strerror}."
            ) from None
        return cls.parse(text, os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "plan.toml")
            >>> Plan(Policy.named("float32"), Machine("cpu", "x")).save(path)
            >>> print(Policy.of(path))
            float32
        """
        Path(path).write_text(self.to_toml(), "utf-8")


def plan_of(value: object) -> Plan | None:
    """Returns the plan that somebody gave as a policy, None if it is no plan.

    Args:
        value: A plan, a path, a text that ends in `.toml`, or anything else.

    Example:
        >>> plan_of("mixed_bfloat16") is None
        True
    """
    if isinstance(value, Plan):
        return value
    if isinstance(value, os.PathLike):
        return Plan.load(value)
    is_path = isinstance(value, str) and value.rstrip().endswith(SUFFIX)
    return Plan.load(str(value).strip()) if is_path else None


class StalePlanWarning(UserWarning):
    """A plan is followed on another machine, or with other versions, than it was made for.

    Example:
        >>> issubclass(StalePlanWarning, UserWarning)
        True
    """


def tell_if_stale(plan: Plan, now: Machine) -> None:
    """Warns where a machine is not the one that a plan was made for.

    Args:
        plan: The plan.
        now: The machine.

    Example:
        >>> tell_if_stale(Plan(Policy.named("float32"), Machine("cpu", "x")), Machine("cpu", "x"))
    """
    found = plan.machine.differences(now)
    if found and plan.machine.device:
        text = (
            f"This plan was made elsewhere: {'; '.join(found)}. Its rules hold, but what it says "
            "of speed may not. Make it anew with `halfstep plan`."
        )
        warnings.warn(StalePlanWarning(text), stacklevel=levels_to_user())
