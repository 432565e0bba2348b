"""What the shared cases need from halfstep.keras, through public names only."""

from halfstep.keras import LossScaleOptimizer, MasterOptimizer, set_global_policy

__all__ = ["LossScaleOptimizer", "master_optimizer", "set_policy"]

set_policy = set_global_policy


def master_optimizer(optimizer):
    """The same optimizer, with float32 masters of low-precision variables."""
    return MasterOptimizer(optimizer)
