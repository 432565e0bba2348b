import pytest
import torch

from halfstep.errors import UsageError
from halfstep.torch import autocast, custom_bwd, custom_fwd


def multiply(cast_inputs=None):
    """Returns a function that multiplies, and a list of the dtypes that its passes ran in."""
    seen = []

    class Multiply(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx, left, right):
            ctx.save_for_backward(left, right)
            result = left @ right
            seen.append(result.dtype)
            return result

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            left, right = ctx.saved_tensors
            results = gradient @ right.t(), left.t() @ gradient
            seen.extend(result.dtype for result in results)
            return results

    return Multiply.apply, seen


def operands():
    return torch.randn(2, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)


def test_both_passes_run_with_the_state_of_the_call():
    function, seen = multiply()
    left, right = operands()
    with autocast("cpu", dtype=torch.bfloat16):
        result = function(left, right)
    result.sum().backward()
    assert seen == [torch.bfloat16] * 3
    assert left.grad.dtype is torch.float32


def test_cast_inputs_makes_both_passes_an_island():
    function, seen = multiply(torch.float32)
    left, right = operands()
    with autocast("cpu", dtype=torch.bfloat16):
        result = function(left.bfloat16(), right)
        result.sum().backward()
    assert seen == [torch.float32] * 3


@pytest.mark.parametrize("cast_inputs", [None, torch.float16])
def test_outside_of_a_region_nothing_changes(cast_inputs):
    function, seen = multiply(cast_inputs)
    function(*operands()).sum().backward()
    assert seen == [torch.float32] * 3


def test_backward_inside_of_a_region_runs_as_its_forward_outside():
    function, seen = multiply()
    result = function(*operands())
    with autocast("cpu"):
        result.sum().backward()
    assert seen == [torch.float32] * 3


def test_backward_runs_by_the_rules_of_the_forward():
    seen = []

    class Exponential(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu")
        def forward(ctx, values):
            ctx.save_for_backward(values)
            return values.exp()

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            (values,) = ctx.saved_tensors
            seen.append(values.exp().dtype)
            return gradient * values.exp()

    half = torch.ones(2, dtype=torch.float16, requires_grad=True)
    for rules, expected in (("halfstep-1", torch.float32), ("none", torch.float16)):
        with autocast("cpu", dtype=torch.float16, rules=rules):
            result = Exponential.apply(half)
        result.sum().backward()
        assert seen.pop() is expected


def test_a_function_with_setup_context():
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(values):
            seen.append(values.dtype)
            return values * 2

        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient * 2

    values = torch.ones(2, dtype=torch.float16, requires_grad=True)
    with autocast("cpu"):
        Double.apply(values).sum().backward()
    assert seen == [torch.float32, False]


def test_a_forgotten_setup_context_is_named():
    class Forgotten(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu")
        def forward(values):
            return values * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            return gradient * 2

    with autocast("cpu"):
        result = Forgotten.apply(torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(UsageError, match=r"Forgotten\.backward needs .* has setup_context"):
        result.backward()


def test_a_forward_decorated_by_pytorch_can_be_mixed_in():
    class Mixed(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, values):
            return values * 2

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            assert torch.is_autocast_enabled("cpu")
            return gradient * 2

    values = torch.ones(2, requires_grad=True)
    with autocast("cpu"):
        result = Mixed.apply(values).sum()
    result.backward()
    assert values.grad.tolist() == [2.0, 2.0]


def test_nested_arguments_are_cast_and_other_values_are_not():
    seen = {}

    class Collect(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cpu", cast_inputs=torch.float16)
        def forward(ctx, first, others, text):
            seen.update(others=[other.dtype for other in others], text=text)
            return first.clone()

        @staticmethod
        @custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            return gradient, None, None

    with autocast("cpu"):
        others = [
            torch.ones(1),
            torch.ones(1, dtype=torch.float64),
            torch.ones(1, dtype=torch.int64),
        ]
        assert Collect.apply(torch.ones(1), others, "text").dtype is torch.float16
    assert seen == {"others": [torch.float16, torch.float64, torch.int64], "text": "text"}
