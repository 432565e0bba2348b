"""What regions know about a step."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from halfstep.torch._scaling._gradients import ParameterNames
from halfstep.torch._scaling._records import Facts
from halfstep.torch._scaling._steps import Lazy

if TYPE_CHECKING:
    from halfstep.torch._region import Region

ARRIVED = "the gradient that reached the model was not finite"


def facts_of(regions: list["Region"], norm: Lazy[float | None]) -> Facts:
    """Returns what regions know about a step besides its gradients."""
    names = ParameterNames(*filter(None, (region._module() for region in regions)))
    foreign = [region._cells.foreign.clone() for region in regions if region._scaled]
    if not foreign:
        return Facts(names, norm=norm)

    def arrived() -> bool:
        return any(each.item() for each in foreign)

    return Facts(names, scale_of(regions), arrived, ARRIVED, norm)


def scale_of(regions: Iterable["Region"]) -> Lazy[float]:
    """Returns the scale of the first region that has one, or what will tell it."""
    for region in regions:
        if region._scaled:
            scale = region._cells.scale
            return scale.item() if scale.is_cpu else scale.clone().item
    return 1.0
