import copy

import pytest
import torch
from torch import nn

from halfstep.torch._scaler import GradScaler

CALLS = {
    "position": lambda scaler, optimizer, closure: scaler.step(optimizer, closure),
    "name": lambda scaler, optimizer, closure: scaler.step(optimizer, closure=closure),
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.002, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=4),
    "search": lambda params: torch.optim.LBFGS(params, max_iter=4, line_search_fn="strong_wolfe"),
}


def rosenbrock(parameter):
    return (1 - parameter[0]) ** 2 + 10 * (parameter[1] - parameter[0] ** 2) ** 2


def start(optimizer):
    parameter = nn.Parameter(torch.tensor([-1.0, 1.5]))
    return parameter, OPTIMIZERS[optimizer]([parameter])


def plain_run(kind, steps):
    parameter, optimizer = start(kind)

    def closure():
        optimizer.zero_grad()
        loss = rosenbrock(parameter)
        loss.backward()
        return loss

    return parameter, [optimizer.step(closure).item() for _ in range(steps)]


def scaled_closure(scaler, optimizer, parameter, bad=()):
    """Returns a closure whose evaluations with these numbers overflow."""
    calls = []

    def closure():
        calls.append(None)
        optimizer.zero_grad()
        loss = rosenbrock(parameter)
        scaler.scale(loss).backward()
        if len(calls) in bad:
            parameter.grad[0] = torch.inf
        return loss

    return closure


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("set_up", [False, True])
def test_a_closure_gives_what_it_gives_without_a_scaler(kind, call, set_up):
    expected, losses = plain_run(kind, 5)
    parameter, optimizer = start(kind)
    scaler = GradScaler("cpu")
    closure = scaled_closure(scaler, optimizer, parameter)
    got = []
    for _ in range(5):
        if set_up:
            closure()
        got.append(CALLS[call](scaler, optimizer, closure).item())
        scaler.update()
        assert not scaler.last_step.skipped
    assert got == losses
    assert torch.equal(parameter, expected)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("number", [1, 3])
def test_a_bad_evaluation_undoes_the_whole_step(kind, number):
    parameter, optimizer = start(kind)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.step(optimizer, scaled_closure(scaler, optimizer, parameter))
    scaler.update()
    before = parameter.tolist(), copy.deepcopy(optimizer.state_dict())
    evaluations = 4 if "max_iter" in optimizer.defaults else 1
    closure = scaled_closure(scaler, optimizer, parameter, bad=(min(number, evaluations),))
    assert scaler.step(optimizer, closure) is None
    scaler.update()
    assert scaler.last_step.skipped
    assert scaler.last_step.reason == "gradients held inf"
    assert scaler.get_scale() == 4.0
    assert (parameter.tolist(), str(optimizer.state_dict())) == (before[0], str(before[1]))
    assert scaler.step(optimizer, scaled_closure(scaler, optimizer, parameter)) is not None
    scaler.update()
    assert not scaler.last_step.skipped


def test_a_bad_evaluation_undoes_what_a_step_did_to_the_groups():
    class Annealed(torch.optim.SGD):
        def step(self, closure=None):
            group = self.param_groups[0]
            group["lr"] *= 0.5
            group["rate"].mul_(0.5)
            group["betas"].append(0.5)
            group["steps"] = 1
            return closure()

    parameter = nn.Parameter(torch.ones(2))
    optimizer, rate = Annealed([parameter], lr=1.0), torch.ones(())
    optimizer.param_groups[0] |= {"rate": rate, "betas": [0.9]}
    before = copy.deepcopy(optimizer.param_groups)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.step(optimizer, scaled_closure(scaler, optimizer, parameter, bad=(1,)))
    assert scaler.last_step.skipped
    assert str(optimizer.param_groups) == str(before)
    assert optimizer.param_groups[0]["rate"] is rate
    assert optimizer.param_groups[0]["params"][0] is parameter


def test_a_bad_loss_in_a_closure_leaves_the_scale_alone():
    parameter, optimizer = start("lbfgs")
    scaler = GradScaler("cpu", init_scale=8.0)

    def closure():
        optimizer.zero_grad()
        loss = (parameter * torch.nan).sum()
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    assert (scaler.last_step.reason, scaler.get_scale()) == ("the loss was not finite", 8.0)


def test_bad_gradients_from_before_the_step_skip_it():
    parameter, optimizer = start("sgd")
    scaler = GradScaler("cpu", init_scale=8.0)
    closure = scaled_closure(scaler, optimizer, parameter)
    closure()
    parameter.grad[0] = torch.inf
    assert scaler.step(optimizer, closure) is None
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_a_closure_may_clip():
    parameter, optimizer = start("sgd")
    scaler = GradScaler("cpu")

    def closure():
        optimizer.zero_grad()
        loss = rosenbrock(parameter)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([parameter], 1.0)
        return loss

    before = parameter.detach().clone()
    scaler.step(optimizer, closure)
    scaler.update()
    assert (parameter - before).norm().item() == pytest.approx(0.002, rel=1e-3)


def test_a_closure_that_does_not_scale():
    parameter, optimizer = start("sgd")
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))

    def closure():
        optimizer.zero_grad()
        loss = rosenbrock(parameter)
        loss.backward()
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    assert torch.equal(parameter, plain_run("sgd", 1)[0])


def test_no_closure_is_no_closure():
    for call in (
        lambda scaler, optimizer: scaler.step(optimizer, None),
        lambda scaler, optimizer: scaler.step(optimizer, closure=None),
    ):
        parameter, optimizer = start("sgd")
        scaler = GradScaler("cpu")
        scaler.scale(parameter.sum()).backward()
        call(scaler, optimizer)
        scaler.update()
        assert parameter.tolist() == pytest.approx([-1.002, 1.498])


def test_a_half_parameter_with_a_closure():
    parameter = nn.Parameter(torch.tensor([-1.0, 1.5], dtype=torch.float16))
    optimizer = torch.optim.LBFGS([parameter], lr=0.5, max_iter=4)
    scaler = GradScaler("cpu", init_scale=64.0)
    closure = scaled_closure(scaler, optimizer, parameter)
    losses = []
    for _ in range(6):
        losses.append(scaler.step(optimizer, closure).item())
        scaler.update()
    assert losses[-1] < losses[0] / 4
    assert parameter.dtype is torch.float16
    before = parameter.tolist()
    assert scaler.step(optimizer, scaled_closure(scaler, optimizer, parameter, bad=(2,))) is None
    assert parameter.tolist() == before
