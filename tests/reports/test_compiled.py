"""Compiled, exported and traced code against the same code run eagerly."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.errors import UsageError
from halfstep.torch import autocast, custom_bwd, custom_fwd
from tests.reports.agreement import tensors, weighted_sum

# The compiler makes PyTorch warn about code of its own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]
RULES = pytest.mark.parametrize(
    "rules", ["halfstep-1", "halfstep-1 + softmax=full", "halfstep-1 + matmul=full", "torch-2.13"]
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Forgets every compiled graph."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Body(nn.Module):
    """Layers whose operations fall under different rules."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.norm(F.gelu(self.first(x)))
        weights = self.second(hidden).softmax(-1)
        masked = hidden.masked_fill(x > 1, -1e4).softmax(-1)
        return self.second(weights.exp().cumsum(-1)), masked, weights.sum(-1)


class Inside(nn.Module):
    """A body with the region in its forward."""

    def __init__(self, **settings):
        super().__init__()
        self.body, self.settings = Body(), settings

    def forward(self, x):
        with autocast("cpu", **self.settings):
            return self.body(x)


class Decorated(Inside):
    """A body in a decorated function."""

    def forward(self, x):
        return autocast("cpu", **self.settings)(self.body)(x)


class Island(Inside):
    """A body with a part in float32."""

    def forward(self, x):
        with autocast("cpu", **self.settings):
            outputs = self.body(x)
            with autocast("cpu", enabled=False):
                return *outputs, self.body.first(outputs[0].float())


class Broken(Inside):
    """A body with a graph break inside the region."""

    def forward(self, x):
        with autocast("cpu", **self.settings):
            hidden = self.body.first(x)
            torch._dynamo.graph_break()
            return self.body.second(hidden).exp(), hidden.softmax(-1)


def _compare(model, *args, region=None, fullgraph=True, **options):
    """Checks dtypes, outputs and gradients of a compiled model against the eager one."""
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph, **options)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        with region or autocast("cpu", enabled=False):
            outputs = run(*args)
        weighted_sum(outputs).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([*tensors(outputs), *gradients])
    assert [t.dtype for t in results[0]] == [t.dtype for t in results[1]]
    for eager, other in zip(*results, strict=True):
        assert torch.allclose(eager.float(), other.float(), rtol=1e-5, atol=1e-5)


@RULES
@pytest.mark.parametrize("kind", [Inside, Island])
def test_a_region_inside_of_what_is_compiled(kind, rules, low):
    """A compiled model with a region in forward gives other dtypes than the eager one."""
    _compare(kind(dtype=low, rules=rules), torch.randn(3, 8))


@RULES
def test_a_region_around_what_is_compiled(rules, low):
    """A region around a compiled model is ignored, or its rules are those of the first call."""
    _compare(Body(), torch.randn(3, 8), region=autocast("cpu", dtype=low, rules=rules))


@pytest.mark.parametrize("kind", [Decorated, Broken])
def test_a_region_with_a_graph_break_or_a_decorator(kind, low):
    """A graph break in a region drops the region for the rest of the function."""
    _compare(kind(dtype=low), torch.randn(3, 8), fullgraph=False)


def test_dynamic_shapes(low):
    """Another batch size recompiles with other dtypes."""
    model = Inside(dtype=low)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for size in (3, 5, 7):
        inputs = torch.randn(size, 8)
        for eager, other in zip(model(inputs), compiled(inputs), strict=True):
            assert eager.dtype == other.dtype
            assert torch.allclose(eager.float(), other.float(), atol=1e-5)


def test_different_rules_in_turn_are_different_graphs():
    """A compiled model goes on with the rules under which it was compiled."""
    model, inputs = Body(), torch.randn(3, 8)
    compiled = torch.compile(model, backend="aot_eager")
    regions = [
        autocast("cpu", dtype=dtype, rules=rules)
        for rules in ("halfstep-1", "halfstep-1 + softmax=full", "torch-2.13")
        for dtype in (torch.float16, torch.bfloat16)
    ]
    regions += [autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16)]
    for region in [*regions, *reversed(regions)]:
        with region:
            eager, other = model(inputs), compiled(inputs)
        assert [t.dtype for t in eager] == [t.dtype for t in other]


class WideHead(nn.Module):
    """A head that the user put in float32 because its gradients are large."""

    def __init__(self, region):
        super().__init__()
        self.mix, self.out, self.region = nn.Linear(4, 4), nn.Linear(4, 1), region

    def forward(self, x):
        y = self.mix(x)
        with self.region("cpu", enabled=False):
            return self.out(y.float()) * 16384


@pytest.mark.parametrize("region", [autocast, torch.autocast])
def test_gradients_of_a_wide_part_stay_finite(region):
    """torch.compile traces backward under autocast, and the float32 part overflows in half."""
    for mode in ("around", "inside"):
        model, inputs = WideHead(region), torch.full((8, 4), 4.0)

        def step(x, model=model):
            with autocast("cpu", dtype=torch.float16):
                return model(x)

        run = torch.compile(model if mode == "around" else step, backend="aot_eager")
        with autocast("cpu", dtype=torch.float16, enabled=mode == "around"):
            outputs = run(inputs)
        outputs.sum().backward()
        assert model.out.weight.grad.isfinite().all()


class Product(torch.autograd.Function):
    """A product with its gradients written out."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        return gradient @ b.T, a.T @ gradient


class WideProduct(Product):
    """The same product in float32."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b


class Custom(nn.Module):
    """A layer that uses a custom function."""

    def __init__(self, function, region=None):
        super().__init__()
        self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.function, self.region = function, region

    def forward(self, x):
        if self.region is None:
            return self.function.apply(self.first(x), self.weight)
        with self.region("cpu", dtype=torch.bfloat16):
            return self.function.apply(self.first(x), self.weight)


@pytest.mark.parametrize("function", [Product, WideProduct])
@pytest.mark.parametrize("region", [autocast, torch.autocast, None])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_custom_function_is_compiled(function, region, fullgraph):
    """A decorated custom function breaks the compiler."""
    _compare(Custom(function, region), torch.randn(3, 8), fullgraph=fullgraph)


@pytest.mark.parametrize("function", [Product, WideProduct])
def test_a_custom_function_is_compiled_in_a_region_around(function):
    """The same with the region around the compiled model."""
    region = autocast("cpu", dtype=torch.bfloat16)
    _compare(Custom(function), torch.randn(3, 8), region=region)


class Checkpointed(Inside):
    """A checkpointed body in a region."""

    def forward(self, x):
        with autocast("cpu", **self.settings):
            return checkpoint(self.body, x, use_reentrant=False)


@RULES
def test_checkpointing_is_compiled(rules, low):
    """A compiled checkpoint computes again in float32."""
    _compare(Checkpointed(dtype=low, rules=rules), torch.randn(3, 8))


MODULES = {
    "lstm cell": (lambda: nn.LSTMCell(8, 8), (3, 8)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)), (2, 1, 5, 5)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0), (3, 2, 8)),
    "attention": (lambda: Attention(), (2, 3, 8)),
}


class Attention(nn.Module):
    """Self-attention through the fused function."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.project(x).chunk(3, -1), is_causal=True)


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_compiled(module, low):
    """Whole modules give the same compiled and eager."""
    make, shape = MODULES[module]
    _compare(make(), torch.randn(shape), region=autocast("cpu", dtype=low))


@pytest.mark.slow
def test_the_default_compiler_agrees(low):
    """The default backend generates code of its own, with casts of its own."""
    model, inputs = Inside(dtype=low), torch.randn(3, 8)
    outputs = torch.compile(model)(inputs)
    for eager, other in zip(model(inputs), outputs, strict=True):
        assert eager.dtype == other.dtype
        assert torch.allclose(eager.float(), other.float(), rtol=0.05, atol=0.05)


def test_a_region_inside_of_an_exported_model_is_refused():
    """torch.export drops the region silently, and the exported model computes in float32."""
    with pytest.raises(UsageError, match="run the program inside autocast"):
        torch.export.export(Inside(dtype=torch.bfloat16), (torch.randn(3, 8),), strict=False)


def test_an_exported_program_runs_by_the_rules_of_the_region_around_it():
    """An exported model computes in float32 although it is run under autocast."""
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), torch.randn(3, 8)
    program = torch.export.export(model, (inputs,), strict=False)
    with autocast("cpu", dtype=torch.bfloat16):
        assert program.module()(inputs).dtype == torch.bfloat16


def test_traced_and_scripted_models_run_in_a_region(low):
    """torch.jit models under autocast keep the casts of the first run."""
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), torch.randn(3, 8)
    traced, scripted = torch.jit.trace(model, inputs), torch.jit.script(model)
    with autocast("cpu", dtype=low):
        for _ in range(3):
            assert traced(inputs).dtype == scripted(inputs).dtype == low
    assert traced(inputs).dtype == scripted(inputs).dtype == torch.float32
