"""Each model has a name of its own, which is that of a variable where there is one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from halfstep.torch._observing._named import Names, variable_of
from halfstep.torch._scaling._gradients import ParameterNames


def model():
    return nn.Linear(1, 1)


class Trainer:
    def __init__(self):
        self.generator, self._critics = model(), [model(), model()]

    def names(self):
        return [variable_of(each) for each in (self.generator, *self._critics)]

    def names_by_a_loop(self):
        return [variable_of(critic) for critic in self._critics]


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = model()

    def name(self):
        return variable_of(self.encoder), variable_of(self)


def test_variables_attributes_and_what_is_in_them():
    encoder, heads = model(), {"left": model()}
    assert variable_of(encoder) == "encoder"
    assert variable_of(heads["left"]) == "heads['left']"
    assert Trainer().names() == ["generator", "critics[0]", "critics[1]"]
    assert Trainer().names_by_a_loop() == ["critics[0]", "critics[1]"]


def test_a_model_that_calls_its_parts_is_not_called_self():
    assert Whole().name() == ("encoder", "")


def test_the_variable_of_the_outermost_function_counts():
    def train(net):
        return variable_of(net)

    encoder, decoder = model(), model()
    assert (train(encoder), train(decoder), train(model())) == ("encoder", "decoder", "net")


def test_models_without_a_variable_are_numbered_in_the_order_of_first_use():
    names, held = Names(), SimpleNamespace(one=nn.Sequential(model()), two=nn.Sequential(model()))
    assert [names.of(held.two), names.of(held.one), names.of(held.two)] == [
        "Sequential",
        "Sequential#2",
        "Sequential",
    ]


def test_a_model_in_place_of_one_that_is_gone_has_its_name():
    names = Names()
    assert [names.of(nn.Linear(1, 1)) for _ in range(2)] == ["Linear", "Linear"]


def test_a_wrapper_is_called_as_what_is_in_it():
    inner = model()
    assert Names().of(nn.DataParallel(inner)) == "inner"
    assert Names().of(nn.DataParallel(nn.Linear(1, 1))) == "Linear"


@pytest.mark.parametrize("taken", ["Linear", "encoder"])
def test_what_is_taken_is_no_name(taken):
    encoder = model()
    names = Names(taken)
    found = [names.of(encoder), names.of(nn.Linear(1, 1))]
    assert found == [
        "encoder#2" if taken == "encoder" else "encoder",
        "Linear#2" if taken == "Linear" else "Linear",
    ]


def test_parameters_of_two_models_that_are_called_alike():
    encoder, decoder = nn.Sequential(model()), nn.Sequential(model())
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], 0.1)
    found = [name for name, _ in ParameterNames(encoder, decoder).of(optimizer)]
    assert found == ["encoder.0.weight", "encoder.0.bias", "decoder.0.weight", "decoder.0.bias"]


def test_parameters_whose_names_tell_them_apart():
    parts = nn.ModuleDict({"one": model()}), nn.ModuleDict({"two": model()})
    optimizer = torch.optim.SGD([each for part in parts for each in part.parameters()], 0.1)
    found = [name for name, _ in ParameterNames(*parts).of(optimizer)]
    assert found == ["one.weight", "one.bias", "two.weight", "two.bias"]
