"""Averages of models in half precision, against float64 and against PyTorch's own."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import (
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
    update_bn,
)

from halfstep.errors import UsageError
from halfstep.torch import AveragedModel, autocast, global_policy, prepare, set_global_policy
from halfstep.torch import _average as average

HALF = [torch.bfloat16, torch.float16]
# PyTorch's function for lists of equal weight takes no integers, such as the count of a batch norm.
FUNCTIONS = {
    "default": {},
    "avg": {"avg_fn": get_ema_avg_fn(0.9)},
    "swa avg": {"avg_fn": get_swa_avg_fn()},
    "multi": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "swa multi": {"multi_avg_fn": get_swa_multi_avg_fn()},
}


class Network(nn.Module):
    """Everything that averaging meets: a batch norm, a tied weight, buffers of several dtypes."""

    def __init__(self):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.out.weight = self.into.weight
        self.register_buffer("shift", torch.rand(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        return self.out(self.norm(self.into(inputs)).relu() + self.shift)


def holder(value=1.0, dtype=torch.bfloat16):
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, value)
    return model


def walk(model):
    """Changes everything that floats in place, as training does."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) + 0.5)
            else:
                tensor += 3


CASES = [
    pytest.param(functions, buffers, id=f"{name}, buffers {buffers}")
    for name, functions in FUNCTIONS.items()
    for buffers in (False, True)
    if not (buffers and name == "swa multi")
]


def averages(model, kind, steps=5, **arguments):
    averaged = kind(model, **arguments)
    torch.manual_seed(1)
    for _ in range(steps):
        walk(model)
        averaged.update_parameters(model)
    return averaged


def same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if one[name].dtype != other[name].dtype] == []
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("decay", [0.999, 0.9999])
def test_an_average_of_half_precision_weights_moves(dtype, decay):
    model = holder(dtype=dtype)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    ema.update_parameters(model)
    nn.init.constant_(model.weight, 2.0)
    for _ in range(1000):
        ema.update_parameters(model)
    assert ema.module.weight.dtype == torch.float32
    assert ema.module.weight.item() == pytest.approx(2 - decay**1000, rel=1e-5)


def test_pytorchs_own_stands_still():
    model = holder()
    ema = swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    ema.update_parameters(model)
    nn.init.constant_(model.weight, 2.0)
    for _ in range(1000):
        ema.update_parameters(model)
    assert ema.module.weight.item() == 1.0


@pytest.mark.parametrize(("functions", "buffers"), CASES)
def test_float32_models_have_pytorchs_average_bit_for_bit(functions, buffers):
    model = Network()
    arguments = {**functions, "use_buffers": buffers}
    ours = averages(copy.deepcopy(model), AveragedModel, **arguments)
    theirs = averages(copy.deepcopy(model), swa_utils.AveragedModel, **arguments)
    same(ours.state_dict(), theirs.state_dict())
    inputs = torch.rand(3, 4)
    assert torch.equal(ours(inputs), theirs(inputs))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("functions", "buffers"), CASES)
def test_half_models_have_the_average_of_their_values_in_float32(
    functions, buffers, dtype, monkeypatch
):
    monkeypatch.setattr(average, "_AT_ONCE", 8)
    model = Network().to(dtype)
    arguments = {**functions, "use_buffers": buffers}
    ours = AveragedModel(model, **arguments)
    theirs = swa_utils.AveragedModel(copy.deepcopy(model).float(), **arguments)
    for _ in range(5):
        walk(model)
        ours.update_parameters(model)
        theirs.update_parameters(copy.deepcopy(model).float())
    same(ours.state_dict(), theirs.state_dict())


def test_a_mixed_model_is_averaged_in_float32_and_wider():
    model = nn.ModuleList([holder(1.0, dtype) for dtype in (*HALF, torch.float32, torch.float64)])
    averaged = AveragedModel(model)
    for value in (1.0, 2.0, 4.0):
        for each in model:
            nn.init.constant_(each.weight, value)
        averaged.update_parameters(model)
    weights = [each.weight for each in averaged.module]
    assert [each.dtype for each in weights] == 3 * [torch.float32] + [torch.float64]
    assert [each.item() for each in weights] == pytest.approx(4 * [7 / 3], rel=1e-6)


def test_exact_values_are_averaged(monkeypatch):
    """What a parameter in half precision is rounded from decides, from the first moment on."""
    exact = torch.full((1, 1), 1 + 2.0**-20)
    monkeypatch.setattr(average, "true_value", lambda _parameter: exact)
    model = holder()
    averaged = AveragedModel(model)
    assert torch.equal(averaged.module.weight, exact)
    for _ in range(2):
        averaged.update_parameters(model)
        assert torch.equal(averaged.module.weight, exact)


def test_few_numbers_are_copied_at_a_time(monkeypatch):
    monkeypatch.setattr(average, "_AT_ONCE", 100)
    model = nn.ParameterList(torch.zeros(40, dtype=torch.bfloat16) for _ in range(20))
    sizes = []

    def keep(averaged, current, _count):
        sizes.append(sum(each.numel() for each in current))

    averaged = AveragedModel(model, multi_avg_fn=keep)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    assert sum(sizes) == 800
    assert max(sizes) <= 140


def test_what_needs_no_copy_comes_as_one_list():
    model = nn.ParameterList(torch.zeros(average._AT_ONCE // 2 + 1) for _ in range(3))
    lengths = []
    averaged = AveragedModel(model, multi_avg_fn=lambda old, new, _: lengths.append(len(new)))
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    assert lengths == [3]


def test_tensors_are_grouped_by_where_the_average_is():
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    groups = average._groups([(here, here), (there, there), (here, there), (there, here)])
    assert [len(group) for group in groups] == [1, 1, 1, 1]
    assert all(len({old.device for old, _ in group}) == 1 for group in groups)


@pytest.mark.gpu
@pytest.mark.parametrize("functions", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_a_model_on_several_devices_is_averaged_as_by_pytorch(functions):
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).cuda()])
    for device in (None, "cpu", "cuda"):
        ours = averages(copy.deepcopy(model), AveragedModel, device=device, **functions)
        theirs = averages(copy.deepcopy(model), swa_utils.AveragedModel, device=device, **functions)
        same(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("dtype", HALF)
def test_the_averaged_model_runs_as_the_model_does(dtype):
    model = Network().to(dtype).eval()
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    inputs = torch.rand(3, 4, dtype=dtype)
    output = averaged.eval()(inputs)
    assert output.dtype == dtype
    torch.testing.assert_close(output, model(inputs))
    assert averaged.module.into.weight.dtype == torch.float32
    assert averaged.module.out.weight is averaged.module.into.weight


def test_running_it_does_not_round_the_average():
    model = holder()
    model.register_buffer("extra", torch.ones(1, dtype=torch.bfloat16))
    averaged = AveragedModel(model, use_buffers=True)
    with torch.no_grad():
        averaged.module.weight.fill_(1 + 2.0**-20)
        averaged.module.extra.fill_(1 + 2.0**-20)
    averaged(torch.ones(1, 1, dtype=torch.bfloat16))
    assert averaged.module.weight.item() == averaged.module.extra.item() == 1 + 2.0**-20


class Counts(nn.Module):
    def __init__(self, *, anew):
        super().__init__()
        self.anew = anew
        self.register_buffer("calls", torch.zeros(1, dtype=torch.bfloat16))

    def forward(self):
        if self.anew:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return self.calls


@pytest.mark.parametrize("anew", [False, True])
def test_what_a_forward_writes_into_a_buffer_stays(anew):
    averaged = AveragedModel(Counts(anew=anew))
    assert [averaged().item() for _ in range(3)] == [1, 2, 3]
    assert averaged.module.calls.item() == 3
    assert averaged.module.calls.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_batch_norms_find_their_statistics(dtype):
    model = Network().to(dtype)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    batches = [torch.rand(16, 4, dtype=dtype) + 10 for _ in range(50)]
    update_bn(batches, averaged)
    expected = model.into(torch.cat(batches)).float().mean(0)
    torch.testing.assert_close(averaged.module.norm.running_mean, expected, rtol=1e-3, atol=1e-3)


def test_the_learning_rate_of_swa_and_its_state_dict_work():
    model = holder(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged, scheduler = AveragedModel(model), swa_utils.SWALR(optimizer, swa_lr=0.05)
    optimizer.step()
    scheduler.step()
    averaged.update_parameters(model)
    assert isinstance(averaged, swa_utils.AveragedModel)
    assert sorted(averaged.state_dict()) == ["module.weight", "n_averaged"]


def test_a_run_that_is_resumed_goes_on_with_the_same_average():
    model = Network().bfloat16()
    whole = averages(model, AveragedModel)
    again = AveragedModel(model)
    again.load_state_dict(whole.state_dict())
    walk(model)
    for each in (whole, again, pickle.loads(pickle.dumps(whole)), copy.deepcopy(whole)):
        each.update_parameters(model)
        same(each.state_dict(), whole.state_dict())


def test_a_half_precision_state_that_is_assigned_is_widened():
    model = holder()
    averaged = AveragedModel(model)
    averaged.load_state_dict(swa_utils.AveragedModel(model).state_dict(), assign=True)
    averaged.update_parameters(model)
    assert averaged.module.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALF)
def test_the_average_is_written_back_rounded_once(dtype):
    model = Network().to(dtype)
    averaged = averages(model, AveragedModel)
    model.load_state_dict(averaged.module.state_dict())
    for name, tensor in averaged.module.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.to(model.state_dict()[name].dtype))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_average_of_a_prepared_model_runs_in_mixed_precision(policy):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer, policy=policy)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    plain = swa_utils.AveragedModel(copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    inputs = torch.rand(3, 4)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
        plain.update_parameters(model)
    same(averaged.state_dict(), plain.state_dict())
    averaged.module.load_state_dict(model.state_dict())
    assert torch.equal(averaged(inputs), model(inputs))
    assert not torch.equal(averaged(inputs), nn.Sequential(*averaged.module)(inputs))


def test_a_prepared_model_with_frozen_half_weights_is_averaged_in_float32():
    model = nn.Sequential(nn.Linear(4, 4).bfloat16().requires_grad_(False), nn.Linear(4, 2))
    prepare(model, policy="mixed_bfloat16")
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    assert averaged.module[0].weight.dtype == torch.float32
    inputs = torch.rand(3, 4)
    torch.testing.assert_close(averaged(inputs), model(inputs))


def test_under_a_global_policy():
    model = Network().bfloat16()
    set_global_policy("mixed_bfloat16")
    try:
        averaged = averages(model, AveragedModel)
        output = averaged(torch.rand(3, 4))
    finally:
        set_global_policy("float32")
    assert str(global_policy()) == "float32"
    assert output.isfinite().all()


@pytest.mark.parametrize("region", [autocast, lambda: torch.autocast("cpu")])
def test_an_update_inside_of_a_region_is_exact(region):
    model = Network()
    outside = averages(copy.deepcopy(model), AveragedModel)
    with region():
        inside = averages(copy.deepcopy(model), AveragedModel)
    same(inside.state_dict(), outside.state_dict())


def test_a_compiled_model_is_averaged():
    model = Network().bfloat16().eval()
    averaged = AveragedModel(torch.compile(model, backend="eager"))
    averaged.update_parameters(model)
    inputs = torch.rand(3, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(averaged(inputs), model(inputs))


def test_another_model_is_refused():
    averaged = AveragedModel(holder())
    with pytest.raises(UsageError) as caught:
        averaged.update_parameters(Network())
    assert str(caught.value) == (
        "update_parameters needs the model that is averaged, with 1 tensors, got Network with 5. "
        "Pass the model that the average was made of."
    )


def test_both_functions_are_refused_as_by_pytorch():
    with pytest.raises(AssertionError):
        AveragedModel(holder(), avg_fn=get_ema_avg_fn(), multi_avg_fn=get_ema_multi_avg_fn())


def test_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averages(Network().half(), AveragedModel, use_buffers=True)


@pytest.mark.parametrize("given", [3, nn.Linear, holder().state_dict(), None])
def test_what_is_no_model_is_refused(given):
    text = (
        f"needs a torch.nn.Module, got {type(given).__name__}. Pass the model, not its class, its "
        "parameters or a state dict."
    )
    with pytest.raises(UsageError) as caught:
        AveragedModel(given)
    assert str(caught.value) == f"AveragedModel {text}"
    averaged = AveragedModel(holder())
    with pytest.raises(UsageError) as caught:
        averaged.update_parameters(given)
    assert str(caught.value) == f"update_parameters {text}"
    assert averaged.n_averaged == 0
