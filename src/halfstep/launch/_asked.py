"""What can be asked for, and what is said of a process that failed."""

from collections.abc import Sequence
from signal import SIGKILL

from halfstep.core import AUTO, Auto, Policy, is_auto
from halfstep.errors import UsageError
from halfstep.launch._runs import ending_text

# What a front-end can compute in; asked of the text, because no framework is loaded here.
_RUNNABLE = ("float32", "bfloat16", "float16")


def runnable_policy(text: str, command: str) -> Policy | Auto:
    """Returns the policy of a text, or says why nothing can be trained under it.

    Args:
        text: What the user wrote.
        command: Who says so.
    """
    if is_auto(text):
        return AUTO
    policy = Policy.parse(text)
    if policy.compute_dtype not in _RUNNABLE:
        raise UsageError(
            f"{command} needs a policy with compute_dtype {', '.join(_RUNNABLE)}, got {text!r}. "
            "Write --policy float32 for the most precise one."
        )
    return policy


def explain_exit(exit_code: int, output: Sequence[str]) -> str:
    """Returns why a process without a traceback failed."""
    hint = " The system may have run out of memory." if exit_code == -SIGKILL else ""
    verb = "was" if exit_code < 0 else "ended with"
    return "\n".join([*output, f"The process {verb} {ending_text(exit_code)}.{hint}"])
