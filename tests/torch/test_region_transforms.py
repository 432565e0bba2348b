"""The transforms of `torch.func` on a prepared model give what they give on a plain one."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from halfstep.torch import prepare

# The derivatives that PyTorch decomposes in forward mode are scripted.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

FLOAT32 = "compute_dtype=float32"
TOLERANCE = {
    FLOAT32: 1e-6,
    "float32": 0.0,
    "mixed_bfloat16": 0.06,
    "compute_dtype=float16,scale=static(64.0)": 0.02,
}
ALL = pytest.mark.parametrize("policy", TOLERANCE)


def network(policy=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    if policy:
        prepare(model, policy=policy)
    return model


def inputs(count=5):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0))


def detached(model):
    return {name: each.detach() for name, each in model.named_parameters()}


def loss_of(model):
    return lambda parameters, values: functional_call(model, parameters, values).square().mean()


def gradient(model):
    return grad(loss_of(model))(detached(model), inputs())


def with_value(model):
    gradients, value = torch.func.grad_and_value(loss_of(model))(detached(model), inputs())
    return gradients, value


def per_sample(model):
    return vmap(grad(loss_of(model)), in_dims=(None, 0))(detached(model), inputs()[:, None])


def reverse_jacobian(model):
    return vmap(jacrev(model))(inputs())


def reverse_jacobian_of_parameters(model):
    return jacrev(lambda them: functional_call(model, them, inputs(2)))(detached(model))


def forward_jacobian(model):
    return vmap(jacfwd(model))(inputs())


def second_derivatives(model):
    return vmap(hessian(lambda values: model(values).square().sum()))(inputs())


def product_with_a_jacobian(model):
    return jvp(model, (inputs(),), (torch.ones(5, 4),))


def product_of_parameters(model):
    parameters = detached(model)
    ones = {name: torch.ones_like(each) for name, each in parameters.items()}
    return jvp(lambda them: functional_call(model, them, inputs()), (parameters,), (ones,))


def product_from_behind(model):
    out, pull = vjp(model, inputs())
    return out, pull(torch.ones(5, 3) * 1e-4)


def gradient_of_a_gradient(model):
    def penalty(parameters, values):
        return grad(lambda them: loss_of(model)(parameters, them))(values).square().sum()

    return grad(penalty)(detached(model), inputs())


def ensemble(model):
    stacked = {name: torch.stack([each, 2 * each]) for name, each in detached(model).items()}
    values = inputs()
    return vmap(lambda them: functional_call(model, them, values))(stacked)


def jacobian_of_autograd(model):
    return torch.autograd.functional.jacobian(model, inputs(2))


def vectorised_jacobian_of_autograd(model):
    return torch.autograd.functional.jacobian(model, inputs(2), vectorize=True)


def hessian_of_autograd(model):
    return torch.autograd.functional.hessian(lambda them: model(them).square().sum(), inputs(1))


def product_of_autograd(model):
    return torch.autograd.functional.vjp(model, inputs(2), torch.ones(2, 3))


def hessian_product_of_autograd(model):
    scalar = lambda them: model(them).square().sum()  # noqa: E731
    return torch.autograd.functional.hvp(scalar, inputs(2), torch.ones(2, 4))


def batched_backward(model):
    values = inputs(2).requires_grad_()
    out = model(values).flatten()
    return torch.autograd.grad(out, values, torch.eye(6), is_grads_batched=True)


TRANSFORMS = {
    each.__name__: each
    for each in (
        gradient,
        with_value,
        per_sample,
        reverse_jacobian,
        reverse_jacobian_of_parameters,
        forward_jacobian,
        second_derivatives,
        product_with_a_jacobian,
        product_of_parameters,
        product_from_behind,
        gradient_of_a_gradient,
        ensemble,
        jacobian_of_autograd,
        vectorised_jacobian_of_autograd,
        hessian_of_autograd,
        product_of_autograd,
        hessian_product_of_autograd,
        batched_backward,
    )
}


def compare(expected, got, policy):
    one, other = (torch.utils._pytree.tree_flatten(each) for each in (expected, got))
    assert one[1] == other[1]
    for wanted, value in zip(one[0], other[0], strict=True):
        assert value.dtype is wanted.dtype
        error = (value - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)
        assert error.item() <= TOLERANCE[policy]


@ALL
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_gives_what_it_gives_on_a_plain_model(transform, policy):
    transform = TRANSFORMS[transform]
    compare(transform(network()), transform(network(policy)), policy)


@ALL
def test_a_transform_leaves_the_model_able_to_train(policy):
    model, plain = network(policy), network()
    before = [id(each) for each in model.parameters()]
    per_sample(model)
    assert [id(each) for each in model.parameters()] == before
    for each in (model, plain):
        each(inputs()).square().mean().backward()
        assert [parameter.grad is None for parameter in each.parameters()] == [False] * 4
    expected, got = ([p.grad for p in each.parameters()] for each in (plain, model))
    compare(expected, got, policy)


def test_a_transform_leaves_the_scale_alone():
    model = network()
    region = prepare(model, policy="compute_dtype=float16,scale=dynamic(growth_interval=1)")
    before = region.state_dict()
    per_sample(model)
    gradient(model)
    assert region.state_dict() == before


def test_per_sample_gradients_of_a_convolution():
    def run(policy):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
        if policy:
            prepare(model, policy=policy)
        values = torch.randn(3, 1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        return vmap(grad(loss_of(model)), in_dims=(None, 0))(detached(model), values)

    compare(run(None), run(FLOAT32), FLOAT32)


def test_functional_call_outside_of_a_transform_trains_what_it_is_given():
    model = network("compute_dtype=float16,scale=static(64.0)")
    mine = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
    functional_call(model, mine, inputs()).square().mean().backward()
    assert all(each.grad is None for each in model.parameters())
    expected = gradient(network())
    for name, each in mine.items():
        torch.testing.assert_close(each.grad, expected[name], atol=1e-3, rtol=0.02)
