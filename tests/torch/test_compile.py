import functools

import pytest
import torch
from torch import nn

from halfstep.torch import autocast, prepare

RULES = [
    "halfstep-1",
    "halfstep-1 + softmax=full",
    "torch-2.13",
    "halfstep-1 + matmul[where=head]=full",
]


class Net(nn.Module):
    """Attention in small: products, a normalisation, a softmax, an island and a nested region."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.dtype = dtype
        self.body, self.head, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, inputs):
        hidden = self.body(inputs)
        weights = self.norm(hidden).softmax(-1)
        with autocast("cpu", enabled=False):
            island = self.head(weights.float())
        with autocast("cpu", dtype=self.dtype, rules="halfstep-1 + aten::exp=keep"):
            nested = self.head(hidden).exp()
        return hidden, weights, island, nested


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counter:
    """A backend that counts its graphs."""

    def __init__(self, backend):
        self.backend, self.graphs = torch._dynamo.lookup_backend(backend), 0

    def __call__(self, graph, examples):
        self.graphs += 1
        return self.backend(graph, examples)


def run(function, model, rules, dtype):
    model.zero_grad()
    with autocast("cpu", dtype=dtype, rules=rules):
        outputs = function(torch.linspace(-1, 1, 32).reshape(4, 8))
    sum(output.float().square().sum() for output in outputs).backward()
    return outputs, [parameter.grad.clone() for parameter in model.parameters()]


SLOWLY = functools.partial(pytest.param, "inductor", marks=pytest.mark.slow)
COMPILED = [
    ("aot_eager", torch.bfloat16, RULES),
    ("aot_eager", torch.float16, RULES),
    SLOWLY(torch.bfloat16, RULES[::2]),
    SLOWLY(torch.float16, RULES[1::2]),
]


# Inductor imports a part of PyTorch that is deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("backend", "dtype", "texts"), COMPILED)
def test_a_compiled_model_runs_by_the_same_rules_as_eager(backend, dtype, texts):
    torch.manual_seed(0)
    model, counter = Net(dtype), Counter(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rules in texts:
        outputs, gradients = run(model, model, rules, dtype)
        compiled_outputs, compiled_gradients = run(compiled, model, rules, dtype)
        assert [o.dtype for o in compiled_outputs] == [o.dtype for o in outputs]
        torch.testing.assert_close(compiled_gradients, gradients, rtol=0.05, atol=0.05)
    assert counter.graphs == len(texts)


def test_rules_that_come_back_find_their_graph():
    model, counter = Net(), Counter("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rules in RULES[:2] * 3:
        run(compiled, model, rules, torch.bfloat16)
    assert counter.graphs == 2


def test_the_compiled_backward_is_outside_of_the_region():
    """Inside, the float16 product of the gradients would overflow."""

    class Island(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 1)

        def forward(self, inputs):
            with autocast("cpu", enabled=False):
                return self.out(inputs.float())

    model = Island()
    gradients = []
    for function in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            outputs = function(torch.ones(8, 4))
        (outputs * 16384).sum().backward()
        gradients.append(model.out.weight.grad)
    assert torch.equal(*gradients)


def test_a_region_inside_of_the_compiled_function():
    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(left, right):
        with autocast("cpu", dtype=torch.bfloat16, rules="halfstep-1 + exponential=keep"):
            inside = left @ right
            low = inside.exp()
        return inside, low, left @ right

    dtypes = [output.dtype for output in function(torch.ones(2, 2), torch.ones(2, 2))]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_a_decorated_method_compiles():
    class Decorated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        @autocast("cpu", dtype=torch.bfloat16)
        def forward(self, inputs):
            return self.layer(inputs).softmax(-1)

    compiled = torch.compile(Decorated(), fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(1, 2)).dtype is torch.bfloat16


def test_weights_are_not_remembered_in_a_graph():
    layer = nn.Linear(2, 2, bias=False)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with autocast("cpu", cache_enabled=True):
        before = compiled(torch.ones(1, 2))
        with torch.no_grad():
            layer.weight.mul_(2)
        after = compiled(torch.ones(1, 2))
    assert torch.equal(after, before * 2)


def test_a_graph_break_inside_of_a_region():
    layer = nn.Linear(2, 2)

    @torch.compile(backend="aot_eager")
    def function(inputs):
        with autocast("cpu", dtype=torch.bfloat16):
            hidden = layer(inputs)
            torch._dynamo.graph_break()
            return hidden, layer(hidden)

    assert [output.dtype for output in function(torch.ones(1, 2))] == [torch.bfloat16] * 2
    assert not torch.is_autocast_enabled("cpu")


def test_plain_autocast_compiles_as_ever_after_a_region():
    half = torch.ones(4).half()
    function = torch.compile(lambda values: values.exp(), backend="aot_eager")
    with autocast("cpu", dtype=torch.float16):
        assert function(half).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert function(half).dtype is torch.float16


def test_a_region_with_module_rules_inside_of_the_compiled_function():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(inputs):
        with autocast("cpu", dtype=torch.bfloat16, rules="halfstep-1 + matmul[where=1]=full"):
            return model(inputs)

    assert function(torch.rand(4, 8)).dtype is torch.float32


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, inputs):
        return self.inner(inputs)


class Trainer:
    def __init__(self):
        self.model = Outer()

    def step(self, inputs):
        return self.model(inputs)


def test_paths_in_a_graph_are_those_of_eager_code():
    trainer, inputs = Trainer(), torch.rand(4, 8)
    rules = "halfstep-1 + matmul[where=inner.1]=full"
    for function in (trainer.step, torch.compile(trainer.step, backend="aot_eager")):
        with autocast("cpu", dtype=torch.bfloat16, rules=rules):
            assert function(inputs).dtype is torch.float32


def test_a_compiled_part_of_a_model_keeps_its_path():
    model, inputs = Outer(), torch.rand(4, 8)
    model.inner = torch.compile(model.inner, backend="aot_eager")
    rules = "halfstep-1 + matmul[where=inner.1]=full"
    with autocast("cpu", dtype=torch.bfloat16, rules=rules):
        assert model(inputs).dtype is torch.float32


def test_rules_that_differ_only_in_their_reason_share_a_graph():
    counter, inputs = Counter("aot_eager"), torch.rand(4, 8)
    compiled = torch.compile(nn.Linear(8, 8), backend=counter)
    for reason in ("One.", "Another."):
        with autocast("cpu", rules=f'halfstep-1 + matmul=full "{reason}"'):
            compiled(inputs)
    assert counter.graphs == 1


def test_a_compiled_model_has_the_paths_of_the_model():
    model, inputs = Outer(), torch.rand(4, 8)
    compiled = torch.compile(model, backend="aot_eager")
    for where, dtype in (("inner.1", torch.float32), ("inner.0", torch.bfloat16)):
        rules = f"none + matmul=lower + matmul[where={where}]=full"
        with autocast("cpu", dtype=torch.bfloat16, rules=rules):
            assert compiled(inputs).dtype is dtype
            assert model(inputs).dtype is dtype


def test_a_decorated_forward_that_is_compiled_has_its_paths():
    class Decorated(Outer):
        @autocast("cpu", dtype=torch.bfloat16)
        def forward(self, inputs):
            return self.inner(inputs)

    model, inputs = Decorated(), torch.rand(4, 8)
    for function in (model, torch.compile(model, backend="aot_eager")):
        with autocast("cpu", enabled=False, rules="halfstep-1 + matmul[where=1]=full"):
            assert function(inputs).dtype is torch.float32


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_module_rules_hold_whatever_runs_the_graph(backend):
    model, inputs = Outer(), torch.rand(4, 8)
    rules = "halfstep-1 + matmul[where=inner.1]=full"

    @torch.compile(fullgraph=True, backend=backend)
    def inside(inputs):
        with autocast("cpu", dtype=torch.bfloat16, rules=rules):
            return model(inputs), model.inner[0](inputs)

    assert [each.dtype for each in inside(inputs)] == [torch.float32, torch.bfloat16]
    with autocast("cpu", dtype=torch.bfloat16, rules=rules):
        expected = model(inputs)
        assert torch.equal(torch.compile(model, backend=backend)(inputs), expected)
        assert torch.equal(torch.compile(lambda it: model(it), backend=backend)(inputs), expected)
    prepare(model, policy=f"mixed_bfloat16, rules={rules}")
    expected = model(inputs)
    assert torch.equal(torch.compile(model, backend=backend)(inputs), expected)
