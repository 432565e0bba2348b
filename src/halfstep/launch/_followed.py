"""A script in a process of its own, and whoever shows how it goes."""

import json
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from halfstep.launch._asked import explain_exit
from halfstep.launch._process import run_process
from halfstep.launch._stdin import SharedInput

_KEPT_LINES = 20


class Watcher(Protocol):
    """Whoever shows how it goes."""

    def update(self, text: str) -> None:
        """Learns how far the script is."""

    def output(self, line: str) -> None:
        """Learns what the script printed."""


class Enough(Exception):
    """All that was to be known is: the script need not go on."""


class Ended(NamedTuple):
    """How a process ended.

    Args:
        failure: Why it failed, empty if it did not or need not go on.
        stopped: Whether a person stopped it.
    """

    failure: str = ""
    stopped: bool = False


def follow(
    job: Mapping[str, Any],
    *,
    child: str,
    on_message: Callable[[dict[str, Any]], None],
    watcher: Watcher,
) -> Ended:
    """Runs a job and takes what it tells, until it ends or that is enough.

    Args:
        job: The fields of `Job`, the descriptor apart.
        child: The name of the module whose `main` does the job in the process.
        on_message: Takes each message, and raises `Enough` to end the process.
        watcher: Learns what the script prints.
    """
    kept = deque[str](maxlen=_KEPT_LINES)

    def on_output(line: str) -> None:
        kept.append(line)
        watcher.output(line)

    try:
        code = run_process(
            job,
            SharedInput(),
            child=child,
            on_event=lambda line: on_message(json.loads(line)),
            on_output=on_output,
        )
    except Enough:
        return Ended()
    except KeyboardInterrupt:
        return Ended(stopped=True)
    return Ended(explain_exit(code, kept) if code else "")
