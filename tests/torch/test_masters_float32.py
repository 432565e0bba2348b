"""Exact float32 values that leave and enter a model, or stay when it is converted."""

import copy

import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch import float32_state_dict, keep_masters, load_float32_state_dict
from halfstep.torch._masters._kept import master_of, true_value
from tests.torch.split_models import IN_FLOAT16, assert_same, exact, losses, made

CONVERSIONS = {
    "float": (nn.Module.float, torch.float32),
    "double": (nn.Module.double, torch.float64),
    "to": (lambda model: model.to(torch.float32), torch.float32),
    "to a part": (lambda model: [each.float() for each in model], torch.float32),
}
TRAINED = ["mixed_bfloat16", IN_FLOAT16]


def trained(policy="mixed_bfloat16", **settings):
    model, optimizer, region = made(policy=policy, **settings)
    losses(model, optimizer, 3)
    return model, optimizer, region


@pytest.mark.parametrize("policy", TRAINED)
@pytest.mark.parametrize("case", CONVERSIONS)
def test_wider_parameters_have_all_bits(case, policy):
    convert, dtype = CONVERSIONS[case]
    model, _, _ = trained(policy)
    before = exact(model)
    convert(model)
    for name, each in model.named_parameters():
        assert each.dtype is dtype
        assert torch.equal(each.detach(), before[name].to(dtype))
        assert not vars(each)


def test_a_wider_model_goes_on_with_float32_masters():
    model, optimizer, region = trained()
    other, same, _ = made(masters="cast")
    other.load_state_dict(float32_state_dict(model))
    same.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    losses(model.float(), optimizer, 3)
    losses(other, same, 3)
    assert_same(exact(model), exact(other))
    region.remove()
    losses(model, optimizer, 1)


@pytest.mark.parametrize("policy", TRAINED)
def test_the_other_half_precision_keeps_all_bits(policy):
    model, optimizer, _ = trained(policy)
    before = exact(model)
    was = model[0].weight.dtype
    model.half() if was is torch.bfloat16 else model.bfloat16()
    assert model[0].weight.dtype is not was
    assert_same(exact(model), before)
    losses(model, optimizer, 2)


@pytest.mark.parametrize("convert", [nn.Module.float, lambda model: model.bfloat16().half()])
def test_numbers_that_float16_rounds_to_zero_are_kept(convert):
    model = nn.Linear(3, 1, bias=False)
    values = torch.tensor([[1.0001, 2e-8, 0.0]])
    model.load_state_dict({"weight": values})
    keep_masters(torch.optim.SGD(model.parameters(), lr=0.1), param_dtype="float16")
    model.to(torch.float16).to("cpu")
    convert(model)
    assert torch.equal(true_value(model.weight), values)


def test_parameters_that_are_made_anew_have_all_bits(monkeypatch):
    model, _, _ = trained()
    before = exact(model)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert_same({name: each.detach() for name, each in model.named_parameters()}, before)


def test_moving_a_model_keeps_its_masters():
    model, optimizer, _ = trained()
    before = exact(model)
    master = master_of(model[0].weight)
    model.to("cpu").to(torch.bfloat16)
    assert master_of(model[0].weight) is master
    assert_same(exact(model), before)
    losses(model, optimizer, 1)


class Renamed(nn.Linear):
    """Saves its parameters under other names, as modules that changed theirs do."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_state_dict_post_hook(_old_names)
        self.register_load_state_dict_pre_hook(_new_names)


def _old_names(_module, state, prefix, _metadata):
    state[prefix + "kernel"] = state.pop(prefix + "weight")


def _new_names(_module, state, prefix, *_):
    state[prefix + "weight"] = state.pop(prefix + "kernel")


def test_hooks_that_rename_what_is_saved():
    model = Renamed(4, 3)
    keep_masters(torch.optim.SGD(model.parameters(), lr=0.1), param_dtype="bfloat16")
    kernel = torch.full((3, 4), 1 + 2.0**-20)
    load_float32_state_dict(model, {"kernel": kernel, "bias": torch.zeros(3)})
    assert torch.equal(true_value(model.weight), kernel)
    assert torch.equal(float32_state_dict(model)["kernel"], kernel)


def test_what_loads_in_part_is_exact_all_the_same():
    model, _, _ = trained()
    state = {name: torch.full_like(each, 1 + 2.0**-20) for name, each in exact(model).items()}
    state["2.weight"] = torch.zeros(1)
    before = exact(model)
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_float32_state_dict(model, state)
    assert_same(exact(model), {**state, "2.weight": before["2.weight"]})


@pytest.mark.parametrize("policy", TRAINED)
def test_loading_changes_nothing_but_the_values(policy):
    model, optimizer, _ = trained(policy)
    pointers = [each.data_ptr() for each in model.parameters()]
    gradients = [each.grad for each in model.parameters()]
    kinds = [(each.dtype, each.grad_dtype) for each in model.parameters()]
    state = {name: value * 2 for name, value in float32_state_dict(model).items()}
    load_float32_state_dict(model, state)
    assert_same(exact(model), state)
    assert [each.data_ptr() for each in model.parameters()] == pointers
    assert all(one.grad is two for one, two in zip(model.parameters(), gradients, strict=True))
    assert [(each.dtype, each.grad_dtype) for each in model.parameters()] == kinds
    losses(model, optimizer, 1)


def test_a_model_loads_float32_values_exactly():
    model, optimizer, _ = trained()
    state = {name: value * 1.001 for name, value in exact(model).items()}
    model.load_state_dict(state)
    assert_same(exact(model), state)
    halves = {name: value.bfloat16() for name, value in state.items()}
    optimizer.load_state_dict(optimizer.state_dict())
    model.load_state_dict(halves)
    assert_same(exact(model), state)
    losses(model, optimizer, 1)


def test_loading_that_would_round_is_refused():
    model = nn.Linear(2, 2).bfloat16()
    with pytest.raises(UsageError) as caught:
        load_float32_state_dict(model, nn.Linear(2, 2).state_dict())
    assert str(caught.value) == (
        "load_float32_state_dict needs masters, got weight in bfloat16 without one, which would be "
        "rounded. Call prepare or keep_masters before, or model.load_state_dict to round."
    )
    load_float32_state_dict(model.float(), nn.Linear(2, 2).state_dict())


@pytest.mark.parametrize("given", [3, {"weight": torch.ones(1)}, None])
def test_what_is_no_module_is_refused(given):
    text = f"needs a torch.nn.Module, got {type(given).__name__}. Pass the model first."
    for call in (float32_state_dict, lambda model: load_float32_state_dict(model, nn.Linear(1, 1))):
        with pytest.raises(UsageError) as caught:
            call(given)
        assert str(caught.value).endswith(text)
