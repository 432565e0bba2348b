"""On an accelerator nothing waits for the device unless somebody asks."""

import pytest
import torch

from halfstep.errors import NonFiniteError
from halfstep.torch._scaler import GradScaler

pytestmark = pytest.mark.gpu


class Loop:
    def __init__(self, fused, scaler_class=GradScaler, dtype=torch.float32, **options):
        self.parameter = torch.nn.Parameter(torch.ones(4, device="cuda", dtype=dtype))
        named = [("weight", self.parameter)]
        self.optimizer = torch.optim.AdamW(named, lr=0.125, fused=fused)
        self.scaler = scaler_class("cuda", **{"init_scale": 8.0, **options})

    def run(self, factor=1.0, poison=None):
        self.optimizer.zero_grad()
        self.scaler.scale((self.parameter.float() ** 2).sum() * factor).backward()
        if poison is not None:
            self.parameter.grad[0] = poison
        self.scaler.step(self.optimizer)
        self.scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_a_trace_equals_torch(fused):
    loops = [Loop(fused, kind, growth_interval=2) for kind in (GradScaler, torch.amp.GradScaler)]
    for poison in (None, None, torch.inf, None, torch.nan, None, None, None):
        for loop in loops:
            loop.run(poison=poison)
    ours, theirs = loops
    assert ours.scaler.state_dict() == theirs.scaler.state_dict()
    assert torch.equal(ours.parameter, theirs.parameter)
    assert (ours.scaler.history.steps, ours.scaler.history.skipped) == (8, 2)


def test_a_fused_step_does_not_wait_for_the_device():
    loop = Loop(fused=True)
    loop.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            loop.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not loop.scaler.last_step.skipped


def test_a_skipped_first_step_of_a_fused_optimizer_leaves_no_state():
    parameter = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.125, momentum=0.9, fused=True)
    scaler = GradScaler("cuda", init_scale=8.0)
    for poison in (torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((parameter.float() ** 2).sum()).backward()
        parameter.grad[0] *= poison
        scaler.step(optimizer)
        scaler.update()
        assert bool(optimizer.state) is (poison == 1.0)
    assert parameter.tolist() == [0.75] * 4


def test_gradients_of_float16_parameters_are_float16_again_and_still_known():
    loop = Loop(fused=True, dtype=torch.float16)
    loop.run()
    loop.run(poison=torch.inf)
    assert loop.parameter.grad.dtype is torch.float16
    assert loop.scaler.last_step.nonfinite == (("weight", "inf"),)


def test_a_skip_is_told_when_asked():
    loop = Loop(fused=True)
    loop.run(poison=torch.inf)
    record = loop.scaler.last_step
    assert record.nonfinite == (("weight", "inf"),)
    assert (record.skipped, record.reason, record.scale) == (True, "gradients held inf", 8.0)
    assert loop.scaler.get_scale() == 4.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_bad_loss_leaves_the_scale_alone(fused):
    loop = Loop(fused)
    loop.run(factor=torch.nan)
    assert loop.scaler.get_scale() == 8.0
    assert loop.scaler.last_step.loss_nonfinite


@pytest.mark.filterwarnings("ignore::halfstep.core.SkippedStepsWarning")
def test_the_floor_is_noticed_in_the_end():
    def run():
        loop = Loop(fused=True, min_scale=1.0)
        for _ in range(64):
            loop.run(poison=torch.inf)

    with pytest.raises(NonFiniteError, match="smallest scale"):
        run()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_low_precision_parameters(fused, dtype):
    loop = Loop(fused, dtype=dtype)
    for poison in (None, torch.inf, None):
        loop.run(poison=poison)
    assert loop.parameter.isfinite().all()
    assert loop.scaler.history.skipped == 1
