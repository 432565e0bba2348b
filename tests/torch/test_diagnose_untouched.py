"""A diagnosis leaves everything as it was, also where the step fails."""

import random

import numpy
import pytest
import torch
from torch import nn

from halfstep import Rules
from halfstep.core import subscribe
from halfstep.errors import PolicyError, UsageError
from halfstep.torch import GradScaler, autocast, diagnose, prepare, set_global_policy
from halfstep.torch._engine._state import KERNELS
from halfstep.torch._watch import watch
from tests.torch import faulty_models as faulty
from tests.torch.faulty_models import autocasts, inside, mean


class Remembers(nn.Module):
    """Changes its buffers in every way that there is."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.average, self.feed = torch.zeros(8), faulty.Feed()

    def forward(self, x):
        self.seen += random.random() + float(numpy.random.rand())
        hidden = self.drop(self.norm(x))
        with torch.no_grad():
            self.average.lerp_(hidden.mean(0).float(), 0.5)
        return self.feed(hidden * 0 + 1)


def state_of(model, *more):
    tensors = [*model.parameters(), *model.buffers(), model[0].average, *more]
    held = [each for value in tensors for each in (value, value.grad) if each is not None]
    generators = (random.getstate(), numpy.random.get_state()[1].tolist())
    return [each.clone() for each in held], torch.get_rng_state(), generators


def assert_same(before, after):
    for old, new in zip(before[0], after[0], strict=True):
        assert torch.equal(old, new)
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]


def case(grads=True):
    model, batch = nn.Sequential(Remembers()), torch.randn(4, 8, requires_grad=True)
    for each in [*model.parameters(), batch] if grads else ():
        each.grad = torch.full_like(each, 3.0)
    return model, batch


@pytest.mark.parametrize("way", ["policy", "ours", "native", "everywhere", "float32"])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_process(way, training):
    model, batch = case()
    model.train(training)
    before = state_of(model, batch)
    loss_fn = inside(autocasts[way]) if way in autocasts else mean
    if way == "everywhere":
        set_global_policy("mixed_float16")
    try:
        how = {"policy": "mixed_float16"} if way == "policy" else {}
        assert bool(diagnose(model, batch, loss_fn, **how)) is (way != "float32")
    finally:
        set_global_policy("float32")
    assert_same(before, state_of(model, batch))
    assert "forward" not in vars(model)


@pytest.mark.parametrize("release", [True, False])
def test_a_region(release):
    model, batch = case(grads=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    region = prepare(model[0].feed, optimizer, release=release)
    before, kept = state_of(model), {**vars(region)}
    cells = [each.clone() for each in region._cells]
    assert diagnose(model, batch, mean)
    assert_same(before, state_of(model))
    assert vars(region) == kept
    assert all(map(torch.equal, cells, region._cells))
    assert (region.scale, region.history.steps) == (65536.0, 0)


def test_a_scaler_that_a_loss_uses():
    model, batch = case()
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    before = scaler.state_dict()

    def scaled(model, batch):
        with autocast("cpu", dtype=torch.float16):
            return scaler.scale(mean(model, batch))

    assert diagnose(model, batch, scaled)
    assert scaler.state_dict() == before


def test_the_kernels_of_rules_that_were_tried_are_gone():
    rules = Rules().with_rule("aten::mul", "full", reason="-")
    model = nn.Sequential(faulty.Norm())
    before = KERNELS.names()
    assert (
        "aten::mul" in diagnose(model, torch.ones(2, 8), mean, policy="mixed_float16").first.remedy
    )
    assert KERNELS.names() == before
    with autocast("cpu", dtype=torch.float16, rules=rules):
        assert (torch.ones(2).half() * torch.ones(2).half()).dtype is torch.float32


def test_nobody_is_told_of_losses():
    model, batch = case()
    events = []
    unsubscribe, end = subscribe(lambda event, values: events.append(event)), watch()
    try:
        diagnose(model, batch, mean, policy="mixed_float16")
    finally:
        end()
        unsubscribe()
    assert not events


def test_hooks_on_accumulated_gradients_do_not_run():
    model, batch = case(grads=False)
    ran = []
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(ran.append)
    diagnose(model, batch, mean, policy="mixed_float16")
    assert not ran
    mean(model, batch).backward()
    assert len(ran) == len([*model.parameters()])


@pytest.mark.parametrize("grads", [True, False])
def test_after_an_error(grads):
    model, batch = case(grads)
    before = state_of(model, batch)

    def fails(model, batch):
        mean(model, batch.detach()).backward()
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        diagnose(model, batch, fails, policy="mixed_float16")
    assert_same(before, state_of(model, batch))
    assert "forward" not in vars(model)


def test_where_gradients_are_off():
    model, batch = nn.Sequential(faulty.Selected()), torch.ones(2, 4)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert diagnose(model, batch, mean).first.phase == "backward"


def test_a_step_runs_as_it_does_unseen():
    model, batch, losses = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(2, 4), []

    def noted(model, batch):
        losses.append(mean(model, batch))
        return losses[-1]

    loss_fn = inside(autocast, noted)
    diagnose(model, batch, loss_fn)
    assert loss_fn(model, batch).item() == losses[0].item()


def test_what_is_refused():
    model, batch = nn.Linear(4, 1), torch.ones(2, 4)
    with pytest.raises(UsageError, match=r"needs a torch.nn.Module, got Tensor"):
        diagnose(batch, batch, mean)
    with pytest.raises(UsageError, match=r"all of its parameters, got 0.weight"):
        diagnose(nn.Sequential(nn.LazyLinear(4)), batch, mean)
    with pytest.raises(UsageError, match=r"a loss of one number, got a tensor of shape \(2, 1\)"):
        diagnose(model, batch, lambda model, batch: model(batch))
    with pytest.raises(UsageError, match=r"needs a loss_scale above zero, got 0"):
        diagnose(model, batch, mean, loss_scale=0)
    for context in (autocast("cpu"), torch.autocast("cpu")):
        with context, pytest.raises(UsageError, match=r"called outside of autocast"):
            diagnose(model, batch, mean)
    with pytest.raises(PolicyError):
        diagnose(model, batch, mean, policy="mixed_float17")
    prepare(model)
    with pytest.raises(UsageError, match=r"not prepared to run it by policy='mixed_bfloat16'"):
        diagnose(model, batch, mean, policy="mixed_bfloat16")
