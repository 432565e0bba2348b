"""Norms on a CPU: who computes them, and that they have the bits of PyTorch's."""

import platform

import pytest
import torch

from halfstep.torch._native._kernel import kernel
from halfstep.torch._scaling import _norms

LARGE = 2**15


@pytest.mark.skipif(platform.machine() != "x86_64", reason="PyTorch's vectors have 8 lanes there")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_adds_up_squares_as_pytorch_does(dtype):
    compiled = kernel() or pytest.skip("needs a C compiler")
    assert _norms._adds_up_alike(compiled)
    tensors = [torch.randn(size).to(dtype) for size in (2**17 + 3, 9, LARGE, LARGE + 1, 2)]
    expected = [torch.linalg.vector_norm(each.float()) for each in tensors]
    assert all(map(torch.equal, _norms._norms(compiled, tensors), expected))


@pytest.mark.parametrize("kind", [torch.Tensor, type("Sub", (torch.Tensor,), {})])
def test_only_plain_tensors_are_added_up_by_the_kernel(kind):
    compiled = kernel() or pytest.skip("needs a C compiler")
    tensors = [torch.ones(LARGE).as_subclass(kind)]
    assert _norms._kernel_for(tensors) is (compiled if kind is torch.Tensor else None)


def test_small_gradients_are_left_to_pytorch():
    assert _norms._kernel_for([torch.ones(LARGE - 1)] * 3) is None
