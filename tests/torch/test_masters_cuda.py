"""Masters on an accelerator: the bits of float32, and nobody waits for the device."""

import pytest
import torch
from torch import nn

from halfstep.torch import keep_masters, prepare
from halfstep.torch._masters._bits import merge, split
from halfstep.torch._masters._kept import true_value

# With "cpu", whatever waits for no device can be tried without one.
DEVICE = "cuda"
OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "capturable": lambda p: torch.optim.Adam(p, lr=1e-3, capturable=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "momentum fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}

pytestmark = pytest.mark.gpu


@pytest.fixture
def no_waiting():
    """Makes every wait for the device an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


def parameters():
    torch.manual_seed(0)
    shapes = ((1000, 300), (300,), (), (16, 8, 3, 3))
    return [nn.Parameter(torch.randn(shape, device=DEVICE) * 0.1) for shape in shapes]


@pytest.mark.parametrize("bucket_bytes", [None, 2**14], ids=["one bucket", "many"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_have_the_bits_of_float32(kind, bucket_bytes):
    half, wide = parameters(), parameters()
    optimizers = [OPTIMIZERS[kind](each) for each in (half, wide)]
    keep_masters(optimizers[0], param_dtype="bfloat16", bucket_bytes=bucket_bytes)
    for _ in range(20):
        for one, other in zip(half, wide, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(half, wide, strict=True):
        assert torch.equal(true_value(one), other)


def test_every_upper_half_comes_back():
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=DEVICE)
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], device=DEVICE).int()
    bits = upper[:, None] * 2**16 + lower
    master = bits.view(torch.float32)
    low = torch.empty_like(master, dtype=torch.bfloat16)
    remainder, out = torch.empty_like(low, dtype=torch.int16), torch.empty_like(master)
    split(master, low, remainder)
    merge(low, remainder, out)
    number = ~master.isnan()
    assert torch.equal(out.view(torch.int32)[number], bits[number])
    assert out[~number].isnan().all()


def test_a_step_waits_for_nothing(no_waiting):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    prepare(model, optimizer, "mixed_bfloat16", masters="split")
    inputs = torch.rand(16, 64, device=DEVICE)
    for number in range(6):
        # The first step makes the state of the optimizer, and may wait.
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def test_masters_move_with_the_model():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    region = prepare(model, optimizer, "mixed_bfloat16", masters="split")
    before = true_value(model.weight)
    model.to(DEVICE)
    assert torch.equal(true_value(model.weight).cpu(), before)
    model(torch.rand(4, 8, device=DEVICE)).sum().backward()
    optimizer.step()
    region.remove()
    assert model.weight.dtype is torch.float32
