"""How large the numbers of a tensor are can be told of tensors of every kind."""

import math

import pytest
import torch
from torch import nn

from halfstep.torch._called import Call
from halfstep.torch._looking import Looking
from halfstep.torch._observing._sizes import is_finite, largest, norm_of

_KINDS = {
    "dense": lambda: torch.tensor([[3.0, -4.0]]),
    "half": lambda: torch.tensor([[3.0, -4.0]]).half(),
    "sparse": lambda: torch.tensor([[3.0, 0.0, -4.0]]).to_sparse(),
    "compressed": lambda: torch.tensor([[3.0, 0.0, -4.0]]).to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor([torch.tensor([3.0, -4.0])], layout=torch.jagged),
    "complex": lambda: torch.tensor([complex(0.0, 3.0), -4.0]),
}


# PyTorch warns of the layouts themselves.
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", _KINDS)
def test_tensors_that_hold_numbers(kind):
    tensor = _KINDS[kind]()
    assert (float(largest(tensor)), float(norm_of(tensor))) == (4.0, 5.0)
    assert is_finite(tensor)
    assert not is_finite(tensor * math.nan)
    assert math.isnan(largest(tensor * math.nan))


def test_what_is_stored_twice_for_one_place_is_added_up():
    twice = torch.sparse_coo_tensor([[0, 0]], [3e38, 3e38], (2,), check_invariants=True)
    assert not is_finite(twice)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3),
        torch.empty(3, device="meta"),
        torch.ones(2, dtype=torch.int64),
    ],
    ids=["empty", "meta", "integers"],
)
def test_tensors_that_hold_none(tensor):
    assert (float(largest(tensor)), float(norm_of(tensor))) == (0.0, 0.0)
    assert is_finite(tensor)


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.cfloat))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, inputs):
        return torch.fft.rfft(inputs) * self.weight + self.nothing.sum()


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 2)

    def forward(self, graph, inputs):
        return self.last(torch.sparse.mm(graph, inputs))


@pytest.fixture
def looking():
    looks = Looking()
    end = looks.start()
    yield looks
    end()


def test_a_step_of_a_model_of_complex_and_of_empty_tensors(looking):
    model = Filter()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 8)).abs().square().sum().backward()
    expected = float(model.weight.grad.abs().max())
    optimizer.step()
    assert not looking.faults(1.0)
    rows = {row.role: row for row in looking.ranges(1.0).ranges.rows}
    assert rows["grad_weight"].reference.largest == pytest.approx(expected)
    assert looking.sizes == (1.0, {"model": pytest.approx(math.sqrt(5.0))})


def test_a_complex_parameter_that_a_step_broke(looking):
    model = Filter()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (model(torch.ones(2, 8)).real * math.nan).sum().backward()
    optimizer.step()
    looking.forget()
    model(torch.ones(2, 8)).real.sum().backward()
    first = looking.faults(1.0).first
    assert first.parameter == "weight"
    assert "made the parameter nan, in float32" in str(first)


def test_a_step_of_an_embedding_with_sparse_gradients(looking):
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    sparse = torch.optim.SparseAdam(model[0].parameters())
    dense = torch.optim.Adam(model[1].parameters())
    model(torch.tensor([1, 1, 2])).square().sum().backward()
    sparse.step(), dense.step()
    assert not looking.faults(1.0)
    assert looking.ranges(1.0).ranges.modules == ("0", "1")
    assert looking.sizes[1]["model"] > 0.0


@pytest.mark.parametrize("asks", [False, True])
def test_a_model_that_is_called_with_a_sparse_graph(looking, asks):
    model, graph = Mixing(), torch.eye(8).to_sparse().requires_grad_(asks)
    model(graph, torch.full((8, 8), 3.0)).square().sum().backward()
    assert not looking.faults(1.0)
    assert looking.sizes[0] == 3.0


def test_a_model_with_parameters_on_no_device(looking):
    model = Mixing()
    model.unused = nn.Linear(2, 2, device="meta")
    assert Call.of(model, (), {}).around == ()


@pytest.mark.parametrize("setting", ["lr", "weight_decay"])
def test_a_setting_of_the_optimizer_that_is_no_number_is_to_blame(looking, setting):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0][setting] = math.nan
    for _ in range(2):
        looking.forget()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    fault = looking.faults(1.0).first
    assert fault.operation == "update"
    assert f"{setting}=nan" in fault.source
    assert fault.note.startswith(f"{setting} is no number that can be: look at what sets it")
