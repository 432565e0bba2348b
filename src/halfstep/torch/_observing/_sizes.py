"""How large the numbers of a tensor are, and whether they are finite, whatever it consists of."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from halfstep.torch._observing._counting import numbers_in


def is_finite(tensor: Tensor) -> Tensor:
    """Returns whether all numbers of a tensor are finite, on its device.

    Args:
        tensor: A tensor of any layout; one that stores no such numbers is.

    Example:
        >>> is_finite(torch.tensor([1.0, complex(0.0, math.inf)])), is_finite(torch.empty(0))
        (tensor(False), tensor(True))
    """
    found = [each.isfinite().all() for each in _numbers(tensor)]
    return torch.stack(found).all() if found else torch.tensor(True)


def largest(tensor: Tensor) -> Tensor:
    """Returns the largest magnitude in a tensor, inf and NaN included, on its device.

    Args:
        tensor: A tensor of any layout; 0 for one that stores no such numbers.

    Example:
        >>> largest(torch.tensor([1.0, -3.0]).to_sparse()), largest(torch.empty(0))
        (tensor(3.), tensor(0.))
    """
    found = [torch.linalg.vector_norm(each, math.inf) for each in _numbers(tensor)]
    return torch.stack(found).amax() if found else torch.zeros(())


def norm_of(tensor: Tensor) -> Tensor:
    """Returns the norm of a tensor, on the host.

    Args:
        tensor: A tensor of any layout; 0 for one that stores no such numbers.

    Example:
        >>> norm_of(torch.tensor([complex(3.0, 4.0)]))
        tensor(5., dtype=torch.float64)
    """
    found = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in _numbers(tensor)]
    return torch.stack([torch.zeros((), dtype=torch.float64), *(it.cpu() for it in found)]).norm()


def _numbers(tensor: Tensor) -> Iterator[Tensor]:
    # What is stored twice for one place of a sparse tensor is to be added up.
    whole = tensor.detach()
    whole = whole.coalesce() if whole.layout is torch.sparse_coo else whole
    return (each.float() if each.itemsize == 1 else each for each in numbers_in(whole))
