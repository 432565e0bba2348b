import sys

import pytest
import torch
from torch import nn

from halfstep.errors import MissingExtraError, UsageError
from halfstep.torch._makers import describe, eight_bit_maker, maker, state_of


@pytest.mark.parametrize(
    ("name", "per_value"),
    [("SGD", 0), ("Adagrad", 4), ("RMSprop", 4), ("AdamW", 8), ("Adam", 8), ("NAdam", 8)],
)
def test_the_state_of_a_value(name, per_value):
    assert state_of(getattr(torch.optim, name), {}).per_value == per_value


def test_options():
    made = maker("Adam, lr=0.5, betas=(0.8, 0.9), amsgrad=True")(list(nn.Linear(1, 1).parameters()))
    assert (made.defaults["lr"], made.defaults["betas"]) == (0.5, (0.8, 0.9))
    assert describe([made], [])[0]["per_value"] == 12.0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Adm", "needs the name of an optimizer of torch.optim, got 'Adm'. Write one of ASGD, "),
        ("Optimizer", "needs the name of an optimizer of torch.optim, got 'Optimizer'."),
        ("lr_scheduler", "needs the name of an optimizer of torch.optim"),
        ("SGD, momentum", "needs a name and options such as 'SGD, momentum=0.9', got"),
        ("SGD, lr=f()", "needs a name and options"),
        ("", "needs a name and options"),
        (
            "LBFGS, lr=0.1",
            "--optimizer needs one whose step can do without a closure, got 'LBFGS'. Name a script "
            "that trains with it: halfstep memory train.py",
        ),
    ],
)
def test_what_is_no_optimizer(text, error):
    with pytest.raises(UsageError) as raised:
        maker(text)
    assert error in str(raised.value)
    assert "LBFGS," not in str(raised.value).partition("Write one of")[2]


def test_a_class_that_adds_defaults_for_its_parent():
    optimizer = torch.optim.AdamW(nn.Linear(4, 1).parameters(), amsgrad=True)
    assert "decoupled_weight_decay" in optimizer.defaults
    assert describe([optimizer], [])[0]["per_value"] == 12.0


def test_parameters_of_several_optimizers_count_once():
    model = nn.Linear(4, 1)
    first, second = (torch.optim.SGD(model.parameters()) for _ in range(2))
    assert [each["sizes"] for each in describe([first, second], [model])] == [[4, 1], []]


def test_an_optimizer_that_cannot_be_tried():
    state = state_of(torch.optim.SparseAdam, {})
    assert state.per_value is None
    assert state.reason.startswith("a step of SparseAdam with one small parameter failed: ")


def test_an_optimizer_whose_step_needs_a_closure():
    state = state_of(torch.optim.LBFGS, {})
    assert state.per_value is None
    assert state.reason == "LBFGS needs a closure to step, which only the script has"


def test_torchao_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(
        MissingExtraError, match=r"Install it: python -m pip install 'halfstep\[torchao\]'"
    ):
        eight_bit_maker("AdamW", "AdamW8bit")


def test_parameters_beside_statistics_cannot_be_split():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))])
    assert describe([optimizer], model.modules())[0]["unsplit"] == 16 + 3


def test_a_module_that_holds_the_same_values_as_buffers_does_not_count():
    model, other = nn.Linear(4, 8), nn.Module()
    other.weight = model.weight
    other.register_buffer("alike", torch.ones(8, 4))
    found = describe([torch.optim.SGD(model.parameters())], [model, other])
    assert found[0]["unsplit"] == 0
