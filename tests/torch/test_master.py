import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch._scaler import GradScaler
from halfstep.torch._scaling._gradients import ParameterNames
from halfstep.torch._scaling._master import Masters, widen_gradients

HALF = torch.float16
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=2.0**-6, momentum=0.9),
    "loop": lambda params: torch.optim.AdamW(params, lr=2.0**-9, foreach=False),
    "foreach": lambda params: torch.optim.Adam(params, lr=2.0**-9, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=2.0**-9, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=2.0**-9),
}


def pair(kind, value=1.0):
    """Returns a half parameter and a float32 one, each with an optimizer."""
    parameters = [nn.Parameter(torch.full((4,), value, dtype=d)) for d in (HALF, torch.float32)]
    return [(parameter, OPTIMIZERS[kind]([("weight", parameter)])) for parameter in parameters]


def backward(scaler, parameter, factor=1.0):
    weights = torch.tensor([1.0, 2.0, -0.5, 2.0**-12])
    scaler.scale((parameter.float() * weights * factor).sum()).backward()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", [False, True])
def test_a_half_parameter_follows_its_float32_twin(kind, clip):
    twins, scaler = pair(kind), GradScaler("cpu", init_scale=2.0**14)
    for _ in range(20):
        for parameter, optimizer in twins:
            optimizer.zero_grad()
            backward(scaler, parameter)
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameter, 0.5)
            scaler.step(optimizer)
        scaler.update()
    (half, optimizer), (full, _) = twins
    assert half.dtype is HALF
    assert torch.equal(half, full.half())
    states = [value for value in optimizer.state[half].values() if isinstance(value, torch.Tensor)]
    assert all(value.dtype is torch.float32 for value in states)
    assert list(optimizer.state) == [half]
    assert optimizer.param_groups[0]["params"] == [half]


def test_updates_too_small_for_half_add_up():
    parameter = nn.Parameter(torch.ones(1, dtype=HALF))
    optimizer = torch.optim.SGD([parameter], lr=2.0**-14)
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(16):
        optimizer.zero_grad()
        scaler.scale(-parameter.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert parameter.item() == 1.0 + 2.0**-10


def test_gradients_too_small_for_half_survive_unscaling_and_clipping():
    parameter = nn.Parameter(torch.ones(2, dtype=HALF))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**15)
    scaler.scale((parameter.float() * torch.tensor([2.0**-30, 1.0])).sum()).backward()
    scaler.unscale_(optimizer)
    assert parameter.grad.dtype is torch.float32
    assert parameter.grad.tolist() == [2.0**-30, 1.0]
    assert nn.utils.clip_grad_norm_(parameter, 0.5).item() == 1.0
    assert parameter.grad.tolist() == pytest.approx([2.0**-31, 0.5], rel=1e-5)


def test_the_norm_of_large_half_gradients_is_finite():
    parameter = nn.Parameter(torch.ones(4, dtype=HALF))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale((parameter.float() * 60000.0).sum()).backward()
    scaler.unscale_(optimizer)
    assert nn.utils.clip_grad_norm_(parameter, 1.0).item() == pytest.approx(120000.0, rel=1e-3)


@pytest.mark.parametrize("kind", ["sgd", "fused"])
def test_an_overflow_leaves_parameter_and_state(kind):
    (parameter, optimizer), _ = pair(kind)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, parameter)
    scaler.step(optimizer)
    scaler.update()
    before = parameter.tolist(), str(optimizer.state_dict())
    optimizer.zero_grad()
    backward(scaler, parameter, factor=1e5)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.nonfinite == (("weight", "inf"),)
    assert (parameter.tolist(), str(optimizer.state_dict())) == before
    assert scaler.get_scale() == 4.0


def test_zeroed_gradients_accumulate_in_float32():
    (parameter, optimizer), _ = pair("sgd")
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        backward(scaler, parameter)
        backward(scaler, parameter)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
    assert parameter.grad.dtype is torch.float32


@pytest.mark.parametrize(
    "change",
    [
        lambda parameter: parameter.data.fill_(3.0),
        lambda parameter: setattr(parameter, "data", torch.full((4,), 3.0, dtype=HALF)),
        lambda parameter: nn.init.constant_(parameter, 3.0),
    ],
)
def test_a_change_from_outside_reaches_the_master(change):
    (parameter, optimizer), _ = pair("sgd")
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        backward(scaler, parameter, factor=2.0**-9)
        scaler.step(optimizer)
        scaler.update()
        change(parameter)
    optimizer.state.clear()
    optimizer.zero_grad()
    backward(scaler, parameter, factor=0.0)
    scaler.step(optimizer)
    assert parameter.tolist() == [3.0] * 4


def test_loaded_state_in_half_is_widened():
    (parameter, optimizer), _ = pair("loop")
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        backward(scaler, parameter)
        scaler.step(optimizer)
        scaler.update()
        optimizer.load_state_dict(optimizer.state_dict())
    assert parameter.isfinite().all()


def test_a_weight_beyond_half_saturates():
    parameter = nn.Parameter(torch.full((1,), 65504.0, dtype=HALF))
    optimizer = torch.optim.SGD([parameter], lr=1000.0)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(-parameter.float().sum()).backward()
    scaler.step(optimizer)
    assert parameter.item() == 65504.0


def test_layers_of_both_kinds_train_together():
    model = nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 1))
    model[1].half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = GradScaler("cpu", init_scale=128.0)
    inputs, losses = torch.randn(16, 4), []
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=HALF):
            loss = (model(inputs).float() - 1.0).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model[1].weight.dtype is HALF


def test_a_parameter_that_refuses_a_wider_gradient_is_named(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "grad_dtype", None, raising=False)
    parameter = nn.Parameter(torch.ones(2, dtype=HALF))
    parameter.grad = torch.ones(2, dtype=HALF)
    optimizer = torch.optim.SGD([("act.weight", parameter)])
    with pytest.raises(UsageError, match=r"float16 for act\.weight") as error:
        widen_gradients(optimizer, ParameterNames(None))
    assert "model.float()" in str(error.value)
    assert parameter.grad.dtype is HALF


def test_masters_keep_nothing_alive_and_are_not_copied():
    (parameter, optimizer), _ = pair("sgd")
    masters = Masters()
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.ones(4)
    with masters.step(optimizer):
        assert optimizer.param_groups[0]["params"][0].dtype is torch.float32
    assert len(masters.kept(optimizer)) == 1
    assert pickle.loads(pickle.dumps(masters)).kept(optimizer) == []
    gone = weakref.ref(parameter)
    del parameter, optimizer, _
    gc.collect()
    assert gone() is None


def test_an_error_in_the_optimizer_restores_the_groups():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("broken")

    parameter = nn.Parameter(torch.ones(2, dtype=HALF))
    optimizer = Broken([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(parameter.float().sum()).backward()
    with pytest.raises(ValueError, match="broken"):
        scaler.step(optimizer)
    assert optimizer.param_groups[0]["params"][0] is parameter
