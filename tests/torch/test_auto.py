"""`auto` in PyTorch: when it is measured, for what, and what follows from it."""

import pytest
import torch
from torch import nn

from halfstep.core import Chosen, FamilyTimes, Policy, override_policy, subscribe
from halfstep.errors import PolicyError
from halfstep.torch import (
    GradScaler,
    autocast,
    diagnose,
    global_policy,
    plan,
    prepare,
    ranges,
    set_global_policy,
)
from halfstep.torch import _auto as auto
from halfstep.torch._racing import calls

LARGE, SMALL = (512, 512), (16, 16)


def times(size, **ratios):
    return [FamilyTimes(family, size, 1.0, *both) for family, both in ratios.items()]


class Device:
    """What a device takes for operations, and how often it was asked."""

    def __init__(self):
        self.asked = []
        self.is_fast_in(matmul=(0.5, 30.0), attention=(2.5, 9.0))

    def is_fast_in(self, **ratios):
        self.times = (*times("large", **ratios), *times("small", matmul=(2.0, 4.0)))

    def __call__(self, device):
        self.asked.append(str(device))
        return self.times


@pytest.fixture(autouse=True)
def device(monkeypatch, tmp_path):
    """A device with given times, of which this process and its files know nothing."""
    found = Device()
    monkeypatch.setattr(auto, "_measured", found)
    monkeypatch.setattr(auto, "CHOSEN", Chosen(lambda: tmp_path))
    yield found
    set_global_policy("float32")


def trained(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, model.in_features)).square().mean().backward()
    optimizer.step()
    return model.weight.detach().clone()


def test_a_region_follows_what_the_device_is_fast_in(device):
    region = prepare(nn.Linear(*LARGE), policy="auto")
    assert region.policy.compute_dtype == "bfloat16"
    assert [(each.target, each.action) for each in region.policy.rules.edits] == [
        ("attention", "full")
    ]
    assert "2.50 times as long in bfloat16" in region.policy.rules.edits[0].reason
    assert device.asked == ["cpu"]


def test_what_it_chose_can_be_written_into_code(device):
    region = prepare(nn.Linear(*LARGE), policy="auto")
    again = prepare(nn.Linear(*LARGE), policy=str(region.policy))
    assert again.policy == region.policy


def test_a_device_is_measured_once(device):
    for _ in range(3):
        prepare(nn.Linear(*LARGE), policy="auto")
        prepare(nn.Linear(*SMALL), policy="auto")
    assert len(device.asked) == 1


SIZES = {
    "matrix": (nn.Linear(*LARGE), "bfloat16"),
    "small matrix": (nn.Linear(*SMALL), "float32"),
    "kernels": (nn.Conv2d(32, 32, 3), "bfloat16"),
    "few kernels": (nn.Conv2d(3, 8, 3), "float32"),
    "kernels of one dimension": (nn.Conv1d(64, 64, 3), "bfloat16"),
    "no weights": (nn.Identity(), "float32"),
    "vectors alone": (nn.LayerNorm(2**16), "float32"),
    "one large among small": (nn.Sequential(nn.Linear(*SMALL), nn.Linear(*LARGE)), "bfloat16"),
    "not made yet": (nn.LazyLinear(8), "float32"),
}


@pytest.mark.parametrize("name", SIZES)
def test_small_models_are_judged_by_small_operations(name):
    model, dtype = SIZES[name]
    assert auto.settled("auto", "cpu", model).compute_dtype == dtype


def test_where_nothing_is_gained_it_is_float32_to_the_last_bit(device):
    device.is_fast_in(matmul=(3.0, 30.0))
    torch.manual_seed(1)
    plain = trained(nn.Linear(*LARGE))
    torch.manual_seed(1)
    model = nn.Linear(*LARGE)
    assert str(prepare(model, policy="auto").policy) == "float32"
    assert torch.equal(trained(model), plain)


def test_a_scale_comes_with_float16(device):
    device.is_fast_in(matmul=(3.0, 0.3))
    region = prepare(nn.Linear(*LARGE), policy="auto")
    assert (str(region.policy), region.scale) == ("mixed_float16", 65536.0)


def test_a_global_policy_is_found_out_when_a_model_is_called(device):
    set_global_policy("auto")
    large, small = nn.Linear(*LARGE), nn.Linear(*SMALL)
    assert device.asked == []
    seen = []
    end = subscribe(lambda event, values: seen.append(values) if event == "region" else None)
    large(torch.ones(2, 512)), small(torch.ones(2, 16))
    end()
    (told,) = (Policy.parse(each["policy"]) for each in seen)
    assert told.compute_dtype == "bfloat16"
    assert device.asked == ["cpu"]


def test_a_model_for_which_nothing_is_gained_is_left_alone(device):
    set_global_policy("auto")
    small = nn.Linear(*SMALL)
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    (small(torch.ones(2, 16)).sum() * torch.inf).backward()
    optimizer.step()
    assert "forward" not in vars(small)
    assert not small.weight.isfinite().any()  # as in a training without halfstep


def test_the_global_policy_is_a_value(device):
    set_global_policy("auto")
    assert global_policy().compute_dtype == "bfloat16"


def test_an_autocast_is_found_out_when_it_is_entered(device):
    region = autocast("cpu", policy="auto")
    assert device.asked == []
    layer, inputs = nn.Linear(4, 4), torch.ones(2, 4)
    with region:
        assert layer(inputs).dtype == torch.bfloat16
    with region:
        assert layer(inputs).dtype == torch.bfloat16
    assert device.asked == ["cpu"]


def test_a_compiled_function_can_hold_an_autocast():
    @torch.compile(backend="eager", fullgraph=True)
    def run(inputs):
        with autocast("cpu", policy="auto"):
            return inputs @ inputs

    assert run(torch.ones(4, 4)).dtype == torch.bfloat16


def test_an_autocast_takes_auto_alone():
    with pytest.raises(PolicyError, match="and alone"):
        autocast("cpu", policy="auto, scale=none")


def test_it_wins_over_what_a_script_asks_for(device):
    with override_policy("auto"):
        assert prepare(nn.Linear(*LARGE), policy="mixed_float16").policy.compute_dtype == "bfloat16"
        island = prepare(nn.Linear(*LARGE), policy="float32")
        assert str(island.policy) == "float32"
        with autocast("cpu", dtype=torch.float16):
            assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype == torch.bfloat16
        assert not GradScaler("cpu").is_enabled()


def test_another_policy_wins_over_it(device):
    with override_policy("mixed_float16"):
        assert str(prepare(nn.Linear(*LARGE), policy="auto").policy) == "mixed_float16"
        set_global_policy("auto")
        assert str(global_policy()) == "mixed_float16"
    assert device.asked == []


def test_a_scaler_does_not_start_cuda(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with override_policy("auto"):
        assert GradScaler("cuda").is_enabled()
    assert device.asked == []


def test_the_global_policy_does_not_start_cuda(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    set_global_policy("auto")
    global_policy()
    assert device.asked == ["cpu"]


def test_what_examines_a_model_takes_it():
    model, batch = nn.Linear(*LARGE), torch.ones(4, 512)

    def loss_fn(model, batch):
        return model(batch).square().mean()

    assert not diagnose(model, batch, loss_fn, policy="auto").faults
    assert ranges(model, batch, loss_fn, policy="auto").form == "bfloat16"


def test_a_plan_wants_a_model_that_nothing_lowers():
    set_global_policy("auto")
    with pytest.raises(Exception, match="nobody has prepared"):
        plan(nn.Linear(*LARGE), torch.ones(4, 512), lambda model, batch: model(batch).mean())


@pytest.mark.parametrize(
    "around", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")]
)
def test_what_is_around_has_no_say(around, monkeypatch):
    """All operations run on this processor, whose random numbers stay what they are."""
    monkeypatch.undo()
    before = torch.get_rng_state()
    with around():
        found = auto._measured(torch.device("cpu"))
    assert {(each.family, each.size) for each in found} == {
        (entry.family, entry.size) for entry in calls(torch.device("cpu"))
    }
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("entry", calls(torch.device("cpu")), ids="-".join)
def test_every_operation_runs_in_every_format(entry):
    gradients = calls(torch.device("cpu"))[entry]()
    assert all(each.isfinite().all() for each in gradients)
    assert getattr(torch, entry.dtype.removeprefix("full_")) in {each.dtype for each in gradients}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_program_is_traced_of_a_model_that_has_run(device):
    set_global_policy("auto")
    model, inputs = nn.Sequential(nn.Linear(*LARGE), nn.ReLU()), torch.ones(2, 512)
    model(inputs)
    traced = torch.jit.trace(model, inputs, check_trace=False)
    assert traced(inputs).dtype is torch.float32
    assert [name for name, each in model.named_modules() if "forward" in vars(each)] == [""]
