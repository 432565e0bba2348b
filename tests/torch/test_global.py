"""One policy for every model and every optimizer of the process, and nothing left of it."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from halfstep.core import subscribe
from halfstep.torch import (
    SkippedStepsWarning,
    autocast,
    global_policy,
    prepare,
    set_global_policy,
)
from halfstep.torch._region import Region
from halfstep.torch._regions._forward import Forward
from halfstep.torch._regions._guard import Guard

POLICY = "mixed_bfloat16"
FLOAT32 = "compute_dtype=float32"


@pytest.fixture(autouse=True)
def nothing_left():
    def patched():
        return nn.Module.__call__, Optimizer.__init__, Optimizer.__setstate__

    before = patched()
    yield
    set_global_policy("float32")
    assert patched() == before


class Net(nn.Module):
    """Notes which dtype it computes in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, values):
        hidden = self.first(values)
        self.seen = hidden.dtype
        return self.second(hidden.tanh())

    def encode(self, values):
        return self.first(values).tanh()


def call(model):
    return model(torch.ones(5, 3))


def is_region(module):
    return isinstance(vars(module).get("forward"), Forward)


def moves(model, optimizer, factor=1.0):
    """Makes a step and returns whether the model moved; the loss may be anything."""
    before = copy.deepcopy([*model.parameters()])
    optimizer.zero_grad()
    (call(model).square().sum() * factor).backward()
    optimizer.step()
    return not all(map(torch.equal, before, model.parameters()))


def test_models_and_optimizers_that_exist_and_that_come():
    old = Net()
    its = SGD(old.parameters(), lr=0.1)
    set_global_policy(POLICY)
    assert str(global_policy()) == POLICY
    new = Net()
    for model, optimizer in ((old, its), (new, SGD(new.parameters(), lr=0.1))):
        assert call(model).dtype == torch.float32
        assert model.seen == torch.bfloat16
        assert moves(model, optimizer)
        assert not moves(model, optimizer, torch.nan)
        assert moves(model, optimizer)


def test_only_the_outermost_module_is_a_region():
    set_global_policy(POLICY)
    model = nn.Sequential(Net(), nn.Linear(2, 1))
    call(model)
    assert is_region(model)
    assert [is_region(each) for each in model.modules()].count(True) == 1


def test_modules_that_a_method_calls_are_regions_one_by_one():
    set_global_policy(POLICY)
    model = Net()
    model.encode(torch.ones(5, 3))
    assert (is_region(model), is_region(model.first), is_region(model.second)) == (0, 1, 0)
    call(model)
    assert is_region(model)
    assert moves(model, SGD(model.parameters(), lr=0.1))


def test_float32_makes_everything_what_it_was():
    model, copied = Net(), Net()
    optimizer, other = (SGD(each.parameters(), lr=0.1) for each in (model, copied))
    set_global_policy(POLICY)
    moves(model, optimizer)
    late = Net()
    its = SGD(late.parameters(), lr=0.1)
    moves(late, its)
    set_global_policy("float32")
    assert str(global_policy()) == "float32"
    for each in (model, copied, late):
        assert "forward" not in vars(each)
    for each in (optimizer, other, its):
        assert not {"step", "zero_grad"} & vars(each).keys()
    assert call(model).dtype == torch.float32
    assert model.seen == torch.float32
    assert moves(model, optimizer, torch.nan)


def test_another_policy_takes_the_place_of_the_first():
    set_global_policy(POLICY)
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    moves(model, optimizer)
    set_global_policy("mixed_float16")
    assert moves(model, optimizer)
    assert model.seen == torch.float16
    assert not moves(model, optimizer, torch.inf)


def test_whoever_patched_a_call_afterwards_keeps_it():
    set_global_policy(POLICY)
    ours, seen = nn.Module.__call__, []

    def theirs(self, *args, **kwargs):
        seen.append(self)
        return ours(self, *args, **kwargs)

    original = ours.__wrapped__
    nn.Module.__call__ = theirs
    try:
        set_global_policy("float32")
        model = Net()
        call(model)
        assert seen[0] is model
        assert not is_region(model)
    finally:
        nn.Module.__call__ = original


def test_in_every_thread():
    model, errors = Net(), []
    set_global_policy(POLICY)
    start = threading.Barrier(4)

    def run():
        start.wait()
        try:
            for _ in range(5):
                call(model).sum().backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors
    assert is_region(model)


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_models(when):
    model = Net()
    if when == "after":
        set_global_policy(POLICY)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if when == "before":
        set_global_policy(POLICY)
    optimizer = SGD(compiled.parameters(), lr=0.1)
    assert moves(compiled, optimizer)
    assert is_region(model)
    assert model.seen == torch.bfloat16
    assert not moves(compiled, optimizer, torch.inf)
    set_global_policy("float32")
    call(compiled)
    assert model.seen == torch.float32
    assert not is_region(model)


def test_autocast_is_left_alone():
    set_global_policy(POLICY)
    model = Net()
    with autocast("cpu", dtype=torch.float16):
        call(model)
    assert model.seen == torch.float16
    assert not is_region(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_in_half_precision_are_left_alone(dtype):
    set_global_policy(POLICY)
    model = Net().to(dtype)
    assert model(torch.ones(5, 3, dtype=dtype)).dtype == dtype
    assert not is_region(model)


def test_a_prepared_model_keeps_its_policy():
    model = Net()
    prepare(model, policy="mixed_float16")
    set_global_policy(POLICY)
    call(model)
    assert model.seen == torch.float16
    set_global_policy("float32")
    call(model)
    assert model.seen == torch.float16


class Strange(nn.Module):
    """Reads a tensor with a gradient that is not its own."""

    def __init__(self, other):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.other = lambda: other

    def forward(self, values):
        return self.linear(values) * self.other().square()


def test_a_model_that_reads_what_is_not_its_own_is_left_alone():
    other = nn.Parameter(torch.ones(2))
    set_global_policy("mixed_float16")
    model = Strange(other)
    call(model).sum().backward()
    other.grad = None
    call(model).sum().backward()
    expected = 2.0 * model.linear(torch.ones(5, 3)).sum(dim=0)
    assert not is_region(model)
    torch.testing.assert_close(other.grad, expected, rtol=1e-2, atol=1e-2)


def test_modules_without_parameters_are_left_alone():
    set_global_policy(POLICY)
    module = nn.Tanh()
    call(module)
    assert not is_region(module)


def prepared_copy(model):
    """A region that the policy does not know."""
    prepare(model, policy=FLOAT32)
    return copy.deepcopy(model)


@pytest.mark.parametrize("made", [copy.deepcopy, prepared_copy], ids=["plain", "prepared"])
def test_the_optimizer_of_a_copy_skips(made):
    set_global_policy(POLICY)
    model = Net()
    again = made(model)
    optimizer = SGD(again.parameters(), lr=0.1)
    assert moves(again, optimizer)
    assert not moves(again, optimizer, torch.nan)
    assert moves(again, optimizer)


def step_of(parameter, optimizer, value):
    """Steps without a module and returns whether the parameter moved."""
    before = parameter.detach().clone()
    parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return not torch.equal(before, parameter)


def test_an_optimizer_without_a_region_skips_and_tells():
    set_global_policy(POLICY)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = SGD([("weight", parameter)], lr=0.1)
    events = []
    unsubscribe = subscribe(lambda event, values: events.append((event, values)))
    assert step_of(parameter, optimizer, 1.0)
    assert not step_of(parameter, optimizer, torch.nan)
    unsubscribe()
    records = [values["record"] for event, values in events if event == "step"]
    assert [each.skipped for each in records] == [False, True]
    assert records[1].nonfinite == (("weight", "nan"),)
    assert [event for event, _ in events] == ["step", "update"] * 2
    set_global_policy("float32")
    assert step_of(parameter, optimizer, torch.nan)


def test_an_optimizer_without_a_region_does_not_skip_in_silence():
    set_global_policy(POLICY)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = SGD([parameter], lr=0.1)
    for _ in range(24):
        step_of(parameter, optimizer, torch.nan)
    with pytest.warns(SkippedStepsWarning, match="25 optimizer steps in a row were skipped"):
        step_of(parameter, optimizer, torch.nan)


def test_a_step_on_no_device_asks_nothing():
    set_global_policy(POLICY)
    with torch.device("meta"):
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1)
        call(model).sum().backward()
        optimizer.step()


def test_a_guard_that_nobody_keeps_looks_at_nothing():
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    region = prepare(model, optimizer, FLOAT32)
    step = optimizer.step
    region.remove()
    model.first.weight.grad = torch.full_like(model.first.weight, torch.nan)
    step()
    assert model.first.weight.isnan().all()


def region_of(model):
    return vars(model)["forward"].region


def test_parameters_that_are_added_later():
    """The model ran already, so that its region was made before the optimizer trained any of it."""
    set_global_policy(POLICY)
    model, other = Net(), nn.Parameter(torch.ones(2))
    call(model)
    optimizer = SGD([other], lr=0.1)
    moves(model, optimizer)
    assert region_of(model).history.steps == 0
    optimizer.add_param_group({"params": model.parameters()})
    assert moves(model, optimizer)
    assert not moves(model, optimizer, torch.inf)
    assert region_of(model).history.skipped == 1


def test_a_region_that_is_made_later():
    model = Net()
    set_global_policy(POLICY)
    optimizer = SGD(model.parameters(), lr=0.1)
    assert not moves(model, optimizer, torch.inf)
    assert region_of(model).history.skipped == 1


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["copy", "pickle"]
)
def test_a_copy_of_a_model_and_its_optimizer(copied, order):
    set_global_policy("mixed_float16")
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    moves(model, optimizer)
    again, its = copied((model, optimizer)[::order])[::order]
    assert moves(again, its)
    assert not moves(again, its, torch.nan)
    assert region_of(again).history.skipped == 1
    assert region_of(model).history.skipped == 0


def test_copies_follow_the_policy():
    set_global_policy(POLICY)
    model = Net()
    call(model)
    copies = [copy.deepcopy(model)]
    copies.append(copy.deepcopy(copies[0]))
    for each in copies:
        call(each)
        assert each.seen == torch.bfloat16
    set_global_policy("float32")
    for each in copies:
        call(each)
        assert each.seen == torch.float32
        assert "forward" not in vars(each)


def counts():
    kinds = Net, SGD, Region, Guard
    objects = gc.get_objects()
    return [sum(type(each) is kind for each in objects) for kind in kinds]


def test_nothing_is_kept_alive():
    set_global_policy("mixed_float16")
    gc.collect()
    gc.disable()
    try:
        before = counts()
        for number in range(100):
            model = Net()
            optimizer = SGD(model.parameters(), lr=0.1)
            moves(model, optimizer, torch.nan if number % 3 == 0 else 1.0)
            if number % 10 == 0:
                copy.deepcopy(model)
        gone = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        assert [each() for each in gone] == [None, None]
        assert counts() == before
    finally:
        gc.enable()


def test_a_model_that_is_left_alone_is_not_kept_alive():
    set_global_policy("mixed_float16")
    gc.collect()
    gc.disable()
    try:
        before = counts()
        model = Strange(nn.Parameter(torch.ones(2)))
        call(model)
        gone = weakref.ref(model)
        del model
        assert gone() is None
        assert counts() == before
    finally:
        gc.enable()
