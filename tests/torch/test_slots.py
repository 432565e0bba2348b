import collections

import pytest
import torch
from torch import nn

from halfstep.torch._regions._slots import (
    Substitution,
    arguments,
    attributes,
    distinct,
    has_lazy,
    modules_of,
    new_results,
    parameters,
    put,
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
        self.register_buffer("computed", torch.ones(7, requires_grad=True))
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
    shapes = [(2, 2), (2,), (2,), (3,), (4,), (5,), (7,)]
    assert sorted(tuple(tensor.shape) for _, _, tensor in found) == sorted(shapes)
    assert len(distinct(found)[0]) == len(found)


def test_frozen_parameters_are_not_among_them():
    module = Holder()
    module.inner.requires_grad_(False)
    assert names(module) == {(2,), (3,), (4,), (5,), (7,)}


def test_weights_that_a_recurrent_network_keeps_twice_are_one():
    module = nn.LSTM(2, 3)
    found = slots(module)
    assert len(found) == 8
    tensors, indices = distinct(found)
    assert len(tensors) == 4
    assert [tensors[index] for index in indices] == [tensor for *_, tensor in found]


def test_tied_weights_are_one():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    assert len(slots(module)) == 2
    assert distinct(slots(module)) == ([module[0].weight], [0, 0])


def test_a_result_in_two_places_is_two():
    module = nn.Module()
    module.one = module.other = torch.ones(1, requires_grad=True) * 2
    assert distinct(slots(module))[1] == [0, 1]


def nested(depth, value):
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(("depth", "found"), [(6, 1), (7, 0)])
def test_containers_are_looked_into_six_deep(depth, found):
    module = nn.Module()
    module.deep = nested(depth, torch.ones(1, requires_grad=True))
    assert len(attributes([module])) == found
    assert len(arguments([module.deep], {})) == found
    assert len(arguments([], {"deep": module.deep})) == found


def test_what_holds_itself_is_looked_into_once():
    held = {"tensor": torch.ones(1, requires_grad=True)}
    held["self"] = held
    assert len(arguments([held], {})) == 1


class State:
    def __init__(self):
        self.tensor = torch.ones(1, requires_grad=True)
        self.items = [self.tensor * 2, 3]


def test_objects_and_modules_in_plain_lists_are_looked_into():
    module = nn.Module()
    module.state, module.layers = State(), [nn.Linear(2, 3), nn.Sequential(nn.Linear(4, 5))]
    expected = [module.state.tensor, module.state.items[0], *module.layers[0].parameters()]
    expected += module.layers[1].parameters()
    found = [tensor for *_, tensor in attributes([module])]
    assert {id(each) for each in found} == {id(each) for each in expected}
    assert len(found) == len(expected)


def test_arguments_are_replaced_in_place():
    state, tensors = State(), [torch.ones(2, requires_grad=True) for _ in range(3)]
    args, kwargs = [tensors[0], (1, tensors[1]), state], {"other": {"x": tensors[2]}, "n": 3}
    found = arguments(args, kwargs)
    before = [tensor for *_, tensor in found]
    assert before == [*tensors[:2], state.tensor, state.items[0], tensors[2]]
    new = [tensor.detach() for tensor in before]
    with Substitution(found, new):
        assert args[0] is new[0]
        assert args[1][1] is new[1]
        assert state.tensor is new[2]
        assert kwargs["other"]["x"] is new[4]
    assert args == [tensors[0], (1, tensors[1]), state]
    assert kwargs["other"]["x"] is tensors[2]
    assert state.tensor is before[2]


def test_a_parameter_without_a_shape_is_lazy():
    assert has_lazy(slots(nn.LazyLinear(2)))
    assert not has_lazy(slots(nn.Linear(2, 2)))


def test_new_results_are_what_was_computed_since():
    module = Holder()
    module.before = module.attribute * 2
    tensors, _ = distinct(slots(module))
    assert new_results(slots(module), tensors) == []
    module.named["c"] = module.attribute * 3
    module.another = torch.ones(1, requires_grad=True)
    assert [name for _, name, _ in new_results(slots(module), tensors)] == ["c"]


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
    new = [tensor.detach() * 2 for *_, tensor in found]
    try:
        with Substitution(found, new):
            assert any(module.attribute is each for each in new)
            assert torch.equal(module.computed, torch.full((7,), 2.0))
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


def test_a_substitution_can_be_undone_for_a_while():
    module = Holder()
    before, found = contents(module), slots(module)
    around = Substitution(found, [tensor.detach() * 2 for *_, tensor in found])
    with around:
        inside = contents(module)
        with around.undone():
            assert all(one is other for one, other in zip(contents(module), before, strict=True))
            module.attribute = mine = torch.zeros(1)
        assert module.attribute is mine
        assert contents(module)[0] is inside[0] is not before[0]
        assert module.pair[1] is inside[-1]
    assert module.attribute is mine
    assert module.pair[1] is before[-1]


def test_a_named_tuple_stays_one():
    kind = collections.namedtuple("kind", "one other")
    module = nn.Module()
    module.kept = before = kind(torch.ones(1, requires_grad=True), 3)
    found = slots(module)
    with Substitution(found, [torch.zeros(1)]):
        assert type(module.kept) is kind
        assert module.kept.one.item() == 0.0
    assert module.kept.one is before.one


def test_what_a_forward_puts_somewhere_stays():
    module = Holder()
    found = slots(module)
    new = [tensor.detach() for *_, tensor in found]
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
    with Substitution(found, [tensor.detach() for *_, tensor in found]):
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
