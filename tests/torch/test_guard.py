"""Steps whose outcome only a device knows, driven on the CPU, whose fused kernels skip alike."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from halfstep.errors import NonFiniteError
from halfstep.torch import SkippedStepsWarning, prepare, set_global_policy
from halfstep.torch._regions._guard import Guard

KINDS = {
    "sgd": lambda them: torch.optim.SGD(them, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda them: torch.optim.Adam(them, lr=0.1, fused=True),
    "adamw": lambda them: torch.optim.AdamW(them, lr=0.1, fused=True),
    "adagrad": lambda them: torch.optim.Adagrad(them, lr=0.1, fused=True),
}


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on an accelerator."""

    is_cpu = False


@pytest.fixture(autouse=True)
def elsewhere():
    """Lets what is found about gradients be found on an accelerator."""
    found = Guard._found
    with mock.patch.object(
        Guard, "_found", lambda self, *them: found(self, *them).as_subclass(Elsewhere)
    ):
        yield


class Gain(nn.Module):
    """Multiplies gradients, not values."""

    gain = 1.0

    def forward(self, values):
        return values * self.gain - values.detach() * (self.gain - 1.0)


class Loop:
    def __init__(self, kind="adamw", policy="compute_dtype=float32"):
        self.model = nn.Sequential(nn.Linear(3, 3), Gain(), nn.Linear(3, 1))
        self.optimizer = KINDS[kind](self.model.parameters())
        self.region = prepare(self.model, self.optimizer, policy)

    def run(self, gain=1.0, factor=1.0, touch=lambda model: None):
        self.optimizer.zero_grad()
        self.model[1].gain = gain
        (self.model(torch.ones(2, 3)).mean() * factor).backward()
        touch(self.model)
        self.optimizer.step()

    def state(self):
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])


TOUCHES = {
    "nothing": lambda model: None,
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "numbers": lambda model: [each.grad.nan_to_num_() for each in model.parameters()],
}


@pytest.mark.parametrize("touch", ["nothing", "norm", "numbers"])
@pytest.mark.parametrize("bad", [{"gain": torch.inf}, {"factor": torch.nan}], ids=["gain", "loss"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_kernel_skips(kind, bad, touch):
    loop = Loop(kind)
    for skipped in (False, True, False, True, True):
        before = loop.state()
        loop.run(**(bad if skipped else {}), touch=TOUCHES[touch])
        if skipped:
            torch.testing.assert_close(before, loop.state(), rtol=0, atol=0)
        assert loop.region.last_step.skipped is skipped
    assert (loop.region.history.steps, loop.region.history.skipped) == (5, 3)


@pytest.mark.filterwarnings("ignore::halfstep.torch.UnusedRegionWarning")
def test_parameters_of_several_dtypes_overflow_together():
    """What was found in each kind of gradient is added up, but is one verdict."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1).double())
    both = [model[0].weight, model[1].weight]
    optimizer = torch.optim.AdamW(both, fused=True)
    prepare(model, optimizer, "compute_dtype=float32")
    for value in (1.0, torch.inf):
        before = copy.deepcopy(both)
        for parameter in both:
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
    for parameter, expected in zip(both, before, strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.filterwarnings("ignore::halfstep.torch.SkippedStepsWarning")
def test_the_floor_is_noticed_in_the_end():
    def run():
        for _ in range(200):
            loop.run(gain=torch.inf)

    loop = Loop(policy="compute_dtype=float32, scale=dynamic(min_scale=1024.0)")
    loop.run()
    with pytest.raises(NonFiniteError, match="smallest scale"):
        run()


@pytest.mark.filterwarnings("ignore::halfstep.torch.SkippedStepsWarning")
def test_records_do_not_pile_up():
    loop = Loop()
    for number in range(600):
        loop.run(factor=torch.nan if number % 3 == 1 else 1.0)
    assert len(loop.region._history._waiting) < 300


def test_zero_grad_forgets_what_happened_on_a_device():
    loop = Loop()
    loop.run()
    (loop.model(torch.ones(2, 3)).mean() * torch.nan).backward()
    before = copy.deepcopy(loop.model.state_dict())
    loop.run()
    assert not loop.region.last_step.skipped
    assert not torch.equal(before["0.weight"], loop.model[0].weight)


def test_without_a_region_it_is_told_in_the_end():
    def run():
        for number in range(70):
            parameter.grad = torch.full((2,), torch.nan if number else 1.0)
            optimizer.step()

    parameter = nn.Parameter(torch.ones(2))
    set_global_policy("mixed_bfloat16")
    try:
        optimizer = KINDS["adamw"]([parameter])
        with pytest.warns(SkippedStepsWarning, match="optimizer steps in a row were skipped"):
            run()
    finally:
        set_global_policy("float32")
    assert parameter.isfinite().all()
