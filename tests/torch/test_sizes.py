"""How large numbers are and whether they are finite, in tensors of every kind."""

import math

import pytest
import torch
from torch import nn

from halfstep.torch._looking import Looking
from halfstep.torch._observing._sizes import is_finite, largest, norm_of

KINDS = {
    "dense": torch.tensor([3.0, -4.0]),
    "half": torch.tensor([3.0, -4.0], dtype=torch.float16),
    "complex": torch.tensor([complex(3.0, -4.0)]),
    "conjugate": torch.tensor([complex(3.0, 4.0)]).conj(),
    "sparse": torch.tensor([0.0, 3.0, 0.0, -4.0]).to_sparse(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_every_kind(kind):
    tensor = KINDS[kind]
    assert is_finite(tensor).item()
    assert norm_of(tensor).item() == 5.0
    assert largest(tensor).item() in (4.0, 5.0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_one_that_is_not_finite(kind, bad):
    tensor = KINDS[kind].clone() * bad
    assert not is_finite(tensor).item()
    assert not math.isfinite(largest(tensor).item())


def test_what_is_stored_twice_for_one_place_is_added_up():
    half = torch.sparse_coo_tensor([[1, 1]], [3e38, 3e38], (3,), check_invariants=True)
    assert not is_finite(half).item()
    assert largest(half).item() == math.inf


def test_what_holds_no_numbers():
    for empty in (torch.empty(0), torch.arange(3), torch.zeros(3).to_sparse()):
        assert is_finite(empty).item()
        assert (largest(empty).item(), norm_of(empty).item()) == (0.0, 0.0)


class Filter(nn.Module):
    """Weighs frequencies."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.complex64))
        self.last = nn.Linear(8, 1)

    def forward(self, inputs):
        return self.last(torch.fft.irfft(torch.fft.rfft(inputs) * self.weight) * 1e5).log()


@pytest.fixture
def looking():
    found = Looking()
    end = found.start()
    yield found
    end()


def test_a_model_with_complex_parameters_is_looked_at(looking):
    model = Filter()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    data, norms = looking.sizes
    assert data == 1.0
    assert norms["model"] > 2.0
    assert looking.ranges(1.0) is not None
    assert looking.faults(1.0).first.operation == "log"


def test_sparse_gradients_are_looked_at(looking):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([1, 1, 2])).sum().backward()
    optimizer.step()
    assert looking.ranges(1.0) is not None
    assert not looking.faults(1.0)
    assert not looking.entered_broken


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
