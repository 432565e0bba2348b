"""What the shared cases need from halfstep.keras, through public names only."""

from halfstep.keras import LossScaleOptimizer, MasterOptimizer, diagnose, set_global_policy

__all__ = ["LossScaleOptimizer", "diagnose_keras", "master_optimizer", "set_policy"]

set_policy = set_global_policy


def master_optimizer(optimizer):
    """The same optimizer, with float32 masters of low-precision variables."""
    return MasterOptimizer(optimizer)


def diagnose_keras(model, inputs):
    """The first fault as a dict, empty if there is none."""
    first = diagnose(model, inputs).first
    return {} if first is None else {**first.to_dict(), "op": first.operation}
