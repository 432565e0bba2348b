import collections
import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from halfstep.torch._regions._tree import tensors_in, with_tensors


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    one: Any
    other: Any


class Custom:
    def __init__(self, one, other):
        self.one, self.other = one, other


class Listed(list):
    """A list of its own kind, with an attribute."""


LEAVES = st.builds(lambda: torch.zeros(1)) | st.sampled_from(
    [None, 3, 2.5, "text", torch.float16, torch.device("cpu"), len, nn.Linear(1, 1)]
)
TREES = st.recursive(
    LEAVES,
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.lists(child, max_size=3).map(tuple),
        st.lists(child, max_size=3).map(Listed),
        st.dictionaries(st.text("abc", max_size=2), child, max_size=3),
        st.dictionaries(st.text("abc", max_size=2), child, max_size=3).map(collections.OrderedDict),
        st.builds(Pair, child, child),
        st.builds(Frozen, child, child),
        st.builds(Custom, child, child),
    ),
    max_leaves=8,
)


def flat(value):
    """Returns types and leaves, in order, as a reference that shares nothing with the code."""
    if isinstance(value, dict):
        return [type(value), *[each for key in value for each in (key, *flat(value[key]))]]
    if isinstance(value, (list, tuple)):
        return [type(value), *[each for child in value for each in flat(child)]]
    if isinstance(value, (Frozen, Custom)):
        return [type(value), *flat(value.one), *flat(value.other)]
    return [value]


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(mine is its or (type(mine) is str and mine == its) for mine, its in pairs)


@given(TREES)
def test_tensors_are_found_in_order_and_replaced(value):
    before = flat(value)
    found = tensors_in(value)
    assert [id(each) for each in before if isinstance(each, torch.Tensor)] == [*map(id, found)]
    new = [torch.ones(2) for _ in found]
    after = flat(with_tensors(value, new))
    rest = iter(new)
    expected = [next(rest) if isinstance(each, torch.Tensor) else each for each in before]
    assert same(after, expected)
    assert same(flat(value), before)


@given(TREES)
def test_putting_back_what_was_found_changes_nothing(value):
    again = flat(with_tensors(value, tensors_in(value)))
    assert same(again, flat(value))


def test_one_object_in_two_places_stays_one():
    shared = Custom(torch.zeros(1), 3)
    found = tensors_in([shared, (shared,)])
    assert len(found) == 1
    after = with_tensors([shared, (shared,)], [torch.ones(1)])
    assert after[0] is after[1][0]
    assert after[0].one.item() == 1.0
    assert shared.one.item() == 0.0


def test_what_holds_no_tensor_is_not_copied():
    plain = Custom(1, [2])
    assert with_tensors({"x": plain, "y": torch.ones(1)}, [torch.ones(1)])["x"] is plain


def test_subclasses_of_containers_keep_what_else_they_hold():
    listed = Listed([torch.zeros(1)])
    listed.note = "kept"
    after = with_tensors(listed, [torch.ones(1)])
    assert type(after) is Listed
    assert after.note == "kept"
    counted = collections.defaultdict(lambda: 5, a=torch.zeros(1))
    assert with_tensors(counted, [torch.ones(1)])["missing"] == 5
    assert "missing" not in counted


def test_return_types_of_torch():
    value = torch.ones(3).max(0)
    after = with_tensors(value, [torch.zeros(()), torch.ones(())])
    assert type(after) is type(value)
    assert after.values.item() == 0.0


def test_objects_with_slots_are_passed_as_they_are():
    class Slotted:
        __slots__ = ("one",)

    slotted = Slotted()
    slotted.one = torch.zeros(1)
    assert tensors_in(slotted) == []
    assert with_tensors(slotted, []) is slotted


def test_parameters_of_a_module_are_not_among_what_is_returned():
    assert tensors_in([nn.Linear(2, 2), nn.Linear]) == []


def test_a_model_output_of_transformers():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.BaseModelOutput(last_hidden_state=torch.zeros(1), attentions=(torch.ones(1),))
    new = [torch.ones(2), torch.ones(3)]
    after = with_tensors(value, new)
    assert type(after) is type(value)
    assert after.last_hidden_state is after[0] is after["last_hidden_state"] is new[0]
    assert after.attentions[0] is new[1]
    assert after.hidden_states is None
    assert value[0].item() == 0.0


def test_a_copy_shares_only_what_is_no_container():
    value = {"a": [torch.zeros(1)], "b": 3}
    assert with_tensors(value, tensors_in(value)) is value
    after = with_tensors(value, [torch.zeros(1)])
    assert after["a"] is not value["a"]
    after["a"].append(1)
    assert value == copy.copy(value)
    assert len(value["a"]) == 1
