"""Clipping whose outcome only a device knows, driven on the CPU, and on a GPU if there is one."""

import copy
import math
from unittest import mock

import pytest
import torch
from torch import nn

from halfstep.torch import GradScaler, prepare
from halfstep.torch._scaling import _clipped_step, _one_pass

FUSED = {
    "sgd": lambda them: torch.optim.SGD(them, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda them: torch.optim.AdamW(them, lr=0.1, fused=True),
}


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on an accelerator, and is not waited for."""

    is_cpu = False
    asked = 0

    def item(self):
        Elsewhere.asked += 1
        return self.as_subclass(torch.Tensor).item()


@pytest.fixture
def elsewhere():
    """Lets norms be known on an accelerator only."""
    norm_of = _one_pass.norm_of
    there = mock.Mock(side_effect=lambda *given: norm_of(*given).as_subclass(Elsewhere))
    with (
        mock.patch.object(_one_pass, "norm_of", there),
        mock.patch.object(_clipped_step, "norm_of", there),
    ):
        Elsewhere.asked = 0
        yield


class RegionLoop:
    def __init__(self, kind, device="cpu"):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3).to(device)
        self.optimizer = FUSED[kind](self.model.parameters())
        self.teller = prepare(self.model, self.optimizer, "compute_dtype=float32")

    def run(self, max_norm, factor=1.0):
        self.optimizer.zero_grad()
        (self.model(torch.ones(2, 4, device=self.model.weight.device)).sum() * factor).backward()
        self.step(max_norm)

    def step(self, max_norm):
        self.teller.clip_grad_norm_(max_norm)
        self.optimizer.step()

    @property
    def norm(self):
        return nn.utils.get_total_norm([each.grad for each in self.model.parameters()]).item()

    def state(self):
        return copy.deepcopy([[*self.model.parameters()], self.optimizer.state_dict()["state"]])


class ScalerLoop(RegionLoop):
    def __init__(self, kind, device="cpu"):
        super().__init__(kind, device)
        self.teller.remove()
        self.teller = GradScaler(device, init_scale=8.0)

    def run(self, max_norm, factor=1.0):
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(2, 4, device=self.model.weight.device)).sum()
        self.teller.scale(loss * factor).backward()
        self.step(max_norm)

    def step(self, max_norm):
        self.teller.step(self.optimizer, max_norm=max_norm)
        self.teller.update()


def assert_clips_and_skips(loop):
    """Drives a loop that has state already."""
    loop.run(0.5)
    assert math.isclose(loop.norm, 0.5, rel_tol=1e-5)
    loop.run(1e4)
    assert math.isclose(loop.norm, math.sqrt(15 * 4), rel_tol=1e-5)
    before = loop.state()
    loop.run(0.5, math.nan)
    torch.testing.assert_close(loop.state(), before, rtol=0, atol=0)
    assert loop.teller.last_step.skipped
    assert math.isnan(loop.teller.last_step.grad_norm)
    loop.run(0.5)
    assert not loop.teller.last_step.skipped
    assert math.isclose(loop.teller.last_step.grad_norm, math.sqrt(15 * 4), rel_tol=1e-5)
    assert (loop.teller.history.steps, loop.teller.history.skipped) == (5, 1)


@pytest.mark.parametrize("make", [RegionLoop, ScalerLoop])
@pytest.mark.parametrize("kind", FUSED)
def test_fused_kernels_clip_and_skip(kind, make, elsewhere):
    loop = make(kind)
    loop.run(0.5)
    Elsewhere.asked = 0
    assert_clips_and_skips(loop)


@pytest.mark.parametrize("make", [RegionLoop, ScalerLoop])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_nobody_asks_for_the_norm(max_norm, make, elsewhere):
    loop = make("adamw")
    loop.run(max_norm)
    Elsewhere.asked = 0
    for _ in range(3):
        loop.run(max_norm)
    # The emulated outcome is asked for where only its device differs from that of the optimizer.
    assert Elsewhere.asked == 0


@pytest.mark.gpu
@pytest.mark.parametrize("make", [RegionLoop, ScalerLoop])
@pytest.mark.parametrize("kind", FUSED)
def test_on_a_gpu(kind, make):
    loop = make(kind, "cuda")
    loop.run(0.5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            loop.run(0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isclose(loop.norm, 0.5, rel_tol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [RegionLoop, ScalerLoop])
@pytest.mark.parametrize("kind", FUSED)
def test_on_a_gpu_kernels_clip_and_skip(kind, make):
    loop = make(kind, "cuda")
    loop.run(0.5)
    assert_clips_and_skips(loop)
