"""What goes on in a region between entering and leaving, for one call."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.errors import UsageError
from halfstep.torch._regions import _call
from halfstep.torch._regions._crossing import left
from halfstep.torch._regions._inside import Changes, resemble, rewrite
from halfstep.torch._regions._slots import Slot, arguments, attributes, new_results, put
from halfstep.torch._regions._strays import (
    is_outside,
    refuse_half,
    refuse_strays,
    strays,
    taken_back,
)
from halfstep.torch._regions._tree import cast, cast_tensor, tensors_in, with_tensors
from halfstep.torch._saved import leave_out

if TYPE_CHECKING:
    from halfstep.torch._region import Region


def _is_in(tensor: Tensor, tensors: Iterable[Tensor]) -> bool:
    return any(tensor is each for each in tensors)


def _matching(tensor: Tensor, ones: list[Tensor], others: list[Tensor]) -> Tensor:
    """Returns what stands in the second list where the first one has the tensor, or itself."""
    return next((other for one, other in zip(ones, others, strict=False) if one is tensor), tensor)


# So many calls are looked at each, later ones ever more rarely.
_FIRST_CALLS = 64


class Passage:
    """One call of a region, from where its tensors have entered.

    Args:
        region: The region.
        modules: Its modules.
        outside: The tensors that have entered.
        inside: The same tensors as the region sees them.
    """

    def __init__(
        self,
        region: "Region",
        modules: list[nn.Module],
        outside: list[Tensor],
        inside: list[Tensor],
    ) -> None:
        self.inside = inside
        self._region = region
        self._modules = modules
        self._outside = outside
        if not torch.compiler.is_compiling():
            self._begin()

    def _begin(self) -> None:
        """Prepares what a graph needs not, since it holds the tensors themselves."""
        resemble(self.inside, self._outside)
        leave_out(self._outside)
        self._call = _call.current()
        self._call.module = self._region._module
        self._changes = Changes(self.inside, self._outside)

    def leave(self, output: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Lets the output out, and with it whatever else the forward has computed into a place."""
        kept = attributes(self._modules) + arguments(args, kwargs)
        kept = new_results(kept, self._outside)
        if torch.compiler.is_compiling():
            return self._left(output, kept, [])
        self._changes.take_over_data()
        if self._call.hooks:
            kept = [place for place in kept if not is_outside(place[2], self._call)]
        results = [tensor for *_, tensor in kept] + self._new(tensors_in(output))
        if not self._is_sound(results):
            return cast(output, self._region._output_dtype)
        return self._left(output, kept, self._changes.results())

    def _new(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns those that have a gradient and are not, as they are, what had entered."""
        return [each for each in tensors if each.requires_grad and not _is_in(each, self._outside)]

    def _left(self, output: Any, kept: list[Slot], changed: list[tuple[Tensor, Tensor]]) -> Any:
        """Lets everything out together, and puts it where the same tensor was inside."""
        inside: list[Tensor] = []
        for each in [*(place[2] for place in kept), *self._new(tensors_in(output))]:
            if not _is_in(each, inside):
                inside.append(each)
        results = [tensor for _, tensor in changed]
        outside = left(inside + results, self._region._output_dtype)
        for place in kept:
            put(place, _matching(place[2], inside, outside))
        for (tensor, _), value in zip(changed, outside[len(inside) :], strict=True):
            rewrite(tensor, value)
        return self._with_outside(output, inside, outside)

    def _with_outside(self, output: Any, inside: list[Tensor], outside: list[Tensor]) -> Any:
        """Returns the output with what has left; what is a place too has it already."""
        dtype, done = self._region._output_dtype, [*outside, *self._outside]
        tensors = [_matching(each, inside, outside) for each in tensors_in(output)]
        return with_tensors(
            output, [each if _is_in(each, done) else cast_tensor(each, dtype) for each in tensors]
        )

    def _is_sound(self, results: list[Tensor]) -> bool:
        """Looks whether gradients are scaled within the region and nowhere else."""
        region = self._region
        region._calls += 1
        if region._calls > _FIRST_CALLS and region._calls.bit_count() > 1:
            return True
        found = strays(results, self.inside, self._call)
        try:
            # Inside of another region parameters with masters are not seen as such.
            if region._masters is None:
                refuse_half(self._modules[0])
            refuse_strays(region._leaves.again(found))
        except UsageError as error:
            region._on_misfit(error)
            return False
        if found and not region._leaves.are_own:
            # Unscaled until it is known whose they are.
            self._call.end_scaling()
            return False
        return self._spares_hooks(results)

    def _spares_hooks(self, results: list[Tensor]) -> bool:
        """Looks whether the forward read what its hooks had kept; if so, those get the inside."""
        call = self._call
        own = {call.hooks[node] for node in taken_back(results, call) if node in call.hooks}
        self._region._own_hooks |= own
        if own:
            call.end_scaling()
        return not own
