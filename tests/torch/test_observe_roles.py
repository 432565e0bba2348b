"""What `observe` says of where a tensor was, and what it was to the operation."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from halfstep import Exponents
from halfstep.torch import observe, prepare
from tests.torch.faulty_models import autocasts, inside, mean
from tests.torch.test_observe import RULES, UNSCALED

ADD = "aten::add"


class Square(nn.Module):
    """Inputs and weights of one shape, which no shape tells apart."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.conv, self.gain = nn.Conv1d(8, 8, 7, padding=3), nn.Parameter(torch.ones(8, 8))
        self.register_buffer("shift", torch.ones(8, 8))

    def forward(self, x):
        hidden = self.second(torch.tanh(self.first(x))) * self.gain + self.shift
        return self.conv(hidden[:, :7].expand(8, 8, 7))


@pytest.mark.parametrize("policy", [UNSCALED, "float32"])
def test_roles_and_passes(policy):
    model = Square()
    seen = observe(model, torch.randn(8, 8), mean, policy=policy)
    for name in ("first", "second"):
        assert roles(seen, name, "aten::addmm") == [("weight", "input", "weight", "output")]
    assert roles(seen, "second", "aten::mm") == [
        ("grad_output", "weight", "grad_input"),
        ("grad_output", "input", "grad_weight"),
    ]
    assert roles(seen, "first", "aten::mm") == [("grad_output", "input", "grad_weight")]
    assert roles(seen, "conv", "aten::convolution_backward") == [
        ("grad_output", "input", "weight", "grad_input", "grad_weight", "grad_weight")
    ]
    assert set(roles(seen, "Square", "aten::mul")) == {
        ("input", "weight", "output"),
        ("grad_output", "weight", "grad_input"),
        ("grad_output", "input", "grad_weight"),
    }
    assert [row.role for row in seen.of(module="Square", operation="add")][1] == "buffer"
    assert roles(seen, "mean", "aten::div") == [("grad_output", "grad_input")]
    assert {row.phase for row in seen if row.role.startswith("grad")} == {"backward"}


def roles(seen, module, operation):
    """Returns the roles of each of some operations, in order."""
    found = {}
    for row in seen.of(module=module, operation=operation):
        found.setdefault((row.phase, row.call, row.nth), []).append(row.role)
    return list(map(tuple, found.values()))


class Fork(nn.Module):
    """One input of two layers, with the shape of their weights."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        hidden = torch.tanh(self.stem(x))
        return self.left(hidden) * self.right(hidden)


def test_gradients_that_are_only_handed_on_stay_what_they_are():
    seen = observe(Fork(), torch.randn(8, 8), mean, policy=f"mixed_float16, {RULES}")
    (added,) = (row for row in seen.of(phase="backward", role="grad_input") if row.name == ADD)
    assert added.shape == (8, 8)
    unscaled = seen.of(module="Fork", operation="aten::_foreach_mul", role="grad_weight")
    assert sorted(row.shape for row in unscaled) == [(8,)] * 3 + [(8, 8)] * 3


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.inner, self.layer(x), use_reentrant=False)

    def inner(self, x):
        return torch.tanh(self.layer(torch.tanh(x)))


@pytest.mark.parametrize("policy", [UNSCALED, "float32"])
def test_calls_and_what_a_checkpoint_computes_again(policy):
    seen = observe(Twice(), torch.randn(2, 4), mean, policy=policy)
    forward = seen.of(module="layer", operation="matmul", phase="forward", role="output")
    first, second, again = forward
    assert [row.call for row in forward] == [1, 2, 3]
    assert (again.run, again.source) == (second.run, second.source)
    assert first.reference is not None
    gradients = seen.of(module="layer", operation="aten::mm", role="grad_weight")
    assert len(gradients) == 2
    assert all(row.reference for row in gradients)


@pytest.mark.parametrize("way", ["ours", "native", "region"])
def test_what_casts(way):
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    loss_fn = mean if way == "region" else inside(autocasts[way])
    if way == "region":
        prepare(model, policy=UNSCALED)
    output = observe(model, batch, loss_fn).of(module="0", role="output").rows[-1]
    exact = model[0].weight.half(), model[0].bias.half()
    expected = functional.linear(batch.half(), *exact)
    assert (output.form, output.run) == ("float16", Exponents.of(expected.detach().float()))
    assert output.reference != output.run
    assert output.source.endswith("(mean)")


def test_tensors_of_other_kinds():
    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 4, sparse=True)

        def forward(self, x):
            small = self.table(x).detach().mul(2.0**-7).to(torch.float8_e4m3fn).double()
            return torch.fft.fft(self.table(x) + small * 0).abs()

    seen = observe(Kinds(), torch.arange(6), mean)
    assert (
        seen.of(module="table", operation="embedding", role="grad_weight").rows[0].run.total == 24
    )
    product, eight = seen.of(operation="multiply").rows[1], seen.of(operation="cast").rows[1]
    assert (eight.form, eight.reference) == ("float8_e4m3fn", product.run)
    assert eight.flushed > 0
    assert seen.of(operation="abs").rows[0].form == "float64"
