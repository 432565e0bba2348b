"""What the shared cases need from halfstep.jax, through public names only."""

from halfstep.jax import (
    all_finite,
    apply_updates,
    clip_by_global_norm,
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
    "global_norm",
    "master",
    "select_tree",
]

master = with_masters
