import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from halfstep.torch import GradScaler, autocast, prepare, set_global_policy
from halfstep.torch._looking import Looking


@pytest.fixture
def looking():
    looks = Looking()
    end = looks.start()
    yield looks
    end()


class Overflowing(nn.Module):
    """Squares what the middle layer makes, and hides what overflows behind a tanh."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, inputs, *, factor=1.0):
        middle = self.middle(self.first(inputs)) * factor
        return self.last(self.norm((middle * middle).tanh()))


def model_of(kind=Overflowing):
    torch.manual_seed(0)
    return kind()


def batch(seed=0):
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :2].argmax(1)


def backward(model, **options):
    inputs, targets = batch()
    F.cross_entropy(model(inputs, **options), targets).backward()


def test_a_fault_is_found_although_only_the_call_and_its_gradient_are_known(looking):
    model = model_of()
    prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="mixed_float16")
    backward(model, factor=1e3)
    first = looking.faults(65536.0).first
    assert (first.module, first.operation, first.phase) == ("Overflowing", "multiply", "forward")
    assert first.kind == "inf"
    assert "test_looking.py" in first.source


def test_a_healthy_step_has_no_fault_and_its_ranges_are_those_of_the_step(looking):
    model = model_of()
    region = prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="mixed_float16")
    backward(model)
    assert not looking.faults(region.scale)
    seen = looking.ranges(region.scale)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    rows = {(row.module, row.role): row for row in seen.ranges.rows}
    for name in ("first", "middle", "last"):
        both = [expected[f"{name}.weight"], expected[f"{name}.bias"]]
        largest = max(float(each.abs().max()) for each in both)
        assert rows[name, "grad_weight"].reference.largest == pytest.approx(largest, rel=0.02)
    assert {cast.operation for cast in seen.casts} == {"aten::linear"}
    assert looking.ranges(region.scale).casts == ()


@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_nothing_of_a_look_is_left_behind(looking, factor):
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    region = prepare(model, optimizer, policy="mixed_float16")
    backward(model, factor=factor)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(region.state_dict())
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    generator = torch.get_rng_state()
    looking.faults(region.scale)
    looking.ranges(region.scale)
    torch.testing.assert_close(
        (model.state_dict(), region.state_dict()), before, rtol=0, atol=0, equal_nan=True
    )
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_look_between_the_loss_and_the_way_back_leaves_both_alone(looking):
    model = model_of()
    prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="mixed_float16")
    other = copy.deepcopy(model)
    backward(other)
    inputs, targets = batch()
    loss = F.cross_entropy(model(inputs), targets)
    looking.faults(1.0)
    loss.backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_buffers_are_as_they_were_before_the_call(looking):
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2))
    prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="mixed_float16")
    inputs, targets = batch()
    inputs[0, 0] = torch.inf
    F.cross_entropy(model(inputs), targets).backward()
    first = looking.faults(65536.0).first
    assert (first.operation, first.role) == ("data", "input")
    assert first.in_float32


@pytest.mark.parametrize("ours", [True, False])
def test_a_call_is_made_again_in_the_autocast_that_it_was_in(looking, ours):
    model, scale = model_of(), 1024.0
    scaler = GradScaler("cpu", init_scale=scale)
    inputs, targets = batch()
    around = autocast if ours else torch.autocast
    with around("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs, factor=1e3), targets)
    scaler.scale(loss).backward()
    first = looking.faults(scale).first
    assert (first.module, first.operation, first.dtype) == ("Overflowing", "multiply", "float16")
    seen = looking.ranges(scale)
    assert seen.power == 10


@pytest.mark.parametrize("ours", [True, False])
def test_a_script_that_is_inside_of_autocast_is_looked_at_from_outside(looking, ours):
    model, (inputs, targets) = model_of(), batch()
    around = autocast if ours else torch.autocast
    with around("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs, factor=1e3), targets)
        assert looking.faults(1.0).first.operation == "multiply"
        loss.backward()
        assert looking.ranges(1.0).ranges.modules == ("first", "middle", "norm", "last")
        assert torch.is_autocast_enabled("cpu")


def test_the_gradients_are_those_before_the_loss_was_scaled(looking):
    model, inputs = nn.Linear(8, 2), batch()[0]
    (model(inputs).sum() * 2.0**10).backward()
    (row,) = (row for row in looking.ranges(2.0**10).ranges.rows if row.role == "grad_output")
    assert row.reference.counts == ((0, 32),)


def test_what_a_mask_has_made_is_no_fault(looking):
    class Masked(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs).masked_fill(torch.tensor([False, True]), -torch.inf)

    model = Masked(8, 2)
    prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="mixed_float16")
    F.cross_entropy(model(batch()[0]), torch.zeros(16, dtype=torch.long)).backward()
    assert not looking.faults(65536.0)
    assert not looking.entered_broken


def test_what_was_broken_after_the_model_comes_back_to_it(looking):
    model = nn.Linear(8, 2)
    prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="mixed_float16")
    (model(batch()[0]) * 0.0).log().sum().backward()
    assert not looking.faults(65536.0)
    assert looking.entered_broken


def test_gradients_that_came_back_broken_are_counted_as_such(looking):
    model = model_of()
    prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="mixed_float16")
    (model(batch()[0]) / 0.0).sum().backward()
    seen = looking.ranges(65536.0).ranges
    rows = {(row.module, row.role): row.run for row in seen.rows}
    assert rows["last", "grad_output"].nans + rows["last", "grad_output"].infs == 32
    assert rows["last", "output"].nans == rows["last", "output"].zeros == 0
    assert seen.entering == 0.0


def test_several_models_have_their_names_before_their_modules(looking):
    one, two = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 2))
    two(one(batch()[0])).sum().backward()
    assert looking.ranges(1.0).ranges.modules == ("one", "two.0")


def test_the_casts_of_each_model_are_told_below_its_name(looking):
    one, two = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 2))
    for model in (one, two):
        prepare(model, torch.optim.SGD(model.parameters(), 0.1), policy="mixed_float16")
    two(one(batch()[0])).sum().backward()
    casts = looking.ranges(65536.0).casts
    assert {cast.module for cast in casts} == {"one", "two.0"}


def test_calls_without_gradients_and_parts_of_calls_are_not_kept(looking):
    model = model_of()
    with torch.no_grad():
        model(batch()[0])
    assert not looking.has_calls
    backward(model)
    assert len(looking._calls) == 1
    looking.forget()
    assert not looking.has_calls


def test_only_the_last_calls_of_a_long_step_are_kept(looking):
    model = model_of()
    for _ in range(20):
        backward(model)
    assert len(looking._calls) == 8


def test_arguments_that_change_later_were_copied(looking):
    model, (inputs, targets) = model_of(), batch()
    F.cross_entropy(model(inputs), targets).backward()
    before = looking.ranges(1.0).ranges
    inputs.zero_()
    assert looking.ranges(1.0).ranges == before


def test_a_compiled_model_is_looked_into(looking):
    model = torch.compile(model_of(), backend="eager")
    backward(model)
    assert "middle" in looking.ranges(1.0).ranges.modules


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_what_a_checkpoint_computes_again_in_float32_follows_no_global_policy(looking, policy):
    class Saving(Overflowing):
        def forward(self, inputs):
            return checkpoint(super().forward, inputs, use_reentrant=False)

    set_global_policy(policy)
    try:
        backward(model_of(Saving))
        assert not looking.faults(1.0)
        seen = looking.ranges(1.0)
    finally:
        set_global_policy("float32")
    assert seen.ranges.modules == ("first", "middle", "norm", "last")
    assert seen.ranges.form == policy.removeprefix("mixed_")


@pytest.mark.parametrize("chosen", [{"dtype": torch.bfloat16}, {"policy": "mixed_bfloat16"}])
def test_what_ran_in_autocast_is_judged_by_its_format_not_by_the_global_policy(looking, chosen):
    set_global_policy("mixed_float16")
    try:
        model, (inputs, targets) = model_of(), batch()
        with autocast("cpu", **chosen):
            loss = F.cross_entropy(model(inputs, factor=1e3), targets)
        loss.backward()
        assert not looking.faults(1.0)
        seen = looking.ranges(1.0)
    finally:
        set_global_policy("float32")
    assert seen.ranges.form == "bfloat16"
    assert {row.form for row in seen.ranges.rows} == {"float32", "bfloat16"}


def test_ending_it_leaves_no_trace():
    call = nn.Module.__call__
    looks = Looking()
    end = looks.start()
    assert nn.Module.__call__ is not call
    end()
    assert nn.Module.__call__ is call
    backward(model_of())
    assert not looks.has_calls


def test_the_updates_of_its_optimizer_are_looked_at(looking):
    model = nn.Linear(8, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    for _ in range(2):
        looking.forget()
        model(batch()[0].bfloat16()).float().square().mean().backward()
        optimizer.step()
    updates = dict(looking.ranges(1.0).ranges.updates)
    assert updates["weight"] > 0.5


def test_an_error_of_the_script_goes_through(looking):
    with pytest.raises(RuntimeError), contextlib.suppress(ValueError):
        model_of()(torch.ones(2, 3))
    backward(model_of())
    assert looking.has_calls
