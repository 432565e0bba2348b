"""Every private name of Keras that halfstep uses, checked once at import."""

from importlib import import_module
from typing import Any

import keras

from halfstep.errors import UnsupportedVersionError

SUPPORTED = "3.15"

_NEEDED = (
    "backend.AutocastScope",
    "backend.compute_output_spec",
    "backend.core.remat",
    "backend.get_keras_mask",
    "backend.is_float_dtype",
    "backend.set_keras_mask",
    "backend.common.global_state.get_global_attribute",
    "backend.common.tensor_attributes.get_tensor_attr",
    "backend.common.tensor_attributes.set_tensor_attr",
    "layers.Layer._clear_losses",
    "layers.Layer._flatten_layers",
    "layers.Layer.stateless_call",
    "layers.Layer.compute_dtype",
    "models.Functional",
    "ops.nn._normalize",
    "ops.operation.Operation.__call__",
    "regularizers.regularizers.L1L2",
    "trainers.compile_utils.CompileLoss",
    "trainers.trainer.Trainer.compile",
    "utils.module_utils.jax",
    "utils.module_utils.tensorflow",
    "utils.tracking.no_automatic_dependency_tracking",
)


def found(path: str) -> Any:
    """Returns the object of a dotted path below `keras.src`.

    Raises:
        UnsupportedVersionError: This version of Keras has no such object.

    Example:
        >>> found("layers.Softmax").__name__
        'Softmax'
    """
    here = import_module("keras.src")
    try:
        for name in path.split("."):
            here = getattr(here, name)
    except AttributeError:
        raise UnsupportedVersionError(
            f"halfstep.keras needs Keras {SUPPORTED} or later, got {keras.__version__}, which lacks"
            f" keras.src.{path}. Install a supported Keras, or a newer halfstep."
        ) from None
    return here


for _path in _NEEDED:
    found(_path)

backend = found("backend")
CompileLoss = found("trainers.compile_utils.CompileLoss")
Functional = found("models.Functional")
Layer = found("layers.Layer")
Operation = found("ops.operation.Operation")
Trainer = found("trainers.trainer.Trainer")
get_tensor_attr = found("backend.common.tensor_attributes.get_tensor_attr")
set_tensor_attr = found("backend.common.tensor_attributes.set_tensor_attr")
# Loaded where they are used: one of them may not be installed.
jax = found("utils.module_utils.jax")
tensorflow = found("utils.module_utils.tensorflow")
untracked = found("utils.tracking.no_automatic_dependency_tracking")
