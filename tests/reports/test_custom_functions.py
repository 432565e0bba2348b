"""Autograd functions and operators that people write themselves."""

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from halfstep.torch import autocast, custom_bwd, custom_fwd


def _product(forward_decorator, backward_decorator):
    class Product(torch.autograd.Function):
        @staticmethod
        @forward_decorator
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @backward_decorator
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            return gradient @ b.T, a.T @ gradient

    return Product.apply


def _identity(function):
    return function


OURS = (custom_fwd(device_type="cpu"), custom_bwd(device_type="cpu"))
THEIRS = (torch.amp.custom_fwd(device_type="cpu"), torch.amp.custom_bwd(device_type="cpu"))
CAST = (
    custom_fwd(device_type="cpu", cast_inputs=torch.float32),
    torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32),
)
DECORATORS = {
    "ours": OURS,
    "theirs": THEIRS,
    "ours forward, theirs backward": (OURS[0], THEIRS[1]),
    "theirs forward, ours backward": (THEIRS[0], OURS[1]),
    "ours with cast_inputs": (CAST[0], OURS[1]),
    "theirs with cast_inputs": (CAST[1], THEIRS[1]),
}
REGIONS = {"ours": autocast, "torch": torch.autocast}


@pytest.mark.parametrize("decorators", DECORATORS)
@pytest.mark.parametrize("region", REGIONS)
def test_a_decorated_function_trains_with_mixed_operands(decorators, region, low):
    """The backward of a custom function fails: Half and float32 in one product."""
    product = _product(*DECORATORS[decorators])
    layer, weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
    with REGIONS[region]("cpu", dtype=low):
        outputs = product(layer(torch.randn(3, 4)), weight)
    assert outputs.dtype == (torch.float32 if "cast" in decorators else low)
    outputs.float().sum().backward()
    assert weight.grad.dtype == layer.weight.grad.dtype == torch.float32


def test_a_function_without_decorators_works_or_the_error_names_them(low):
    """The error in backward speaks of dtypes of two matrices and helps nobody."""
    product = _product(_identity, _identity)
    layer, weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
    with autocast("cpu", dtype=low):
        outputs = product(layer(torch.randn(3, 4)), weight)
    try:
        outputs.float().sum().backward()
    except Exception as error:
        message = str(error)
    else:
        message = "custom_fwd custom_bwd"
    assert "custom_fwd" in message
    assert "custom_bwd" in message


def _separate(cast_inputs=None):
    class Separate(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(a, b):
            return a @ b

        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            return gradient @ b.T, a.T @ gradient

    return Separate.apply


def test_setup_context_works_with_the_decorators(low):
    """custom_fwd breaks a function that has setup_context."""
    layer, weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
    with autocast("cpu", dtype=low):
        outputs = _separate()(layer(torch.randn(3, 4)), weight)
    assert outputs.dtype == low
    outputs.float().sum().backward()
    assert weight.grad is not None


def test_setup_context_with_cast_inputs_trains(low):
    """setup_context sees the inputs before they were cast, and backward mixes dtypes."""
    layer, weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
    with autocast("cpu", dtype=low):
        outputs = _separate(torch.float32)(layer(torch.randn(3, 4)), weight)
    assert outputs.dtype == torch.float32
    outputs.sum().backward()
    assert weight.grad is not None


def test_setup_context_works_under_vmap(low):
    """A function with a generated rule for vmap runs and trains batched."""
    product, weight = _separate(), torch.randn(4, 4, requires_grad=True)
    with autocast("cpu", dtype=low):
        outputs = torch.func.vmap(product, (0, None))(torch.randn(2, 3, 4), weight)
        torch.func.grad(lambda w: product(torch.randn(3, 4), w).float().sum())(weight.detach())
    outputs.float().sum().backward()
    assert weight.grad is not None


def test_a_missing_decorator_on_setup_context_is_named():
    """Only forward was decorated, and the error says nothing of setup_context."""

    class Forgotten(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu")
        def forward(a):
            return a * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            return gradient * 2

    with autocast("cpu"):
        outputs = Forgotten.apply(torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="setup_context"):
        outputs.sum().backward()


def _recorder(seen):
    class Recorded(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu")
        def forward(ctx, x):
            return x * 1

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            seen.append(((gradient @ gradient.T).dtype, gradient.half().exp().dtype))
            return gradient

    return lambda: Recorded.apply(torch.ones(2, 2, requires_grad=True)).sum()


def test_backward_runs_by_the_rules_of_forward(low):
    """Backward computes in another dtype than forward, because it runs outside of the region."""
    seen = []
    run = _recorder(seen)
    with autocast("cpu", dtype=low):
        inside = run()
        with autocast("cpu", enabled=False):
            island = run()
    with torch.autocast("cpu", dtype=low):
        plain = run()
    outside = run()
    inside.backward()
    with autocast("cpu", dtype=low):
        for loss in (island, plain, outside):
            loss.backward()
    wide = (torch.float32, torch.float16)
    assert seen == [(low, torch.float32), wide, (low, torch.float16), wide]


def test_cast_inputs_reaches_into_containers(low):
    """Tensors in a list or a dict are cast as well, integers and texts are not."""
    given = {}

    class Nested(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, named, listed, text):
            given.update(x=x, **named, listed=listed[0], text=text)
            return x * 1

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            return gradient, None, None, None

    half, whole = torch.ones(1).to(low), torch.ones(1, dtype=torch.int64)
    with autocast("cpu", dtype=low):
        Nested.apply(half.requires_grad_(), {"a": half, "i": whole}, [half], "text").backward()
    assert given["x"].dtype == given["a"].dtype == given["listed"].dtype == torch.float32
    assert given["i"].dtype == torch.int64
    assert given["text"] == "text"


def test_the_decorators_go_with_once_differentiable_and_without_arguments():
    """Other decorators around the two, and the bare form of old code."""

    class Old(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        @once_differentiable
        @custom_bwd
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0].exp()

    inputs = torch.full((2,), 11.9, dtype=torch.float16, requires_grad=True)
    with autocast("cpu", dtype=torch.float16):
        outputs = Old.apply(inputs)
    assert outputs.isfinite().all()
    outputs.mul(1e-3).sum().backward()
    assert inputs.grad.isfinite().all()


@torch.library.custom_op("halfstep_reports::product", mutates_args=())
def _operator(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@_operator.register_fake
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1])


def _operator_backward(ctx, gradient):
    a, b = ctx.saved_tensors
    return gradient @ b.T, a.T @ gradient


_operator.register_autograd(
    _operator_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.mark.parametrize("action", ["lower", "full", "widest"])
def test_a_rule_makes_an_operator_of_ones_own_work(action, low):
    """A custom operator under autocast fails with mixed dtypes, and cannot be registered."""
    layer, weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
    rules = f"halfstep-1 + halfstep_reports::product={action}"
    with autocast("cpu", dtype=low, rules=rules):
        outputs = _operator(layer(torch.randn(3, 4)), weight)
    assert outputs.dtype == (low if action == "lower" else torch.float32)
    outputs.float().sum().backward()
    assert weight.grad is not None


def test_a_registration_with_torch_library_counts():
    """torch.library.register_autocast is obeyed inside a region."""
    name = "halfstep_reports::registered"
    operator = torch.library.custom_op(name, lambda a, b: a @ b, mutates_args=(), schema=SCHEMA)
    torch.library.register_autocast(name, "cpu", torch.bfloat16)
    with autocast("cpu", dtype=torch.bfloat16):
        assert operator(torch.ones(2, 2).bfloat16(), torch.ones(2, 2)).dtype == torch.bfloat16


SCHEMA = "(Tensor a, Tensor b) -> Tensor"
