"""Low-precision variables, trained as float32."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from halfstep.keras._masters import Masters
from halfstep.keras._stepping._arguments import refuse_wrapped, trainers, variables_for
from halfstep.keras._stepping._backend import backend, untraced


@keras.saving.register_keras_serializable(package="halfstep")
class MasterOptimizer(keras.optimizers.Optimizer):
    """Trains variables in bfloat16 or float16 as if they were float32.

    Another optimizer trains a float32 master of each such variable, with its state in float32,
    and the variable becomes the rounded master. Other variables are trained as they are. A variable
    that somebody else changed, for instance by loading weights, gives its master the new value.

    Args:
        optimizer: The optimizer that trains, which sees float32 variables and gradients.
        name: The name of the optimizer.

    Raises:
        UsageError: If the optimizer scales the loss: that one goes around this one.

    Example:
        >>> import keras
        >>> weight = keras.Variable([256.0], dtype="bfloat16")
        >>> optimizer = MasterOptimizer(keras.optimizers.SGD(1.0))
        >>> for _ in range(4):
        ...     optimizer.apply([keras.ops.array([0.5], dtype="bfloat16")], [weight])
        >>> weight.numpy().tolist()
        [254.0]
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, name: str | None = None) -> None:
        wrappers = (keras.optimizers.LossScaleOptimizer, MasterOptimizer)
        refuse_wrapped(optimizer, MasterOptimizer, wrappers)
        super().__init__(learning_rate=0.0, name=name)
        self.optimizer = optimizer

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the masters, and the variables of the other optimizer for them.

        Args:
            variables: The variables to train.
        """
        self._masters = Masters(self, variables)
        self._masters.exclude_as_well(self.optimizer)
        with keras.name_scope(self.optimizer.name, caller=self.optimizer):
            self.optimizer.build(self._masters.of(variables))
        super().build(list(variables))

    @property
    def variables(self) -> list[Any]:
        """The masters and the variables of the other optimizer."""
        return [*self._variables, *self.optimizer.variables]

    @untraced
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Takes a step with the masters and rounds them into the variables.

        Args:
            grads: One gradient for each variable; None where there is none.
            trainable_variables: Their variables, by default those of `build`.

        Raises:
            UsageError: If the first call names no variables, or they do not match the gradients.
        """
        grads = list(grads)
        if not grads:
            return
        variables = variables_for(self, grads, trainable_variables)
        self._masters.follow()
        wide = [None if grad is None else backend().widened(grad) for grad in grads]
        self.optimizer.apply(wide, self._masters.of(variables))
        self._masters.write_back()

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Ends a training, as `fit` does: averages become the weights.

        Args:
            var_list: The variables of the model.
        """
        self.optimizer.finalize_variable_values(self._masters.of(var_list))
        if any(optimizer.use_ema for optimizer in trainers(self.optimizer)):
            self._masters.write_back()

    @property
    def iterations(self) -> Any:
        """The number of steps of the other optimizer."""
        return self.optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the other optimizer."""
        return self.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.optimizer.learning_rate = learning_rate

    @property
    def loss_scale_factor(self) -> Any:
        """The constant scale of the other optimizer, which it takes out again by itself."""
        return self.optimizer.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: Any) -> None:
        # Keras' own constructor sets it before there is another optimizer.
        if "optimizer" in self.__dict__:
            self.optimizer.loss_scale_factor = factor

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss as the other optimizer scales it.

        Args:
            loss: A tensor or a number.
        """
        return self.optimizer.scale_loss(loss)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Keeps the other optimizer from decaying some variables.

        Args:
            var_list: Variables of the model.
            var_names: Parts of their names.
        """
        self.optimizer.exclude_from_weight_decay(var_list, var_names)

    def get_config(self) -> dict[str, Any]:
        """Returns the settings, with the other optimizer in them."""
        inner = keras.saving.serialize_keras_object(self.optimizer)
        return {"name": self.name, "optimizer": inner}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> "MasterOptimizer":
        """Returns the optimizer of a configuration.

        Args:
            config: What `get_config` returned.
            custom_objects: Classes by the names in the configuration.
        """
        inner = keras.saving.deserialize_keras_object(config["optimizer"], custom_objects)
        return cls(inner, name=config["name"])
