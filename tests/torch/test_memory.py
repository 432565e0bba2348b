import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch._memory import (
    Inputs,
    activation_bytes,
    kept,
    measure_layout,
)

INPUTS = Inputs.of(torch.ones(4, 64))


def network():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 8))


COUNT = sum(each.numel() for each in network().parameters())
TENSORS = 6


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (torch.optim.SGD, 0),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), 4 * COUNT),
        (torch.optim.AdamW, 8 * COUNT + 4 * TENSORS),
        (torch.optim.Adagrad, 4 * COUNT + 4 * TENSORS),
    ],
)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("inputs", [INPUTS, None])
def test_every_part_is_counted(make, state, policy, inputs):
    found = measure_layout(network(), make, inputs, policy=policy)
    assert (found.parameters, found.weights, found.gradients) == (COUNT, 4 * COUNT, 4 * COUNT)
    assert (found.remainder, found.state) == (0, state)
    assert found.others == 64 * 4 * 2 + 8  # the running mean and variance, and their count
    assert found.gradient_peak == 4 * COUNT


def test_tied_weights_count_once():
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    found = measure_layout(
        nn.Sequential(first, second), torch.optim.SGD, Inputs.of(torch.ones(1, 8))
    )
    assert (found.parameters, found.weights, found.gradients) == (64, 256, 256)


def test_frozen_parameters_are_apart():
    model = network()
    model[0].requires_grad_(False)
    found = measure_layout(model, torch.optim.AdamW, INPUTS)
    assert found.weights == 4 * (COUNT - 64 * 65)
    assert found.others == 64 * 4 * 2 + 8 + 4 * 64 * 65


def test_several_optimizers_of_the_same_parameters():
    model = nn.Linear(4, 4, bias=False)
    both = [torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())]
    assert kept(both, [model]).weights == 64


@pytest.mark.parametrize(
    "given", [torch.ones(4, 64), (torch.ones(4, 64),), {"input": torch.ones(4, 64)}]
)
def test_inputs_by_position_and_by_name(given):
    inputs = Inputs.of(given)
    assert inputs.batch == 4
    assert inputs.doubled().batch == 8
    assert measure_layout(network(), torch.optim.SGD, inputs).gradients == 4 * COUNT


def test_only_what_has_the_length_of_the_batch_is_doubled():
    inputs = Inputs.of((torch.ones(4, 3), [torch.ones(4)], torch.ones(5, 4), torch.tensor(1.0), 7))
    first, (inner,), mask, scalar, number = inputs.doubled().args
    assert (first.shape[0], inner.shape[0], mask.shape[0], scalar, number) == (8, 8, 5, 1.0, 7)


def test_half_of_the_activations_in_bfloat16():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    once, twice = Inputs.of(torch.ones(8, 32)), Inputs.of(torch.ones(16, 32))
    full = activation_bytes(model, twice) - activation_bytes(model, once)
    low = [activation_bytes(_copy(model), each, "mixed_bfloat16") for each in (twice, once)]
    assert (low[0] - low[1]) == full / 2


def _copy(model):
    other = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    other.load_state_dict(model.state_dict())
    return other


def test_a_model_without_an_output_to_train():
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return {"x": x}

    with pytest.raises(UsageError, match="needs to return tensors with a gradient, got dict"):
        measure_layout(Silent(), torch.optim.SGD, INPUTS)


def test_gradients_that_are_not_finite():
    inputs = Inputs.of(torch.full((4, 64), float("inf")))
    with pytest.raises(UsageError, match="a measured step needs finite gradients, got a skip"):
        measure_layout(network(), torch.optim.SGD, inputs, policy="mixed_bfloat16")


def test_release_needs_a_pass():
    with pytest.raises(UsageError, match="which needs example inputs"):
        measure_layout(network(), torch.optim.SGD, masters="split", release=True)


class Blocks(nn.Module):
    """A model of blocks in a list, with parts around them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(6))
        self.scale, self.head = nn.Parameter(torch.ones(16)), nn.Linear(16, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


class Wrapped(nn.Module):
    """A model within a model."""

    def __init__(self):
        super().__init__()
        self.inner = Blocks()

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("kind", [Blocks, Wrapped])
def test_gradients_that_are_released_block_by_block(kind):
    model, inputs = kind(), Inputs.of(torch.ones(4, 8))
    options = {"policy": "mixed_bfloat16", "masters": "split", "release": True}
    found = measure_layout(model, torch.optim.AdamW, inputs, **options)
    assert (found.gradients, found.weights) == (0, 2 * found.parameters)
    assert 0 < found.gradient_peak < 2 * found.parameters / 2
    assert found.state == 8 * found.parameters + 4 * len(list(model.parameters()))


def test_split_masters():
    found = measure_layout(
        network(), torch.optim.AdamW, INPUTS, policy="mixed_bfloat16", masters="split"
    )
    split, whole = COUNT - 128, 128  # parameters of the batch norm stay in float32
    parts = (found.weights, found.remainder, found.gradients)
    assert parts == (2 * split + 4 * whole, 2 * split, 2 * split + 4 * whole)
    assert found.state == 8 * COUNT + 4 * TENSORS


def test_states_in_eight_bits():
    optim = pytest.importorskip("torchao.optim")
    found = measure_layout(nn.Linear(64, 64, bias=False), optim.AdamW8bit, INPUTS)
    assert found.state == 2 * (4096 + 64 + 1024) + 4


def test_a_model_that_is_kept_in_bfloat16():
    models = [nn.Linear(64, 8).bfloat16() for _ in range(2)]
    inputs = Inputs.of(torch.ones(4, 64).bfloat16())
    plain = measure_layout(models[0], torch.optim.AdamW, inputs)
    count, tensors = 65 * 8, 2
    assert (plain.weights, plain.remainder, plain.gradients) == (2 * count, 0, 2 * count)
    assert plain.state == 4 * count + 4 * tensors
    options = {"policy": "mixed_bfloat16", "masters": "split"}
    split = measure_layout(models[1], torch.optim.AdamW, inputs, **options)
    assert (split.weights, split.remainder, split.gradients) == (2 * count, 2 * count, 2 * count)
    assert split.state == 8 * count + 4 * tensors
