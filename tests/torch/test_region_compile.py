"""Compiled, a region computes what it computes in eager mode."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from halfstep.torch import prepare
from halfstep.torch._private import SEES_ATTRIBUTES

# PyTorch's own: of its code generator, and where it looks at the weights of a compiled part.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

FLOAT32 = "compute_dtype=float32"
FLOAT16 = "compute_dtype=float16,scale=dynamic(init_scale=256.0,growth_interval=3)"
POLICIES = [FLOAT32, FLOAT16, "mixed_bfloat16"]


# Tracers before PyTorch 2.13 leave a region that scales around the graphs.
WHOLE = SEES_ATTRIBUTES


@pytest.fixture(autouse=True)
def fresh():
    """Starts without anything compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, values):
        return self.second(functional.gelu(self.norm(self.first(values))))


class Breaking(Net):
    """Cannot be compiled in one graph."""

    def forward(self, values):
        hidden = self.first(values)
        torch._dynamo.graph_break()
        return self.second(functional.gelu(self.norm(hidden)))


def train(enclose, model=None, steps=6):
    """Trains, and returns losses, gradients of the last step and the region."""
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called, region = enclose(model, optimizer)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        values = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
        loss = (called(values) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.grad for parameter in model.parameters()], region


def eager(policy):
    return lambda model, optimizer: (model, prepare(model, optimizer, policy))


def compiled_after(policy, **options):
    def enclose(model, optimizer):
        region = prepare(model, optimizer, policy)
        return torch.compile(model, **options), region

    return enclose


def compiled_before(policy, **options):
    def enclose(model, optimizer):
        called = torch.compile(model, **options)
        return called, prepare(called, optimizer, policy)

    return enclose


def in_place(policy, **options):
    def enclose(model, optimizer):
        region = prepare(model, optimizer, policy)
        model.compile(**options)
        return model, region

    return enclose


WAYS = [compiled_after, compiled_before, in_place]


def compare(expected, got, policy):
    losses, gradients, region = expected
    tolerance = 1e-5 if policy == FLOAT32 else 0.03
    assert got[0] == pytest.approx(losses, abs=tolerance)
    for one, other in zip(gradients, got[1], strict=True):
        assert ((one - other).abs().max() / one.abs().max()).item() < tolerance
    assert got[2].scale == region.scale
    assert got[2].history.skipped == region.history.skipped


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_region_trains_as_in_eager_mode(way, policy):
    got = train(way(policy, backend="aot_eager", fullgraph=WHOLE))
    compare(train(eager(policy)), got, policy)


@pytest.mark.slow
def test_a_region_compiled_to_code_trains_as_in_eager_mode():
    got = train(compiled_after(FLOAT16, fullgraph=WHOLE))
    compare(train(eager(FLOAT16)), got, FLOAT16)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_compiled_again(policy):
    counter = CompileCounterWithBackend("aot_eager")
    train(compiled_after(policy, backend=counter, fullgraph=WHOLE), steps=12)
    assert counter.frame_count == 1


def test_nothing_is_compiled_again_when_the_scale_changes():
    counter = CompileCounterWithBackend("aot_eager")
    policy = "compute_dtype=float16,scale=dynamic(init_scale=256.0,growth_interval=1)"
    _, _, region = train(compiled_after(policy, backend=counter, fullgraph=WHOLE), steps=6)
    assert len(region.history.scale_changes) >= 4
    assert counter.frame_count == 1


class Amplifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("gain", torch.eye(4) * 3e4)

    def forward(self, values):
        return (values @ self.weight) @ self.gain


def overflows(called, model, policy="mixed_float16"):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    region = prepare(model, optimizer, policy)
    skipped = []
    for _ in range(6):
        optimizer.zero_grad()
        called(torch.full((2, 4), 1e-4)).mean().backward()
        optimizer.step()
        skipped.append(region.last_step.skipped)
    return skipped, region.scale, [change.after for change in region.history.scale_changes]


def test_an_overflow_in_a_compiled_model_lowers_the_scale():
    plain, model = Amplifier(), Amplifier()
    expected = overflows(plain, plain)
    got = overflows(torch.compile(model, backend="aot_eager", fullgraph=WHOLE), model)
    assert expected[0][0]
    assert not expected[0][-1]
    assert got == expected


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Net()
        self.head = nn.Linear(2, 2)

    def forward(self, values):
        return self.head(self.inner(values))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_compiled_part_of_an_eager_region(policy):
    def enclose(model, optimizer):
        model.inner.compile(backend="aot_eager", fullgraph=WHOLE)
        return model, prepare(model, optimizer, policy)

    torch.manual_seed(0)
    expected = train(eager(policy), Outer())
    torch.manual_seed(0)
    compare(expected, train(enclose, Outer()), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_region_that_is_a_part_of_a_compiled_model(policy):
    def enclose(model, optimizer, compiled=True):
        region = prepare(model.inner, optimizer, policy)
        called = torch.compile(model, backend="aot_eager", fullgraph=WHOLE) if compiled else model
        return called, region

    torch.manual_seed(0)
    expected = train(lambda *them: enclose(*them, compiled=False), Outer())
    torch.manual_seed(0)
    compare(expected, train(enclose, Outer()), policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_breaks_its_graph_has_true_gradients(way, policy):
    got = train(way(policy, backend="aot_eager"), Breaking())
    compare(train(eager(policy), Breaking()), got, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_compiled_loss_around_a_region(policy):
    def enclose(model, optimizer, compiled=True):
        region = prepare(model, optimizer, policy)

        def call(values):
            return model(values).exp()

        return (torch.compile(call, backend="aot_eager") if compiled else call), region

    compare(train(lambda *them: enclose(*them, compiled=False)), train(enclose), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_compiled_region_evaluates(policy):
    model = Net()
    called = torch.compile(model, backend="aot_eager", fullgraph=WHOLE)
    prepare(model, policy=policy)
    plain, values = Net(), torch.ones(5, 4)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad):
        with context():
            out = called(values)
        assert out.dtype is torch.float32
        torch.testing.assert_close(out.detach(), plain(values).detach(), atol=0.02, rtol=0.02)


def test_removing_a_region_is_seen_by_what_was_compiled():
    model, values = Net(), torch.ones(5, 4)
    called = torch.compile(model, backend="aot_eager", fullgraph=WHOLE)
    expected = model(values)
    region = prepare(model, policy="mixed_bfloat16")
    assert not torch.equal(called(values), expected)
    region.remove()
    assert torch.equal(called(values), expected)


@pytest.mark.parametrize("where", ["1.0", "2", "1.*"])
def test_rules_for_a_module_hold_in_a_compiled_model(where):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
    rules = f"halfstep-1 + matmul[where={where}]=full"
    prepare(model, policy=f"mixed_bfloat16, rules={rules}")
    inputs = torch.randn(8, 4)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(compiled(inputs), model(inputs))
    everywhere = nn.Sequential(*model.children())
    assert not torch.equal(compiled(inputs), everywhere(inputs))
