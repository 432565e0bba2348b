import collections

import pytest
import torch
from torch import nn

from halfstep.torch._regions._slots import (
    Substitution,
    attributes,
    modules_of,
    parameters,
    put,
    unique,
)


def slots(module):
    modules = modules_of(module)
    return [*parameters(modules), *attributes(modules)]


class Holder(nn.Module):
    """Holds tensors in every place that a module can."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("buffer", torch.ones(1))
        self.attribute = torch.ones(2, requires_grad=True)
        self.listed = [torch.ones(3, requires_grad=True), 3, torch.ones(3)]
        self.named = {"a": torch.ones(4, requires_grad=True), "b": None}
        self.pair = (1, torch.ones(5, requires_grad=True))
        self.frozen = torch.ones(6)
        self.empty = []


def names(module):
    return {tuple(tensor.shape) for _, _, tensor in slots(module)}


def test_each_place_that_holds_a_tensor_with_a_gradient_is_found_once():
    module = Holder()
    found = slots(module)
    shapes = [(2, 2), (2,), (2,), (3,), (4,), (5,)]
    assert sorted(tuple(tensor.shape) for _, _, tensor in found) == sorted(shapes)
    assert len(unique(found)) == len(found)


def test_frozen_parameters_are_not_among_them():
    module = Holder()
    module.inner.requires_grad_(False)
    assert names(module) == {(2,), (3,), (4,), (5,)}


def test_weights_that_a_recurrent_network_keeps_twice_are_one():
    module = nn.LSTM(2, 3)
    found = slots(module)
    assert len(found) == 8
    assert len(unique(found)) == 4


def test_tied_weights_are_one():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    assert len(slots(module)) == 2
    assert len(unique(slots(module))) == 1


def contents(module):
    return [
        *module.parameters(),
        module.attribute,
        *module.listed,
        *module.named.values(),
        *module.pair,
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_a_substitution_puts_everything_back(fails):
    module = Holder()
    before, found = contents(module), slots(module)
    new = {key: tensor.detach() * 2 for key, tensor in unique(found).items()}
    try:
        with Substitution(found, new):
            assert module.attribute is new[id(before[2])]
            assert module.listed[0].tolist() == [2.0] * 3
            assert module.listed[1:] == [3, before[5]]
            assert module.named["a"].tolist() == [2.0] * 4
            assert module.pair[0] == 1
            assert module.pair[1].tolist() == [2.0] * 5
            assert type(module.pair) is tuple
            assert torch.equal(module.inner.weight, 2 * before[0])
            if fails:
                raise ValueError
    except ValueError:
        assert fails
    assert all(one is other for one, other in zip(contents(module), before, strict=True))


def test_a_named_tuple_stays_one():
    kind = collections.namedtuple("kind", "one other")
    module = nn.Module()
    module.kept = before = kind(torch.ones(1, requires_grad=True), 3)
    found = slots(module)
    with Substitution(found, {id(before.one): torch.zeros(1)}):
        assert type(module.kept) is kind
        assert module.kept.one.item() == 0.0
    assert module.kept.one is before.one


def test_what_a_forward_puts_somewhere_stays():
    module = Holder()
    found = slots(module)
    new = {key: tensor.detach() for key, tensor in unique(found).items()}
    mine = torch.zeros(1)
    with Substitution(found, new):
        module.attribute = module.listed[0] = module.named["a"] = mine
        module.pair = (mine,)
        del module.inner.weight
    assert module.attribute is module.listed[0] is module.named["a"] is module.pair[0] is mine
    assert "weight" not in module.inner._parameters


def test_a_list_that_became_shorter_does_no_harm():
    module = Holder()
    found = slots(module)
    with Substitution(found, {key: tensor.detach() for key, tensor in unique(found).items()}):
        module.listed.clear()
        module.named.clear()
        module.pair = ()
    assert (module.listed, module.named, module.pair) == ([], {}, ())


def test_a_place_is_changed_only_if_it_holds_what_it_is_known_for():
    holder = {"a": torch.ones(1)}
    place = (holder, "a", holder["a"])
    put(place, other := torch.zeros(1))
    assert holder["a"] is other
    put(place, torch.ones(2))
    assert holder["a"] is other
    holder.clear()
    put(place, torch.ones(2))
    assert holder == {}


def test_modules_are_those_of_pytorch_each_once():
    module = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.ReLU()))
    module.append(module[0])
    module.register_module("nothing", None)
    assert set(modules_of(module)) == set(module.modules())
    assert len(modules_of(module)) == len(list(module.modules()))


@pytest.mark.parametrize("before", [None, 3, (1, 2)])
def test_an_attribute_that_becomes_a_tensor_is_found(before):
    module = nn.Linear(1, 1)
    module.extra = before
    assert attributes([module]) == []
    module.extra = torch.ones(1, requires_grad=True)
    assert [name for _, name, _ in attributes([module])] == ["extra"]
