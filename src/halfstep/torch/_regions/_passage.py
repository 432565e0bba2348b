"""What goes on in a region between entering and leaving, for one call."""

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
from halfstep.torch._regions._tree import cast, tensors_in
from halfstep.torch._saved import leave_out

if TYPE_CHECKING:
    from halfstep.torch._region import Region

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
        if not self._is_sound(tensors_in(output) + [tensor for *_, tensor in kept]):
            return cast(output, self._region._output_dtype)
        return self._left(output, kept, self._changes.results())

    def _left(self, output: Any, kept: list[Slot], changed: list[tuple[Tensor, Tensor]]) -> Any:
        results = [tensor for *_, tensor in kept], [tensor for _, tensor in changed]
        output, (values, written) = left((output, results), self._region._output_dtype)
        for place, value in zip(kept, values, strict=True):
            put(place, value)
        for (tensor, _), value in zip(changed, written, strict=True):
            rewrite(tensor, value)
        return output

    def _is_sound(self, results: list[Tensor]) -> bool:
        """Looks whether gradients are scaled within the region and nowhere else."""
        region = self._region
        region._calls += 1
        if region._calls > _FIRST_CALLS and region._calls.bit_count() > 1:
            return True
        found = strays(results, self.inside)
        try:
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
