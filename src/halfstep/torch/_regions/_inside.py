"""What a forward sees in place of a tensor, and what it may do to it."""

from collections.abc import Sequence

from torch import Tensor, nn

from halfstep.errors import UsageError
from halfstep.torch._private import in_transform, preserved_version
from halfstep.torch._regions._tree import is_parameter


def resemble(inside: Sequence[Tensor], outside: Sequence[Tensor]) -> None:
    """Gives tensors inside the Python attributes of those outside, and makes parameters of some."""
    for new, old in zip(inside, outside, strict=True):
        if vars(old):
            vars(new).update(vars(old))
        if is_parameter(old):
            # What `isinstance(..., nn.Parameter)` asks for.
            new._is_param = True


class Changes:
    """What a forward changes in place, of tensors that had entered.

    Args:
        inside: The tensors inside.
        outside: The same tensors outside.
    """

    def __init__(self, inside: Sequence[Tensor], outside: Sequence[Tensor]) -> None:
        self._inside = inside
        self._outside = outside
        self._nodes = [each.grad_fn for each in inside]

    def results(self) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs of a tensor outside and what a forward computed into it."""
        pairs = zip(self._outside, self._inside, self._nodes, strict=True)
        found = [(old, new) for old, new, node in pairs if new.grad_fn is not node]
        for old, _ in found:
            if old.is_leaf:
                raise UsageError(
                    "A leaf tensor that requires a gradient cannot be changed in place, got one of "
                    f"shape {tuple(old.shape)}. Pass a copy of it to the model."
                )
        return found

    def take_over_data(self) -> None:
        """Lets parameters have what the forward has assigned to their `data`."""
        if in_transform():
            return
        for old, new in zip(self._outside, self._inside, strict=True):
            if type(old) is nn.Parameter and new.data_ptr() != old.data_ptr():
                old.data = new.data


def rewrite(outside: Tensor, result: Tensor) -> None:
    """Makes a tensor outside the result that its memory holds already."""
    with preserved_version(outside):
        outside.copy_(result)
