"""In float32 a region changes nothing, bit for bit, whatever the scale does meanwhile."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from halfstep.torch import prepare

STEPS, MICRO = 50, 2


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(5, 4)

    def forward(self, words):
        return self.head(self.lstm(self.embedding(words))[0].mean(1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.hidden(self.embedding(words)).tanh().mean(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, values):
        return self.head(self.block(values).mean(1))


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 4))


def conv():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )


@dataclass(frozen=True)
class Kind:
    make: type
    shape: tuple
    words: bool = False
    # Else the order in which gradients are summed is different with and without a region.
    once: bool = True

    def model(self):
        torch.manual_seed(0)
        model = self.make()
        model(self.batch(0)[0])
        return model

    def batch(self, number):
        generator = torch.Generator().manual_seed(number)
        targets = torch.randint(4, self.shape[:1], generator=generator)
        if self.words:
            return torch.randint(4, self.shape, generator=generator), targets
        return torch.randn(self.shape, generator=generator), targets


KINDS = {
    "mlp": Kind(mlp, (5, 6)),
    "conv": Kind(conv, (4, 2, 6, 6)),
    "recurrent": Kind(Recurrent, (3, 5), words=True, once=False),
    "block": Kind(Block, (3, 4, 8)),
    "tied": Kind(Tied, (3, 5), words=True, once=False),
}
EXPONENTS = st.lists(st.integers(-20, 40), min_size=1, max_size=9)


class Driven:
    """A region whose scale is set anew before each pass."""

    def __init__(self, model, optimizer, exponents):
        self.region = prepare(model, optimizer, "compute_dtype=float32")
        self.exponents = exponents
        self.moved = 0

    def move(self):
        scale = 2.0 ** self.exponents[self.moved % len(self.exponents)]
        self.moved += 1
        self.region.load_state_dict({**self.region.state_dict(), "scale": scale, "found": 0.0})


class Plain:
    """No region.

    What a model returns is a value of its own, because sums of three gradients depend on which two
    are added first: those from outside of the model come first wherever there is a boundary.
    """

    def __init__(self, model, optimizer):
        model.register_forward_hook(lambda module, inputs, output: output.clone())

    def move(self):
        pass


def ordinary(model, batch, loss):
    loss.backward()


def with_regulariser_inside(model, batch, loss):
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    (loss + 1e-3 * penalty).backward()


def with_regulariser_beside(model, batch, loss):
    loss.backward()
    (1e-3 * sum(parameter.abs().sum() for parameter in model.parameters())).backward()


def train(kind, backward, drive, clip, optimizer_class=torch.optim.Adam):
    model = kind.model()
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    control = drive(model, optimizer)
    torch.manual_seed(1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            inputs, targets = kind.batch(step * MICRO + micro)
            control.move()
            loss = functional.cross_entropy(model(inputs), targets)
            control.move()
            backward(model, inputs, loss / MICRO)
        clip(model.parameters())
        optimizer.step()
    return model


def by_norm(parameters):
    nn.utils.clip_grad_norm_(parameters, 0.2)


def by_value(parameters):
    nn.utils.clip_grad_value_(parameters, 0.02)


def assert_identical(one, other):
    got = other.state_dict()
    for name, wanted in one.state_dict().items():
        assert torch.equal(wanted, got[name]), name


@pytest.mark.parametrize("clip", [by_norm, by_value])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4)
@given(exponents=EXPONENTS)
def test_parameters_are_bit_identical_after_fifty_steps(kind, clip, exponents):
    backward = with_regulariser_inside if KINDS[kind].once else with_regulariser_beside
    plain = train(KINDS[kind], backward, Plain, clip)
    driven = train(KINDS[kind], backward, lambda *them: Driven(*them, exponents), clip)
    assert_identical(plain, driven)


POLICIES = [
    "compute_dtype=float32,scale=static(1024.0)",
    "compute_dtype=float32,scale=static(3.0)",
    "compute_dtype=float32,scale=dynamic(growth_interval=1)",
    "compute_dtype=float32,scale=dynamic(init_scale=8.0,growth_factor=3.0,growth_interval=7)",
    "float32",
]


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_that_scale_differently_change_nothing(policy):
    plain = train(KINDS["mlp"], ordinary, Plain, by_norm, torch.optim.SGD)
    regions = []

    def drive(model, optimizer):
        regions.append(prepare(model, optimizer, policy))
        return Plain(model, optimizer)

    assert_identical(plain, train(KINDS["mlp"], ordinary, drive, by_norm, torch.optim.SGD))
    assert regions[0].history.skipped == 0
    grows = "growth" in policy
    assert bool(regions[0].history.scale_changes) is grows


def smooth(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 4), nn.Tanh())


def inputs_penalty(model, inputs):
    inputs = inputs.clone().requires_grad_()
    out = model(inputs)
    (gradient,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    return out.square().mean() + (gradient.norm(dim=1) - 1).square().mean()


def parameters_penalty(model, inputs):
    loss = model(inputs).square().mean()
    gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    return loss + sum(gradient.square().sum() for gradient in gradients).sqrt()


def penalised(make_loss, drive):
    model = smooth()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    control = drive(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            generator = torch.Generator().manual_seed(step * MICRO + micro)
            control.move()
            loss = make_loss(model, torch.randn(5, 6, generator=generator))
            control.move()
            loss.backward()
        by_norm(model.parameters())
        optimizer.step()
    return model


@pytest.mark.parametrize("make_loss", [inputs_penalty, parameters_penalty])
@settings(max_examples=5)
@given(exponents=EXPONENTS)
def test_a_double_backward_is_bit_identical(make_loss, exponents):
    plain = penalised(make_loss, Plain)
    driven = penalised(make_loss, lambda *them: Driven(*them, exponents))
    assert_identical(plain, driven)


def test_a_third_derivative_is_bit_identical():
    def third(prepared):
        model = smooth()
        if prepared:
            prepare(model, policy="compute_dtype=float32")
        inputs = torch.linspace(-1, 1, 12).reshape(2, 6).requires_grad_()
        order = model(inputs).sum()
        for _ in range(2):
            (order,) = torch.autograd.grad(order.sum(), inputs, create_graph=True)
        order.square().sum().backward()
        return [inputs.grad, *(parameter.grad for parameter in model.parameters())]

    for wanted, got in zip(third(False), third(True), strict=True):
        if wanted is None:
            assert got is None or not got.any()
        else:
            assert torch.equal(wanted, got)


class Probe(nn.Module):
    """Notes the gradient that passes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, values):
        values.register_hook(self.seen.append)
        return values


def test_the_inside_really_is_scaled():
    model, plain = (smooth().append(Probe()).append(nn.Softplus()) for _ in range(2))
    region = prepare(model, policy="compute_dtype=float32,scale=static(1024.0)")
    for each in (model, plain):
        each(torch.ones(5, 6)).sum().backward()
    # Twenty ones enter, and their sum becomes 640, which is at most 1024.
    assert torch.equal(model[4].seen[0], plain[4].seen[0] * 32)
    assert region.scale == 1024.0


def curve(factor, policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 / factor)
    region = prepare(model, optimizer, policy) if policy else None
    inputs = torch.randn(32, 8)
    targets, losses = inputs[:, :3].argmax(1), []
    for _ in range(40):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        (loss * factor).backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), region


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("policy", ["mixed_float16", "compute_dtype=float32"])
def test_a_factor_of_the_loss_changes_nothing(factor, policy):
    expected, _ = curve(1.0, None)
    losses, region = curve(factor, policy)
    assert expected[-1] < 0.5 * expected[0]
    torch.testing.assert_close(losses, expected, atol=5e-3, rtol=0)
    assert region.history.skipped <= 2
    assert region.history.consecutive_skips == 0


def gradients(policy):
    """Gradients as small as those of a long sequence or a large batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    model.append(nn.Linear(64, 1))
    if policy:
        prepare(model, policy=policy)
    (model(torch.randn(256, 16)).square().mean() * 3e-5).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def zeroed(policy):
    full = gradients(None)
    return (gradients(policy)[full != 0] == 0).float().mean().item()


def test_gradients_that_underflow_in_float16_survive():
    assert zeroed("compute_dtype=float16,scale=none") > 0.5
    assert zeroed("mixed_float16") < 0.001
    full, low = gradients(None), gradients("mixed_float16")
    assert ((full - low).norm() / full.norm()).item() < 0.01
