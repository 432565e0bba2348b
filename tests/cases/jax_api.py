"""What the shared cases need from halfstep.jax, through public names only."""

from halfstep.jax import (
    all_finite,
    apply_updates,
    clip_by_global_norm,
    diagnose,
    global_norm,
    select_tree,
    with_masters,
)
from halfstep.jax.jmp import DynamicLossScale

__all__ = [
    "DynamicLossScale",
    "all_finite",
    "apply_updates",
    "clip_by_global_norm",
    "diagnose_jax",
    "global_norm",
    "master",
    "select_tree",
]

master = with_masters


def diagnose_jax(fn, *args):
    """Returns the first fault of a function or its gradient, or nothing."""
    first = diagnose(fn, *args).first
    return (
        {}
        if first is None
        else {"op": first.operation, "phase": first.phase, "scope": first.module}
    )
