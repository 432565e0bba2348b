"""Masters that are loaded: to the parameter they belong to, whoever maps state dicts on the way."""

import copy

import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch import keep_masters
from halfstep.torch._masters._kept import true_value

DTYPES = ["bfloat16", "float16"]


def trained(dtype, steps=3):
    """Returns three parameters of one shape with masters, and their optimizer."""
    torch.manual_seed(0)
    # The last one is too small for 16 more bits than those of float16.
    half = [nn.Parameter(torch.randn(4) * factor) for factor in (1.0, 1.0, 1e-7)]
    optimizer = torch.optim.Adam(half, lr=1e-3)
    keep_masters(optimizer, param_dtype=dtype)
    for _ in range(steps):
        for each in half:
            each.grad = torch.randn_like(each, dtype=each.grad_dtype).detach()
        optimizer.step()
    return half, optimizer


def assert_same(one, other):
    (half, optimizer), (again, loaded) = one, other
    for left, right in zip(half, again, strict=True):
        assert torch.equal(true_value(left), true_value(right))
        states = optimizer.state[left], loaded.state[right]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            assert value.dtype is states[1][name].dtype
            assert torch.equal(value, states[1][name])


def reversed_keys(_optimizer, state):
    (group,) = state["param_groups"]
    groups = [{**group, "params": group["params"][::-1]}]
    return {"state": state["state"], "param_groups": groups}


def renamed(_optimizer, state):
    """Maps states to other numbers, as hooks that go by names do."""
    states = {2 - key: value for key, value in state["state"].items()}
    return {"state": states, "param_groups": state["param_groups"]}


@pytest.mark.parametrize("change", [reversed_keys, renamed])
@pytest.mark.parametrize("when", ["before", "after", "by hand"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_in_another_order(dtype, when, change):
    half, optimizer = trained(dtype)
    state = copy.deepcopy(optimizer.state_dict())
    again = [nn.Parameter(each.detach().clone()) for each in half]
    loaded = torch.optim.Adam(again[::-1], lr=1e-3)
    if when == "before":
        loaded.register_load_state_dict_pre_hook(change)
    keep_masters(loaded)
    if when == "after":
        loaded.register_load_state_dict_pre_hook(change)
    loaded.load_state_dict(change(loaded, state) if when == "by hand" else state)
    assert_same((half, optimizer), (again, loaded))


@pytest.mark.parametrize("dtype", DTYPES)
def test_loading_changes_nothing_of_the_state_dict(dtype):
    half, optimizer = trained(dtype)
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    optimizer.load_state_dict(state)
    assert [*map(set, state["state"].values())] == [*map(set, before["state"].values())]
    assert [*map(set, optimizer.state.values())] == [{"step", "exp_avg", "exp_avg_sq"}] * 3
    optimizer.load_state_dict(before)
    assert_same((half, optimizer), trained(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_parameter_that_was_never_stepped_has_no_state(dtype):
    _, optimizer = trained(dtype, steps=0)
    state = copy.deepcopy(optimizer.state_dict())
    half, loaded = trained(dtype, steps=2)
    loaded.load_state_dict(state)
    assert not loaded.state
    for each in half:
        each.grad = torch.ones_like(each, dtype=each.grad_dtype)
    loaded.step()
    assert {loaded.state[each]["step"].item() for each in half} == {1.0}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_dict_that_does_not_load_leaves_the_next_one_right(dtype):
    half, optimizer = trained(dtype)
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    optimizer.load_state_dict(state)
    assert_same((half, optimizer), trained(dtype))


@pytest.mark.parametrize("value", [1.0, 1e-7])
def test_a_master_of_another_shape_is_refused(value):
    small, large = (nn.Parameter(torch.full(shape, value)) for shape in ((3,), (4, 3)))
    one, other = (torch.optim.SGD([each], lr=0.1) for each in (small, large))
    for each in (one, other):
        keep_masters(each, param_dtype="float16")
    name = "float16_remainder" if value == 1.0 else "float16_master"
    with pytest.raises(UsageError) as error:
        other.load_state_dict(one.state_dict())
    assert str(error.value) == (
        f"load_state_dict() needs a '{name}' of shape (4, 3), got (3,). Load it into an optimizer "
        "with the same parameters, in the same order."
    )
