"""The float32 masters of low-precision variables."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops

from halfstep.keras._stepping._arguments import has_dtype, trainers
from halfstep.keras._stepping._backend import backend

# The largest number of each dtype that gets masters: a master beyond it is not rounded to inf.
_LARGEST = {"bfloat16": float.fromhex("0x1.fep127"), "float16": 65504.0}


class Masters:
    """The masters of an optimizer's variables, by variable.

    Args:
        optimizer: The optimizer that owns the masters.
        variables: The variables that it trains.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self._key = optimizer._var_key
        self._by_key = {self._key(v): _master_of(optimizer, v) for v in variables}
        pairs = [(variable, self._by_key[self._key(variable)]) for variable in variables]
        self._pairs = [(variable, master) for variable, master in pairs if variable is not master]

    def of(self, variables: Iterable[Any]) -> list[Any]:
        """Returns the master of each variable, or the variable where it needs none."""
        return [self._by_key[self._key(variable)] for variable in variables]

    def follow(self) -> None:
        """Takes over what somebody else wrote into a variable."""
        for variable, master in self._pairs:
            kept, given = ops.convert_to_tensor(master), ops.convert_to_tensor(variable)
            same = ops.equal(_rounded(kept, variable), given)
            master.assign(ops.where(same, kept, ops.cast(given, "float32")))

    def write_back(self) -> None:
        """Rounds the masters into their variables."""
        for variable, master in self._pairs:
            variable.assign(_rounded(master, variable))

    def exclude_as_well(self, optimizer: Any) -> None:
        """Excludes the masters of those variables from weight decay that are excluded."""
        for each in trainers(optimizer):
            excluded: set[Any] = getattr(each, "_exclude_from_weight_decay", set())
            excluded |= {self._key(m) for v, m in self._pairs if self._key(v) in excluded}


def _rounded(master: Any, variable: Any) -> Any:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    largest = _LARGEST[dtype]
    return ops.cast(ops.clip(master, -largest, largest), dtype)


def _master_of(optimizer: Any, variable: Any) -> Any:
    """Returns a new master, or the variable itself where it needs none."""
    low = has_dtype(variable, *_LARGEST)
    if not low or optimizer._overwrite_variable_with_gradient(variable):
        return variable
    path = getattr(variable, "path", variable.name)
    master = optimizer.add_variable(
        variable.shape,
        dtype="float32",
        layout=getattr(variable, "_layout", None),
        name=f"{path.replace('/', '_').replace(':', '_')}_master",
    )
    master.constraint = getattr(variable, "constraint", None)
    # Optimizers choose by name: which variables decay, and who trains them.
    master._name, master._path = variable.name, path
    if backend().eager():
        # A graph that is being traced would do so in each run; there, the first step follows.
        master.assign(ops.cast(variable, "float32"))
    return master
