"""Function transforms, second derivatives, hooks, modes and kinds of tensors."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap

from halfstep.torch import autocast
from tests.reports.agreement import tensors


class Net(nn.Module):
    """Three layers with a softmax."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.c(self.b(self.a(x).tanh()).softmax(-1).exp().cumsum(-1))


def _parameters(net):
    return {name: weight.detach() for name, weight in net.named_parameters()}


def _loss(net):
    return lambda weights, x: functional_call(net, weights, (x,)).float().pow(2).mean()


def _penalty(net, x):
    inputs = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net(inputs).float().sum(), inputs, create_graph=True)
    penalty = (gradient.float().norm(2, 1) - 1).pow(2).mean()
    return penalty, torch.autograd.grad(penalty, [net.a.weight, net.b.weight])


def _batched_gradients(net, x):
    inputs = x.clone().requires_grad_()
    outputs = net(inputs)
    ways = torch.eye(12).reshape(12, 3, 4).to(outputs.dtype)
    return torch.autograd.grad(outputs, inputs, ways, is_grads_batched=True)


def _forward_mode(net, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(net(dual))[1]


TRANSFORMS = {
    "grad": lambda net, x: grad(_loss(net))(_parameters(net), x),
    "grad of parameters": lambda net, x: grad(_loss(net))(dict(net.named_parameters()), x),
    "vmap": lambda net, x: vmap(net)(x[:, None]),
    "gradients per sample": lambda net, x: vmap(grad(_loss(net)), (None, 0))(
        _parameters(net), x[:, None]
    ),
    "jvp": lambda net, x: jvp(net, (x,), (torch.ones_like(x),)),
    "jacrev": lambda net, x: jacrev(net)(x),
    "jacfwd": lambda net, x: jacfwd(net)(x),
    "hessian": lambda net, x: hessian(lambda y: net(y).float().sum())(x),
    "ensemble": lambda net, x: vmap(
        lambda weights, buffers, y: functional_call(net, (weights, buffers), (y,)), (0, 0, None)
    )(*stack_module_state([net, net]), x),
    "functionalize": lambda net, x: torch.func.functionalize(net)(x),
    "forward mode": _forward_mode,
    "gradient penalty": _penalty,
    "batched gradients": _batched_gradients,
    "jacobian": lambda net, x: torch.autograd.functional.jacobian(net, x),
    "product with the Hessian": lambda net, x: torch.autograd.functional.hvp(
        lambda y: net(y).float().sum(), x, torch.ones_like(x)
    )[1],
}


# Forward mode has formulas in TorchScript, which warns about itself.
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("cached", [None, True])
def test_a_transform_agrees_with_float32(name, cached, low):
    """torch.func and double backward under autocast fail or use stale casts."""
    net, inputs, transform = Net(), torch.randn(3, 4), TRANSFORMS[name]
    wide = tensors(transform(net, inputs))
    with autocast("cpu", dtype=low, cache_enabled=cached):
        for _ in range(2):
            for one, other in zip(wide, tensors(transform(net, inputs)), strict=True):
                assert torch.allclose(one, other.float(), rtol=0.1, atol=0.1)


def test_a_gradient_penalty_of_a_convolution(low):
    """The critic of a GAN: the second derivative of a convolution."""
    critic = nn.Sequential(nn.Conv2d(1, 4, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(36, 1))
    inputs = torch.ones(2, 1, 5, 5, requires_grad=True)
    with autocast("cpu", dtype=low):
        score = critic(inputs).float().sum()
    (gradient,) = torch.autograd.grad(score, inputs, create_graph=True)
    gradient.flatten(1).float().norm(2, 1).pow(2).mean().backward()
    assert critic[0].weight.grad.isfinite().all()


HOOKS = {
    "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.clone(), lambda tensor: tensor
    ),
    "allow_mutation": lambda: torch.autograd.graph.allow_mutation_on_saved_tensors(),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_saved_tensors_may_be_replaced(hook, low):
    """Offloading activations changes their dtype."""
    net = Net()
    with autocast("cpu", dtype=low), HOOKS[hook]():
        net(torch.randn(3, 4)).float().sum().backward()
    assert net.a.weight.grad.isfinite().all()


def test_module_hooks_run_in_the_region(low):
    """Forward hooks see the half outputs, backward hooks do not change dtypes."""
    net, seen = Net(), []
    net.a.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    net.b.register_full_backward_hook(lambda module, inner, outer: seen.append(outer[0].dtype))
    with autocast("cpu", dtype=low):
        net(torch.randn(3, 4)).float().sum().backward()
    assert seen == [low, low]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_and_deterministic_mode_work(low):
    """Debug modes of PyTorch inside a region."""
    net = Net()
    torch.use_deterministic_algorithms(True)
    try:
        with autocast("cpu", dtype=low), torch.autograd.detect_anomaly():
            rows = torch.zeros(4, 4).index_add(0, torch.tensor([0, 1, 1]), net(torch.randn(3, 4)))
            rows.index_put((torch.tensor([0, 0]),), rows[:2], accumulate=True).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert net.a.weight.grad.isfinite().all()


def test_meta_and_fake_tensors_pass_through(low):
    """Models are built and run on the meta device to count memory."""
    with torch.device("meta"), autocast("cpu", dtype=low):
        assert Net()(torch.randn(3, 4)).device.type == "meta"
    with torch._subclasses.fake_tensor.FakeTensorMode():
        net, inputs = Net(), torch.randn(3, 4)
        with autocast("cpu", dtype=low):
            assert net.a(inputs).dtype == low
            net(inputs).float().sum().backward()


class Tagged(torch.Tensor):
    """A subclass without behaviour."""


class Passing(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_subclasses_and_modes_see_the_casts(low):
    """Tensor subclasses and dispatch modes do not switch autocast off."""
    net, inputs = Net(), torch.randn(3, 4)
    with autocast("cpu", dtype=low):
        tagged = net.a(inputs.as_subclass(Tagged))
        with Passing():
            assert net.a(inputs).dtype == low
    with Passing(), autocast("cpu", dtype=low):
        assert net.a(inputs).dtype == low
    assert type(tagged) is Tagged
    assert tagged.dtype == low


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_pass_through(low):
    """Ragged batches in half."""
    layer = nn.Linear(4, 4)
    ragged = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
    with autocast("cpu", dtype=low):
        assert layer(ragged).dtype == low
        assert layer(ragged).exp().dtype == torch.float32


def test_float64_as_the_default_dtype(low):
    """A program sets float64 as default dtype and uses a half model in places."""
    torch.set_default_dtype(torch.float64)
    try:
        with autocast("cpu", dtype=low):
            outputs = Net()(torch.randn(3, 4))
    finally:
        torch.set_default_dtype(torch.float32)
    assert outputs.dtype == torch.float64
