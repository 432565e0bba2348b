"""A policy that is only offered is in force until a script asks for a precision itself."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep.torch as hst
from halfstep.core import subscribe
from halfstep.torch._offer import Offer
from halfstep.torch._own import Own
from halfstep.torch._regions._forward import forward_of


@pytest.fixture
def offered():
    """Offers a policy, and collects what is told of regions and of precisions."""
    told = []
    ends = [subscribe(lambda event, values: told.append((event, values))), Own().start()]
    Offer("mixed_float16")
    yield told
    hst.set_global_policy("float32")
    while ends:
        ends.pop()()


def asked(told):
    return [values["how"] for event, values in told if event == "precision"]


def regions(told):
    return sum(values.get("count", 1) for event, values in told if event == "region")


class Inside(nn.Module):
    """Draws and counts, and then asks for a precision."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        drawn = F.dropout(self.norm(inputs)) * random.random()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.last(drawn)


def low():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_a_script_that_asks_for_none_trains_by_it(offered):
    model = nn.Linear(8, 2)
    model(torch.randn(4, 8))
    assert forward_of(model).region.policy.compute_dtype == "float16"
    assert (asked(offered), regions(offered)) == ([], 1)


def test_a_call_that_asks_for_one_begins_anew(offered):
    torch.manual_seed(0)
    random.seed(0)
    model, inputs = Inside(), torch.randn(16, 8)
    plain, states = copy.deepcopy(model), (torch.get_rng_state(), random.getstate())
    output = model(inputs)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    assert forward_of(model) is None
    assert output.dtype is torch.bfloat16
    assert torch.equal(output, plain(inputs))
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert regions(offered) == 0
    assert set(asked(offered)) == {"torch.autocast"}


@pytest.mark.parametrize("autocast", [torch.autocast, hst.autocast])
def test_models_that_were_called_before_leave_it(offered, autocast):
    first, second = nn.Linear(8, 8), nn.Linear(8, 2)
    first(torch.randn(4, 8))
    with autocast("cpu", dtype=torch.bfloat16):
        second(torch.randn(4, 8))
    assert forward_of(first) is forward_of(second) is None
    assert regions(offered) == 0


def test_a_decorated_function_asks_where_it_is_called(offered):
    model = nn.Linear(8, 8)

    @hst.autocast("cpu", dtype=torch.bfloat16)
    def called():
        return model(torch.ones(1, 8))

    assert asked(offered) == []
    assert called().dtype is torch.bfloat16
    assert asked(offered) == ["halfstep.torch.autocast"]
    assert forward_of(model) is None


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, hst.GradScaler])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_asks_if_it_is_enabled(offered, scaler, enabled):
    scaler("cpu", enabled=enabled)
    nn_ = nn.Linear(8, 2)
    nn_(torch.ones(1, 8))
    assert (forward_of(nn_) is None) == enabled == (len(asked(offered)) == 1)


def test_what_casts_nothing_asks_for_nothing(offered):
    model = nn.Linear(8, 2)
    with torch.autocast("cpu", enabled=False):
        model(torch.ones(1, 8))
    assert asked(offered) == []
    assert forward_of(model) is not None


def test_what_a_checkpoint_enters_again_is_not_asked_for(offered):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, inputs):
            return torch.utils.checkpoint.checkpoint(self.inner, inputs, use_reentrant=False)

    model = Again()
    model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert asked(offered) == []
    assert forward_of(model) is not None


def test_regions_of_the_script_stay(offered):
    other, own = nn.Linear(8, 2), nn.Linear(8, 2)
    other(torch.ones(1, 8))
    region = hst.prepare(own)
    other(torch.ones(1, 8))
    own(torch.ones(1, 8))
    assert forward_of(other) is None
    assert forward_of(own).region is region
    assert (asked(offered), regions(offered)) == (["prepare"], 1)


def test_a_global_policy_of_the_script_takes_its_place(offered):
    model = nn.Linear(8, 2)
    model(torch.ones(1, 8))
    hst.set_global_policy("mixed_bfloat16")
    model(torch.ones(1, 8))
    assert str(forward_of(model).region.policy) == "mixed_bfloat16"
    assert (asked(offered), regions(offered)) == (["set_global_policy"], 1)


def test_gradients_that_are_on_their_way_are_still_looked_at(offered):
    first, second = nn.Linear(8, 8), nn.Linear(8, 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    weight = first.weight.detach().clone()
    made = first(torch.full((4, 8), 6e4))
    with low():
        second(torch.ones(4, 8)).float().sum().backward()
    (made * 1e30).sum().backward()
    assert not first.weight.grad.isfinite().all()
    for each in optimizers:
        each.step()
    assert torch.equal(first.weight, weight)
    assert [each.__dict__.get("step") for each in optimizers] == [None, None]
    optimizers[0].step()
    assert not first.weight.isfinite().all()


def test_what_pytorch_enters_for_itself_is_not_asked_for(offered):
    text = "with torch.amp.autocast('cpu', dtype=torch.bfloat16): layer(torch.ones(1, 8))"
    code = compile(text, torch.nn.parallel.parallel_apply.__code__.co_filename, "exec")
    model = nn.Linear(8, 8)
    exec(code, {"torch": torch, "layer": model})
    assert asked(offered) == []
    assert forward_of(model) is not None
    exec(text, {"torch": torch, "layer": model})
    assert asked(offered) == ["torch.autocast"]


def test_no_guard_stays_where_no_gradient_is_on_its_way(offered):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    with low():
        model(torch.ones(1, 8))
    assert "step" not in vars(optimizer)


def test_guards_go_with_a_scaler_that_tells_of_itself(offered):
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    first(torch.ones(1, 8)).sum().backward()
    scaler = hst.GradScaler("cpu")
    assert "step" in vars(optimizers[0])
    scaler.scale(second(torch.ones(1, 8)).sum()).backward()
    scaler.step(optimizers[1])
    scaler.update()
    assert not any("step" in vars(each) for each in optimizers)
