"""Masters: any optimizer, in half precision, gives the bits that it gives in float32."""

import pytest
import torch
from torch import nn

from halfstep.torch._master import keep_masters
from halfstep.torch._masters._kept import true_value

HALF = (torch.bfloat16, torch.float16)
O = torch.optim  # noqa: E741
OPTIMIZERS = {
    "sgd": lambda p: O.SGD(p, lr=0.01),
    "momentum": lambda p: O.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "momentum fused": lambda p: O.SGD(p, lr=0.01, momentum=0.9, fused=True, weight_decay=0.01),
    "momentum foreach": lambda p: O.SGD(p, lr=0.01, momentum=0.9, foreach=True),
    "adam": lambda p: O.Adam(p, lr=1e-3),
    "adam amsgrad": lambda p: O.Adam(p, lr=1e-3, amsgrad=True),
    "adamw": lambda p: O.AdamW(p, lr=1e-3),
    "adamw foreach": lambda p: O.AdamW(p, lr=1e-3, foreach=True),
    "adamw fused": lambda p: O.AdamW(p, lr=1e-3, fused=True),
    "adam fused amsgrad": lambda p: O.Adam(p, lr=1e-3, fused=True, amsgrad=True),
    "adagrad": lambda p: O.Adagrad(p, lr=0.01),
    "adagrad fused": lambda p: O.Adagrad(p, lr=0.01, fused=True),
    "rmsprop": lambda p: O.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "nadam": lambda p: O.NAdam(p, lr=1e-3),
    "radam": lambda p: O.RAdam(p, lr=1e-3),
    "adamax": lambda p: O.Adamax(p, lr=1e-3),
    "adadelta": lambda p: O.Adadelta(p),
    "asgd": lambda p: O.ASGD(p, lr=0.01),
    "rprop": lambda p: O.Rprop(p, lr=0.01),
    "adafactor": lambda p: O.Adafactor(p, lr=0.01),
}
SHAPES = ((33, 20), (17,), (), (8, 3, 2, 2), (40, 3))


def twins(make, dtype, **settings):
    """Returns parameters in half precision with masters, and the same ones in float32."""
    wide = [nn.Parameter(torch.randn(shape) * 0.5) for shape in SHAPES]
    wide[3].data = wide[3].data.contiguous(memory_format=torch.channels_last)
    half = [nn.Parameter(each.detach().clone()) for each in wide]
    groups = [{"params": half[:2]}, {"params": half[2:], "lr": 0.02}]
    optimizers = make(groups), make([{"params": wide[:2]}, {"params": wide[2:], "lr": 0.02}])
    masters = keep_masters(optimizers[0], param_dtype=dtype, **settings)
    return (half, optimizers[0]), (wide, optimizers[1]), masters


def step_both(one, other, missing=None):
    for number, (half, wide) in enumerate(zip(one[0], other[0], strict=True)):
        gradient = (torch.randn_like(half) * 0.1).detach()
        half.grad = None if number == missing else gradient.to(half.grad_dtype)
        wide.grad = None if number == missing else gradient.float()
    one[1].step()
    other[1].step()


def assert_equal(one, other):
    for half, wide in zip(one[0], other[0], strict=True):
        assert torch.equal(true_value(half), wide.detach())
        expected = one[1].state[half], other[1].state[wide]
        assert expected[0].keys() == expected[1].keys()
        for key, value in expected[1].items():
            same = expected[0][key]
            assert torch.equal(same, value) if isinstance(value, torch.Tensor) else same == value


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("bucket_bytes", [None, 128])
def test_200_steps_have_the_bits_of_float32(kind, dtype, bucket_bytes):
    one, other, _ = twins(OPTIMIZERS[kind], dtype, bucket_bytes=bucket_bytes)
    for number in range(200 if dtype == "bfloat16" else 20):
        step_both(one, other, missing=number % 7)
    assert_equal(one, other)
    assert all(each.dtype in HALF for each in one[0])
    groups = one[1].param_groups
    assert [*map(id, groups[0]["params"] + groups[1]["params"])] == [*map(id, one[0])]
