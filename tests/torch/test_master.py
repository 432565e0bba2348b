import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch import keep_masters
from halfstep.torch._masters._kept import kept_tensors, true_value
from halfstep.torch._scaler import GradScaler
from halfstep.torch._scaling._gradients import ParameterNames
from halfstep.torch._scaling._master import RoundedStateWarning
from halfstep.torch._scaling._widening import widen_gradients

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


@pytest.mark.parametrize("end", ["step", "update"])
@pytest.mark.parametrize("fused", ["loop", "fused"])
def test_gradients_are_half_again_afterwards(end, fused):
    (parameter, optimizer), _ = pair(fused)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, parameter)
    gradient = parameter.grad
    scaler.unscale_(optimizer)
    assert parameter.grad.dtype is parameter.grad_dtype is torch.float32
    parameter.grad.mul_(2.0)
    if end == "step":
        scaler.step(optimizer)
    else:
        scaler.update()
    assert parameter.grad is gradient
    assert parameter.grad_dtype is HALF
    assert gradient.tolist() == [2.0, 4.0, -1.0, 2.0**-11]


def test_gradients_that_are_gone_or_sparse_afterwards():
    embedding = nn.Embedding(4, 2, sparse=True).half()
    (parameter, optimizer), _ = pair("sgd")
    sparse = torch.optim.SGD(embedding.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        sparse.zero_grad()
        backward(scaler, parameter)
        scaler.scale(embedding(torch.tensor([1, 1])).float().sum()).backward()
        scaler.unscale_(optimizer)
        optimizer.zero_grad()
        scaler.step(sparse)
        scaler.update()
        assert (parameter.grad, parameter.grad_dtype) == (None, HALF)
        assert embedding.weight.grad.dtype is HALF


def test_zeroed_gradients_can_be_accumulated():
    (parameter, optimizer), _ = pair("sgd")
    scaler = GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        backward(scaler, parameter)
        backward(scaler, parameter)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)
        assert parameter.grad.tolist() == [0.0] * 4
    assert parameter.tolist()[0] < 1.0


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


def step(scaler, parameter, optimizer):
    optimizer.zero_grad()
    backward(scaler, parameter, factor=2.0**-9)
    scaler.step(optimizer)
    scaler.update()
    return parameter.tolist()


def test_an_optimizer_that_was_stepped_loads_masters_and_state():
    (parameter, optimizer), _ = pair("loop")
    scaler = GradScaler("cpu", init_scale=8.0)
    step(scaler, parameter, optimizer)
    saved = copy.deepcopy((parameter.detach(), optimizer.state_dict()))
    expected = [step(scaler, parameter, optimizer) for _ in range(20)]
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    parameter.data.copy_(saved[0])
    assert [step(scaler, parameter, optimizer) for _ in range(20)] == expected


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_resumes_exactly_with_masters_from_the_beginning(kind):
    (parameter, optimizer), _ = pair(kind)
    scaler = GradScaler("cpu", init_scale=8.0)
    step(scaler, parameter, optimizer)
    saved = copy.deepcopy((parameter.detach(), optimizer.state_dict()))
    expected = [step(scaler, parameter, optimizer) for _ in range(20)]
    again = nn.Parameter(saved[0])
    fresh = OPTIMIZERS[kind]([again])
    keep_masters(fresh)
    fresh.load_state_dict(saved[1])
    other = GradScaler("cpu", init_scale=8.0)
    assert [step(other, again, fresh) for _ in range(20)] == expected


def test_many_scalers_hook_an_optimizer_once():
    (parameter, optimizer), _ = pair("loop")
    for _ in range(3):
        step(GradScaler("cpu", init_scale=8.0), parameter, optimizer)
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1


def test_masters_that_a_fresh_optimizer_has_rounded_are_refused():
    (parameter, optimizer), _ = pair("loop")
    step(GradScaler("cpu", init_scale=8.0), parameter, optimizer)
    fresh = OPTIMIZERS["loop"]([parameter])
    fresh.load_state_dict(optimizer.state_dict())
    with pytest.raises(UsageError, match=r"call keep_masters\(optimizer\), and load"):
        step(GradScaler("cpu", init_scale=8.0), parameter, fresh)


def test_state_that_was_rounded_is_told_of():
    parameter = nn.Parameter(torch.ones(4, dtype=HALF))
    optimizer = OPTIMIZERS["loop"]([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scaler = GradScaler("cpu", init_scale=8.0)
    with pytest.warns(RoundedStateWarning, match=r"\(exp_avg, exp_avg_sq\) was rounded") as told:
        step(scaler, parameter, optimizer)
    assert "keep_masters(optimizer)" in str(told[0].message)
    assert told[0].filename == __file__
    step(scaler, parameter, optimizer)
    assert parameter.isfinite().all()


def test_state_is_loaded_as_ever_for_float32_parameters():
    twins, scaler = pair("loop"), GradScaler("cpu", init_scale=8.0)
    parameters = [parameter for parameter, _ in twins]
    optimizer = OPTIMIZERS["loop"](parameters)
    for parameter in parameters:
        backward(scaler, parameter)
    scaler.step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == str(saved)


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


def test_masters_keep_nothing_alive():
    (parameter, optimizer), _ = pair("sgd")
    scaler = GradScaler("cpu", init_scale=8.0)
    step(scaler, parameter, optimizer)
    assert len(kept_tensors(optimizer)) == 1
    pickle.dumps(scaler)
    gone = weakref.ref(parameter)
    del parameter, optimizer, _
    gc.collect()
    assert gone() is None


def test_whoever_keeps_masters_takes_those_of_a_scaler_over():
    twins, scaler = pair("loop"), GradScaler("cpu", init_scale=8.0)
    for number in range(6):
        for parameter, optimizer in twins:
            if number == 3 and parameter.dtype is HALF:
                keep_masters(optimizer)
            step(scaler, parameter, optimizer)
    (half, _), (full, _) = twins
    assert torch.equal(true_value(half), full)


def test_parameters_in_bfloat16_are_left_alone():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = OPTIMIZERS["loop"]([parameter, nn.Parameter(torch.ones(1, dtype=HALF))])
    step(GradScaler("cpu", init_scale=8.0), parameter, optimizer)
    assert optimizer.state[parameter]["exp_avg"].dtype is torch.bfloat16
    assert len(kept_tensors(optimizer)) == 1


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
