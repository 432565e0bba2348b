"""What the shared cases need from halfstep.jax, through public names only."""

from halfstep.jax import all_finite, select_tree
from halfstep.jax.jmp import DynamicLossScale

__all__ = ["DynamicLossScale", "all_finite", "select_tree"]
