"""A prepared model is what it was: the same object, attributes, pickle, memory and errors."""

import copy
import gc
import inspect
import io
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

import halfstep
from halfstep.core import Policy
from halfstep.errors import NonFiniteError, PolicyError, UsageError
from halfstep.torch import GradScaler, Region, prepare

FLOAT32 = "compute_dtype=float32"
FLOAT16 = "compute_dtype=float16,scale=dynamic(init_scale=256.0,growth_interval=3)"


class Net(nn.Module):
    """A net."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.label = "mine"

    def forward(self, values, *, factor: float = 1.0):
        """Computes."""
        self.calls += 1
        return self.second(self.first(values).tanh()) * factor


class Probe(nn.Module):
    """Notes the dtype that a module computes in."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, values):
        out = self.inner(values)
        self.seen.append(out.dtype)
        return out


def made(policy=FLOAT16, optimizer_class=torch.optim.SGD):
    model = Net()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    return model, optimizer, prepare(model, optimizer, policy)


def step(model, optimizer, factor=1.0):
    optimizer.zero_grad()
    model(torch.ones(3, 4) * 0.5, factor=factor).square().mean().backward()
    optimizer.step()


def snapshot(thing):
    return {key: (id(value), copy.copy(value)) for key, value in vars(thing).items()}


def ids(values):
    return {key: identity for key, (identity, _) in values.items()}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32", FLOAT32])
def test_removing_restores_everything(policy):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model.first.forward = special = lambda values: nn.functional.linear(values, model.first.weight)
    before = [snapshot(each) for each in (model, model.first, model.second, optimizer)]
    methods = type(model).forward, type(optimizer).step
    region = prepare(model, optimizer, policy)
    inner = prepare(model.first, policy=policy)
    assert model.first.__dict__["forward"] is not special
    model(torch.ones(3, 4))
    inner.remove()
    region.remove()
    after = [snapshot(each) for each in (model, model.first, model.second, optimizer)]
    assert [ids(each) for each in after] == [ids(each) for each in before]
    assert [list(each) for each in after] == [list(each) for each in before]
    assert model.first.forward is special
    assert (type(model).forward, type(optimizer).step) == methods
    region.remove()
    prepare(model, optimizer, policy).remove()


def test_regions_are_removed_in_any_order():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer, inner = prepare(model, optimizer), prepare(model.first, optimizer)
    outer.remove()
    assert "step" in vars(optimizer)
    assert "forward" in vars(model.first)
    inner.remove()
    assert "step" not in vars(optimizer)
    assert "forward" not in vars(model.first)


def test_what_was_put_over_it_meanwhile_stays():
    model, optimizer, region = made()
    model.forward = mine = lambda values: values
    optimizer.step = other = lambda: None
    region.remove()
    assert model.forward is mine
    assert optimizer.step is other


def test_the_model_stays_what_it_was():
    plain, (model, _, _) = Net(), made()
    assert type(model) is Net
    assert isinstance(model, Net)
    assert model.label == "mine"
    assert repr(model) == repr(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    model.load_state_dict(plain.state_dict())
    assert all(type(each) is nn.Parameter for each in model.parameters())
    step(model, made()[1])
    assert all(type(each) is nn.Parameter for each in model.parameters())
    assert model.calls.item() == 1


def test_the_optimizer_stays_what_it_was():
    _model, optimizer, _ = made()
    plain = torch.optim.SGD(Net().parameters(), lr=0.1)
    assert type(optimizer) is torch.optim.SGD
    assert inspect.signature(optimizer.step) == inspect.signature(plain.step)
    assert inspect.signature(optimizer.zero_grad) == inspect.signature(plain.zero_grad)
    assert inspect.isfunction(optimizer.step.__func__)
    assert optimizer.step.__name__ == "step"
    assert optimizer.state_dict() == plain.state_dict()
    assert repr(optimizer) == repr(plain)


def test_hooks_of_the_model_run_once():
    model, _, _ = made()
    seen = []
    model.register_forward_pre_hook(lambda *them: seen.append("before"))
    model.register_forward_hook(lambda *them: seen.append("after"))
    model.first.register_forward_hook(lambda *them: seen.append("inner"))
    model(torch.ones(3, 4))
    assert seen == ["before", "inner", "after"]


LOADING = """
import sys
import torch, pickle, io
class Net(torch.nn.Module):
    def forward(self, values, *, factor=1.0):
        self.calls += 1
        return self.second(self.first(values).tanh()) * factor
import types
module = types.ModuleType("tests.torch.test_region")
sys.modules["tests"] = types.ModuleType("tests")
sys.modules["tests.torch"] = types.ModuleType("tests.torch")
sys.modules["tests.torch.test_region"] = module
module.Net = Net
try:
    import halfstep
except ImportError:
    pass
else:
    raise SystemExit("halfstep is on the path")
model = {load}
assert "halfstep" not in repr(sorted(sys.modules))
print(model(torch.ones(3, 4)).tolist())
"""


@pytest.mark.parametrize("with_torch", [False, True])
def test_a_pickle_is_loaded_where_there_is_no_halfstep(tmp_path, with_torch):
    model, optimizer, _ = made()
    step(model, optimizer)
    path = tmp_path / "model"
    if with_torch:
        torch.save(model, path)
        load = f"torch.load({str(path)!r}, weights_only=False)"
    else:
        path.write_bytes(pickle.dumps(model))
        load = f"pickle.loads(open({str(path)!r}, 'rb').read())"
    ran = subprocess.run(
        [sys.executable, "-I", "-c", NOT_ON_PATH + LOADING.replace("{load}", load)],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    plain = Net()
    plain.load_state_dict(model.state_dict())
    assert ran.stdout.strip() == str(plain(torch.ones(3, 4)).tolist())


# Else an editable install would be found.
NOT_ON_PATH = """
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "halfstep":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nowhere())
"""


def test_a_pickle_of_the_pair_keeps_the_optimizer_plain():
    model, optimizer, _ = made(optimizer_class=torch.optim.Adam)
    step(model, optimizer)
    again, other = pickle.loads(pickle.dumps((model, optimizer)))
    assert "step" not in vars(other) or not hasattr(other.step, "__wrapped__")
    step(model, optimizer)
    plain = Net()
    plain.load_state_dict(again.state_dict())
    assert all(
        torch.equal(one, two)
        for one, two in zip(plain.parameters(), again.parameters(), strict=True)
    )
    step(again, other)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=0)


def test_a_forward_of_the_instance_is_pickled_with_it():
    model = Net()
    model.forward = model.first.forward
    prepare(model, policy=FLOAT16)
    again = pickle.loads(pickle.dumps(model))
    assert again(torch.ones(1, 4)).shape == (1, 8)


def test_a_deep_copy_is_a_region_of_its_own():
    model, optimizer, region = made()
    step(model, optimizer)
    other = copy.deepcopy(model)
    assert other.__dict__["forward"] is not model.__dict__["forward"]
    before = region.state_dict()
    for _ in range(3):
        other(torch.full((3, 4), 0.5), factor=torch.inf).sum().backward()
    assert region.state_dict() == before
    assert model.first.weight.grad.isfinite().all()
    other.second, seen = Probe(other.second), []
    other.second.seen = seen
    other(torch.ones(3, 4))
    assert seen == [torch.float16]
    region.remove()
    other(torch.ones(3, 4))
    assert seen == [torch.float16] * 2
    assert "forward" in vars(other)


def test_model_and_optimizer_are_freed_at_once():
    gc.collect()
    gc.disable()
    try:
        model, optimizer, region = made(optimizer_class=torch.optim.Adam)
        step(model, optimizer)
        step(model, optimizer, torch.inf)
        gone = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.first.weight)
        del model, optimizer
        assert [each() for each in gone] == [None] * 3
        assert "a model that is gone" in repr(region)
        assert region.history.steps == 2
        gone = weakref.ref(region)
        del region
        assert gone() is None
    finally:
        gc.enable()


def test_an_optimizer_without_its_region_still_steps():
    model, optimizer, region = made()
    del region
    before = model.first.weight.clone()
    step(model, optimizer)
    assert not torch.equal(before, model.first.weight)


def test_a_region_says_what_it_is():
    _model, _, region = made("mixed_float16")
    assert repr(region) == "Region(Net, policy='mixed_float16')"
    assert region.policy == Policy.named("mixed_float16")
    assert region.scale == 65536.0
    assert region.last_step.reason == "step() was not called yet"
    assert made("mixed_bfloat16")[2].scale == 1.0
    assert isinstance(region, Region)


REFUSED = [
    (lambda: prepare(Net), "prepare needs a torch.nn.Module, got type. Pass the model, not its "),
    (lambda: prepare(Net().parameters()), "prepare needs a torch.nn.Module, got generator. "),
    (lambda: prepare(lambda x: x), "prepare needs a torch.nn.Module, got function. "),
    (
        lambda: prepare(made()[0]),
        "prepare needs a model that is not prepared yet, got Net, which is. Call remove() on what ",
    ),
    (
        lambda: prepare(Net().half()),
        "A region needs trained parameters in float32, got float16 for first.weight. Write ",
    ),
    (
        lambda: prepare(Net(), torch.optim.SGD(Net().parameters(), lr=1)),
        "prepare needs an optimizer that trains the model, got SGD without any parameter in it. ",
    ),
    (
        lambda: prepare(Net(), Net()),
        "prepare needs a torch.optim.Optimizer, or a list of them, got Net. Pass the optimizer ",
    ),
    (
        lambda: prepare(Net(), ["sgd"]),
        "prepare needs a torch.optim.Optimizer, or a list of them, got str. Pass the optimizer ",
    ),
    (
        lambda: prepare(Net(), policy="compute_dtype=float16,param_dtype=float16"),
        "prepare needs param_dtype=float32, got 'float16'. Leave it out: ",
    ),
]


@pytest.mark.parametrize(("refused", "text"), REFUSED, ids=range(len(REFUSED)))
def test_errors_say_what_was_given_and_what_to_do(refused, text):
    with pytest.raises((UsageError, PolicyError)) as error:
        refused()
    assert str(error.value).startswith(text)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_module_is_refused():
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(
        UsageError, match=r"got a torch\.jit\.ScriptModule\. Prepare the model that"
    ):
        prepare(scripted)


@pytest.mark.parametrize(
    "policy", ["mixed_float17", "compute_dtype=int8", "compute_dtype=float8_e5m2", 3]
)
def test_a_policy_that_cannot_be_followed_is_refused(policy):
    model = Net()
    with pytest.raises(PolicyError):
        prepare(model, policy=policy)
    assert "forward" not in vars(model)


def test_a_refusal_leaves_nothing_behind():
    model = Net()
    good = torch.optim.SGD(model.parameters(), lr=1)
    with pytest.raises(UsageError):
        prepare(model, [good, torch.optim.SGD(Net().parameters(), lr=1)])
    assert "forward" not in vars(model)
    assert "step" not in vars(good)


def test_float16_parameters_that_are_not_trained_are_allowed():
    model = nn.Sequential(nn.Linear(2, 2).half().requires_grad_(False), nn.Linear(2, 2))
    prepare(model, policy=FLOAT16)
    model(torch.ones(1, 2)).sum().backward()
    assert model[1].weight.grad.dtype is torch.float32


def test_attaching_to_a_model_that_is_gone():
    model, optimizer, region = made()
    del model
    with pytest.raises(
        UsageError, match=r"attach\(\) needs the model of the region, which is gone"
    ):
        region.attach(optimizer)


BAD_STATES = [
    ([], "load_state_dict() needs a state dict, got list. Pass what region.state_dict() returned."),
    (
        {"scale": 1.0},
        "load_state_dict() needs 'scale', 'finite_steps', 'overflows', 'proof', 'found', "
        "'foreign', 'faults', got a state dict without 'finite_steps', 'overflows', 'proof', "
        "'found', 'foreign', 'faults'. Pass what region.state_dict() returned.",
    ),
]


@pytest.mark.parametrize(("state", "text"), BAD_STATES, ids=["list", "missing"])
def test_a_bad_state_is_refused(state, text):
    _, _, region = made()
    before = region.state_dict()
    with pytest.raises((UsageError, KeyError)) as error:
        region.load_state_dict(state)
    assert text in str(error.value)
    assert region.state_dict() == before


@pytest.mark.parametrize("key", ["scale", "finite_steps", "overflows", "found"])
@pytest.mark.parametrize("value", [-3, "one", None, True, float("nan"), float("inf"), [1.0]])
def test_a_bad_number_is_refused(key, value):
    _, _, region = made()
    before = region.state_dict()
    with pytest.raises(UsageError, match=rf"load_state_dict\(\) needs '{key}' to be a"):
        region.load_state_dict({**before, key: value})
    assert region.state_dict() == before


def run(steps, stopped=None, overflow=()):
    """Trains, and saves and loads everything after one of the steps."""
    model, optimizer, region = made(optimizer_class=torch.optim.Adam)
    for number in range(steps):
        step(model, optimizer, torch.inf if number in overflow else 3000.0 * (number % 2) + 1)
        if number == stopped:
            state = {"model": model, "optimizer": optimizer, "region": region}
            file = io.BytesIO()
            torch.save({name: each.state_dict() for name, each in state.items()}, file)
            model, optimizer, region = made(optimizer_class=torch.optim.Adam)
            step(model, optimizer)
            for name, each in torch.load(io.BytesIO(file.getvalue())).items():
                {"model": model, "optimizer": optimizer, "region": region}[name].load_state_dict(
                    each
                )
    return model, region


@pytest.mark.parametrize("overflow", [(), (0,), (2, 3), (0, 1, 5)])
@pytest.mark.parametrize("stopped", range(7))
def test_a_run_that_is_stopped_goes_on_bit_for_bit(stopped, overflow):
    (model, region), (other, again) = run(8, overflow=overflow), run(8, stopped, overflow)
    assert region.state_dict() == again.state_dict()
    assert region.scale == again.scale
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
def test_the_state_of_a_scaler_is_taken_over(scaler_class):
    _, _, region = made(FLOAT32)
    scaler = scaler_class("cpu", init_scale=4.0, growth_interval=7)
    scaler.scale(torch.ones(1))
    scaler.update(new_scale=32.0)
    region.load_state_dict({**scaler.state_dict(), "_growth_tracker": 5})
    state = region.state_dict()
    # The next pass to begin makes it 5, as it counts the one before.
    assert (state["scale"], state["finite_steps"], state["overflows"]) == (32.0, 4, 0)
    assert str(region.history.scale_changes[-1]).endswith("65536 -> 32, load_state_dict()")


def test_a_state_is_plain_numbers():
    _, _, region = made()
    assert {type(value) for value in region.state_dict().values()} <= {int, float}


@pytest.mark.parametrize("policy", [FLOAT32, "mixed_bfloat16"])
def test_two_threads_call_one_model(policy):
    model, _, _ = made(policy)
    plain, results, errors = Net(), {}, []
    # Read here, because while a thread is in the model, it holds other tensors.
    weight = model.first.weight

    def work(number):
        try:
            for turn in range(20):
                values = torch.full((3, 4), 0.1 * (number + 1), requires_grad=True)
                loss = model(values).square().sum() * 10.0 ** (4 * number)
                results[number, turn] = torch.autograd.grad(loss, [values, weight])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for (number, _), got in results.items():
        values = torch.full((3, 4), 0.1 * (number + 1), requires_grad=True)
        loss = plain(values).square().sum() * 10.0 ** (4 * number)
        for one, two in zip(
            torch.autograd.grad(loss, [values, plain.first.weight]), got, strict=True
        ):
            assert ((one - two).norm() / one.norm()).item() < (1e-6 if policy == FLOAT32 else 0.02)


def test_models_in_several_threads_follow_their_own_policy():
    policies = ["mixed_float16", "mixed_bfloat16", "float32"]
    dtypes = {policy: [] for policy in policies}

    def work(policy):
        model, optimizer, _ = made(policy)
        model.second = Probe(model.second)
        model.second.seen = dtypes[policy]
        for _ in range(20):
            step(model, optimizer)

    threads = [threading.Thread(target=work, args=(policy,)) for policy in policies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = [set(each) for each in dtypes.values()]
    assert seen == [{torch.float16}, {torch.bfloat16}, {torch.float32}]


def test_a_forward_that_fails_leaves_the_model_as_it_was():
    model, optimizer, _ = made()
    before = [id(each) for each in model.parameters()]
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(3, 5))
    assert [id(each) for each in model.parameters()] == before
    step(model, optimizer)
    assert model.first.weight.grad is not None


def test_a_policy_that_overrides_wins():
    with halfstep.core.override_policy(Policy.named("mixed_bfloat16")):
        _, _, region = made("mixed_float16")
    assert str(region.policy) == "mixed_bfloat16"


def test_the_floor_is_told():
    model, optimizer, _ = made(
        "compute_dtype=float16,scale=dynamic(init_scale=64.0,min_scale=64.0)"
    )
    with torch.no_grad():
        model.second.weight.fill_(3e4)
        model.first.bias.zero_()
    model(torch.zeros(3, 4)).mean().backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NonFiniteError) as error:
        optimizer.step()
    assert str(error.value).startswith(
        "The region needs finite gradients at its smallest scale, but gradients held inf"
    )
    assert "Parameters with non-finite gradients: first.weight" in str(error.value)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
