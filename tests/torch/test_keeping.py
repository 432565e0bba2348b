import pytest
import torch
from torch import nn

from halfstep.core import subscribe
from halfstep.torch._keeping import watch_kept
from halfstep.torch._watch import watch


@pytest.fixture
def found():
    reports = []
    end = watch_kept(reports.append)
    yield reports
    end()


def train(model, *optimizers, steps):
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


def test_the_first_three_steps_are_reported(found):
    model = nn.Linear(4, 1)
    train(model, torch.optim.Adam(model.parameters()), steps=5)
    assert [(each["steps"], each["last"]) for each in found] == [(1, False), (2, False), (3, True)]
    assert found[-1]["kept"]["state"] == 5 * 8 + 2 * 4
    assert found[-1]["trained"][0]["per_value"] == 8.0


def test_optimizers_that_take_turns_are_added(found):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    first, second = (torch.optim.Adagrad(part.parameters()) for part in model)
    train(model, first, second, steps=4)
    assert [each["kept"]["parameters"] for each in found] == [20, 25, 25]
    assert [each["sizes"] for each in found[-1]["trained"]] == [[16, 4], [4, 1]]


def test_buffers_of_every_model_are_besides(found):
    model, teacher = nn.Linear(4, 1), nn.Linear(1000, 10)
    train(model, torch.optim.SGD(model.parameters()), steps=1)
    assert found[0]["kept"]["weights"] == 20
    assert found[0]["kept"]["others"] >= 4 * sum(each.numel() for each in teacher.parameters())


def test_the_steps_that_find_out_about_state_are_told_to_nobody(found):
    told = []
    ends = [watch(), subscribe(lambda event, values: told.append(event))]
    model = nn.Linear(4, 1)
    train(model, torch.optim.AdamW(model.parameters()), steps=1)
    for end in ends:
        end()
    assert told.count("step") == told.count("update") == 1


def test_a_lazy_module_that_was_not_called_holds_nothing(found):
    waiting = nn.LazyLinear(2)
    model = nn.Linear(4, 1)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    assert len(found) == 1
    assert waiting.has_uninitialized_params()
