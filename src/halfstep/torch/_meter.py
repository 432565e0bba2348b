"""Measures a model that a function builds: what each way of training it keeps."""

import gc
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import UsageError
from halfstep.torch._makers import describe, eight_bit_maker, maker
from halfstep.torch._memory import STEPS, Inputs, activation_bytes, measure_layout


class Meter:
    """Builds a model anew for each measurement, so that none sees what another one left.

    Args:
        build: Returns a module, or a module and example inputs.
        name: What the user calls it.
        optimizer: The optimizer's name and options.
        seed: What the generators are seeded with before.

    Example:
        >>> meter = Meter(lambda: nn.Linear(4, 1), "build", "Adam")
        >>> meter.about()["batch"], meter.layout()["state"]
        (None, 48)
    """

    def __init__(self, build: Callable[[], Any], name: str, optimizer: str, seed: int = 0) -> None:
        self._build, self._name, self._seed = build, name, seed
        self._text, self._make = optimizer, maker(optimizer)

    def about(self) -> dict[str, Any]:
        """Returns what is trained and with how large a batch, as JSON types."""
        model, inputs = self._built()
        trained = [each for each in model.parameters() if each.requires_grad]
        if not trained:
            raise UsageError(
                f"memory needs a model with parameters to train, got {type(model).__name__} from "
                f"{self._name}. Return the model that you train."
            )
        return {
            "trained": describe([self._optimizer(trained)], model.modules()),
            "steps": STEPS,
            "has_inputs": inputs is not None,
            "batch": inputs and inputs.batch,
        }

    def _optimizer(self, trained: list[nn.Parameter]) -> Optimizer:
        try:
            return self._make(trained)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"--optimizer needs one that takes its options and the model's parameters, got "
                f"{self._text!r}: {error}. Correct the options, or name another optimizer."
            ) from error

    def layout(
        self,
        policy: str = "float32",
        masters: str = "cast",
        eight_bit: str = "",
        release: bool = False,
    ) -> dict[str, Any]:
        """Returns the bytes that one way of training keeps, as JSON types.

        Args:
            policy: What to train under.
            masters: How the exact weights are kept.
            eight_bit: The name of the optimizer with states in 8 bits, "" for the own one.
            release: Whether gradients are applied and freed inside of the backward pass.
        """
        make = eight_bit_maker(self._text, eight_bit) if eight_bit else self._make
        model, inputs = self._built()
        found = measure_layout(model, make, inputs, policy=policy, masters=masters, release=release)
        return asdict(found)

    def activations(self, policy: str) -> dict[str, Any]:
        """Returns the bytes that one pass keeps for backward, as JSON types.

        Args:
            policy: What the model runs under.
        """
        model, inputs = self._built()
        assert inputs is not None
        found = {"bytes": activation_bytes(model, inputs, policy)}
        return found | self._by_sample(policy, found["bytes"])

    def _by_sample(self, policy: str, once: int) -> dict[str, float]:
        """Returns what twice the batch adds per sample, and what it does not add to."""
        model, inputs = self._built()
        if inputs is None or not inputs.batch:
            return {}
        try:
            twice = activation_bytes(model, inputs.doubled(), policy)
        except Exception:  # of a model that cannot do with another batch
            return {}
        return {"per_sample": (twice - once) / inputs.batch, "fixed": 2 * once - twice}

    def _built(self) -> tuple[nn.Module, Inputs | None]:
        gc.collect()  # hooks that hold what they hang on keep the model before this one
        torch.manual_seed(self._seed)
        result = self._build()
        model, *rest = result if isinstance(result, tuple) else (result,)
        if not isinstance(model, nn.Module) or len(rest) > 1:
            raise UsageError(
                f"memory needs a callable that returns a torch.nn.Module, or one and its inputs, "
                f"got {_kind(result)} from {self._name}. Return the model, or (model, inputs)."
            )
        return model, Inputs.of(rest[0]) if rest else None


def _kind(result: Any) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(each).__name__ for each in result)})"
    return type(result).__name__
