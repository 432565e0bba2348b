"""Masters lie where their parameters lie, and complete the dtype that they were made for."""

import copy

import pytest
import torch
from torch import nn

from halfstep.torch import keep_masters
from halfstep.torch._masters._kept import true_value

O = torch.optim  # noqa: E741
OPTIMIZERS = {
    "sgd fused": lambda p: O.SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9),
    "adamw fused": lambda p: O.AdamW(p, lr=0.01, fused=True),
    "adam": lambda p: O.Adam(p, lr=0.01),
}
FORMATS = [torch.contiguous_format, torch.channels_last]
# Half-ulps: how far a master may be from its parameter, as a part of it.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def step_both(half, optimizer, wide, other):
    gradient = torch.randn_like(half.weight).detach()
    half.weight.grad = gradient.to(half.weight.grad_dtype)
    wide.weight.grad = gradient.float()
    optimizer.step()
    other.step()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bucket_bytes", [None, 800])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("before", FORMATS)
@pytest.mark.parametrize("after", FORMATS)
def test_masters_follow_the_memory_format(kind, bucket_bytes, dtype, before, after):
    half = nn.Conv2d(4, 8, 3, bias=False).to(memory_format=before)
    wide = copy.deepcopy(half)
    optimizer, other = OPTIMIZERS[kind](half.parameters()), OPTIMIZERS[kind](wide.parameters())
    keep_masters(optimizer, param_dtype=dtype, bucket_bytes=bucket_bytes)
    for model in (half, wide):
        model.to(memory_format=after)
    for _ in range(4):
        step_both(half, optimizer, wide, other)
    assert torch.equal(true_value(half.weight), wide.weight.detach())


def test_whole_masters_follow_the_memory_format():
    half = nn.Conv2d(4, 8, 3, bias=False)
    with torch.no_grad():
        half.weight[0] *= 2.0**-20
    wide = copy.deepcopy(half)
    optimizer = O.SGD(half.parameters(), lr=2.0**-20, fused=True)
    other = O.SGD(wide.parameters(), lr=2.0**-20, fused=True)
    masters = keep_masters(optimizer, param_dtype="float16", bucket_bytes=128)
    assert [each.dtype for each in masters.tensors()] == [torch.float32]
    for model in (half, wide):
        model.to(memory_format=torch.channels_last)
    for _ in range(4):
        step_both(half, optimizer, wide, other)
    assert torch.equal(true_value(half.weight), wide.weight.detach())


@pytest.mark.parametrize("first", ROUNDING)
@pytest.mark.parametrize("then", ROUNDING)
def test_masters_follow_the_dtype_of_the_model(first, then):
    model = nn.Linear(64, 64)
    optimizer = O.SGD(model.parameters(), lr=0.1)
    keep_masters(optimizer, param_dtype=first)
    weight = model.to(then).weight
    low = weight.detach().float()
    allowed = (low.abs() * ROUNDING[then]).clamp(min=2.0**-25)
    assert ((true_value(weight) - low).abs() <= allowed).all()
    name = {torch.bfloat16: "bfloat16_remainder", torch.float16: "float16_remainder"}[then]
    assert optimizer.state_dict()["state"].get(0, {name: None}).keys() <= {name, "float16_master"}
