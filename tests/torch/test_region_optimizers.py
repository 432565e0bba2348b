"""A step from gradients that are not finite does not happen, whatever the optimizer is."""

import collections
import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from halfstep.errors import NonFiniteError
from halfstep.torch import SkippedStepsWarning, prepare

FLOAT32 = "compute_dtype=float32"


class Lion(optim.Optimizer):
    """As others write them: state by hand, noise from the generator."""

    def __init__(self, params, lr=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                state["step"] = state.get("step", 0) + 1
                noise = torch.rand_like(parameter)
                mean.lerp_(parameter.grad, 1 - group["beta"])
                parameter.add_((mean + 1e-3 * noise).sign(), alpha=-group["lr"])
        return loss


class Doubling(optim.AdamW):
    """Calls the step of its parent twice."""

    def step(self, closure=None):
        super().step(closure)
        return super().step()


OPTIMIZERS = {
    "sgd": lambda them: optim.SGD(them, lr=0.1),
    "momentum": lambda them: optim.SGD(them, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd foreach": lambda them: optim.SGD(them, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda them: optim.SGD(them, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda them: optim.Adam(them, lr=0.1, amsgrad=True),
    "adam foreach": lambda them: optim.Adam(them, lr=0.1, foreach=True),
    "adam fused": lambda them: optim.Adam(them, lr=0.1, fused=True),
    "adam with a tensor": lambda them: optim.Adam(them, lr=torch.tensor(0.1)),
    "adamw": lambda them: optim.AdamW(them, lr=0.1),
    "adamw fused": lambda them: optim.AdamW(them, lr=0.1, fused=True),
    "adagrad": lambda them: optim.Adagrad(them, lr=0.1),
    "adagrad fused": lambda them: optim.Adagrad(them, lr=0.1, fused=True),
    "adafactor": lambda them: optim.Adafactor(them, lr=0.1),
    "adadelta": lambda them: optim.Adadelta(them, lr=0.1),
    "adamax": lambda them: optim.Adamax(them, lr=0.1),
    "asgd": lambda them: optim.ASGD(them, lr=0.1),
    "nadam": lambda them: optim.NAdam(them, lr=0.1),
    "radam": lambda them: optim.RAdam(them, lr=0.1),
    "rmsprop": lambda them: optim.RMSprop(them, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda them: optim.Rprop(them, lr=0.1),
    "maximize": lambda them: optim.Adam(them, lr=0.1, maximize=True),
    "lion": Lion,
    "doubling": lambda them: Doubling(them, lr=0.1),
}
if hasattr(optim, "Muon"):
    OPTIMIZERS["muon"] = lambda them: optim.Muon([each for each in them if each.ndim == 2], lr=0.1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def state_of(model, optimizer):
    groups = [
        {k: v for k, v in group.items() if k not in ("params", "line_search_fn")}
        for group in optimizer.param_groups
    ]
    return copy.deepcopy(
        [
            *model.parameters(),
            *optimizer.state_dict()["state"].items(),
            groups,
            torch.get_rng_state(),
        ]
    )


def assert_same(one, other):
    # Recursive, exact, and NaN is a value like others.
    torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)


def backward(model, optimizer, number):
    optimizer.zero_grad()
    model(torch.full((5, 3), 0.3 * number)).square().sum().backward()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_skipped_step_leaves_no_trace(kind, bad):
    model, plain = network(), network()
    optimizer, other = (OPTIMIZERS[kind](each.parameters()) for each in (model, plain))
    region = prepare(model, optimizer, FLOAT32)
    for number in range(4):
        backward(model, optimizer, number)
        generator = torch.get_rng_state()
        if number in (0, 2):
            good = [parameter.grad.clone() for parameter in model.parameters()]
            model[2].weight.grad[1, 2] = bad
            before = state_of(model, optimizer)
            optimizer.step()
            assert_same(before, state_of(model, optimizer))
            assert region.last_step.skipped
            assert region.last_step.nonfinite == (("2.weight", "nan" if bad != bad else "inf"),)
            for parameter, gradient in zip(model.parameters(), good, strict=True):
                parameter.grad.copy_(gradient)
        optimizer.step()
        torch.set_rng_state(generator)
        backward(plain, other, number)
        other.step()
        assert_same(state_of(plain, other), state_of(model, optimizer))
    assert (region.history.steps, region.history.skipped) == (6, 2)


def test_sparse_gradients():
    def made():
        torch.manual_seed(0)
        model = nn.Embedding(5, 3, sparse=True)
        return model, optim.SparseAdam(model.parameters(), lr=0.1)

    (model, optimizer), (plain, other) = made(), made()
    region = prepare(model, optimizer, FLOAT32)
    for _ in range(3):
        for each, its in ((model, optimizer), (plain, other)):
            its.zero_grad()
            each(torch.tensor([1, 3, 1])).square().sum().backward()
            assert each.weight.grad.is_sparse
            its.step()
        good = model.weight.grad.clone()
        before = state_of(model, optimizer)
        model.weight.grad = model.weight.grad * torch.inf
        optimizer.step()
        assert_same(before, state_of(model, optimizer))
        model.weight.grad = good
        assert torch.equal(model.weight, plain.weight)
    assert region.history.skipped == 3


LBFGS = {
    "plain": {"lr": 0.5, "max_iter": 4},
    "searching": {"lr": 1.0, "max_iter": 4, "line_search_fn": "strong_wolfe"},
}


def minimise(prepared, options, bad=()):
    model, evaluations = network(), []
    optimizer = optim.LBFGS(model.parameters(), **options)
    region = prepare(model, optimizer, prepared) if prepared else None
    losses = []
    for number in range(4):

        def closure(number=number):
            optimizer.zero_grad()
            loss = (model(torch.linspace(-1, 1, 15).reshape(5, 3)) - 1).square().mean()
            loss.backward()
            if number in bad:
                model[0].weight.grad[0, 0] = torch.nan
            evaluations.append(loss.item())
            return loss

        before = state_of(model, optimizer)
        result = optimizer.step(closure)
        if number in bad:
            assert result is None
            assert_same(before, state_of(model, optimizer))
            assert region.last_step.skipped
        else:
            losses.append(result.item())
    return model, losses, region


@pytest.mark.parametrize("options", LBFGS)
def test_a_closure_is_evaluated_as_often_as_without(options):
    plain, expected, _ = minimise(None, LBFGS[options])
    model, losses, region = minimise(FLOAT32, LBFGS[options])
    assert losses == expected
    assert (region.history.steps, region.history.skipped) == (4, 0)
    assert_same([*plain.parameters()], [*model.parameters()])


@pytest.mark.parametrize("options", LBFGS)
def test_a_closure_with_bad_gradients_is_undone(options):
    _, _, region = minimise(FLOAT32, LBFGS[options], bad=(0, 2))
    assert (region.history.steps, region.history.skipped) == (4, 2)


@pytest.mark.parametrize("options", LBFGS)
def test_a_closure_trains_in_float16(options):
    _, expected, _ = minimise(None, LBFGS[options])
    _, losses, region = minimise("mixed_float16", LBFGS[options])
    assert expected[-1] < 0.5 * expected[0]
    assert losses == pytest.approx(expected, abs=0.1)
    assert region.history.skipped == 0


@pytest.mark.parametrize("how", [lambda step, it: step(it), lambda step, it: step(closure=it)])
@pytest.mark.parametrize("kind", ["sgd", "adam fused", "lion"])
def test_a_closure_of_any_optimizer(kind, how):
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    prepare(model, optimizer, FLOAT32)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(5, 3)).square().mean()
        loss.backward()
        return loss

    first = how(optimizer.step, closure)
    assert how(optimizer.step, closure) < first


SCHEDULERS = {
    "step": lambda it: lr_scheduler.StepLR(it, 2, 0.5),
    "one cycle": lambda it: lr_scheduler.OneCycleLR(it, max_lr=0.2, total_steps=8),
    "lambda": lambda it: lr_scheduler.LambdaLR(it, lambda epoch: 0.9**epoch),
    "cosine": lambda it: lr_scheduler.CosineAnnealingLR(it, 5),
    "plateau": lambda it: lr_scheduler.ReduceLROnPlateau(it, patience=0),
    "warm": lambda it: lr_scheduler.SequentialLR(
        it, [lr_scheduler.ConstantLR(it), lr_scheduler.ExponentialLR(it, 0.9)], [2]
    ),
}


def schedule(kind, order, bad):
    """Trains with a scheduler, with warnings as errors, and returns the learning rates."""
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[kind](optimizer) if order == "before" else None
    region = prepare(model, optimizer, FLOAT32) if order != "plain" else None
    scheduler = scheduler or SCHEDULERS[kind](optimizer)
    rates = []
    for number in range(5):
        backward(model, optimizer, number)
        if number in bad:
            model[0].weight.grad.fill_(torch.nan)
        optimizer.step()
        scheduler.step(*[1.0] * (kind == "plateau"))
        rates.append(optimizer.param_groups[0]["lr"])
    if region is not None:
        assert region.history.skipped == len(bad)
    return rates


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_neither_warns_nor_counts_otherwise(kind, order):
    with warnings.catch_warnings():
        # What torch itself warns of, such as a sequence of schedulers, is not the matter here.
        warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step")
        expected = schedule(kind, "plain", ())
        assert schedule(kind, order, (0, 3)) == expected
        assert schedule(kind, order, ()) == expected


def test_a_scheduler_that_comes_too_early_is_still_told_so():
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer, FLOAT32)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler\.step\(\)` before `optimizer\.step"):
        scheduler.step()


class Amplifier(nn.Module):
    """Overflows in its backward in float16, if the gradient that enters is large."""

    def __init__(self, gain=3e4):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("gain", torch.eye(4) * gain)

    def forward(self, values):
        return (values @ self.weight) @ self.gain


def test_an_overflow_in_the_model_lowers_the_scale_until_it_fits():
    model = Amplifier()
    optimizer = optim.SGD(model.parameters(), lr=1e-6)
    region = prepare(model, optimizer, "mixed_float16")
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1e-4)).mean().backward()
        optimizer.step()
    assert 1 <= region.history.skipped <= 3
    assert region.history.consecutive_skips == 0
    assert region.scale < 65536.0
    changes = region.history.scale_changes
    assert changes[0].before == 65536.0
    assert changes[0].reason == "gradients held inf"
    assert all(change.after < change.before for change in changes)
    assert len(changes) == region.history.skipped


def test_a_record_names_the_parameters():
    model = nn.Sequential(nn.Identity(), Amplifier())
    optimizer = optim.SGD(model.parameters(), lr=1e-6)
    region = prepare(model, optimizer, "mixed_float16")
    model(torch.ones(2, 4)).mean().backward()
    assert region.last_step.reason == "step() was not called yet"
    optimizer.step()
    record = region.last_step
    assert (record.skipped, record.scale, record.loss_nonfinite) == (True, 65536.0, False)
    assert record.nonfinite == (("1.weight", "inf"),)
    assert record.reason == "gradients held inf"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("policy", ["mixed_float16", FLOAT32])
def test_a_loss_that_is_not_finite_does_not_lower_the_scale(policy, bad):
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    region = prepare(model, optimizer, policy + ",scale=dynamic(init_scale=64.0)")
    for number in range(10):
        optimizer.zero_grad()
        loss = model(torch.ones(5, 3)).square().mean()
        (loss * bad if number % 2 else loss).backward()
        optimizer.step()
        assert region.last_step.skipped is bool(number % 2)
        assert region.last_step.loss_nonfinite is bool(number % 2)
    assert region.last_step.reason == "the gradient that reached the model was not finite"
    assert region.scale == 64.0
    assert region.history.scale_changes == []
    assert region.history.skipped == 5


def test_the_floor_is_an_error_that_names_the_parameters():
    model = Amplifier(6e4)
    optimizer = optim.SGD(model.parameters(), lr=1e-6)
    prepare(model, optimizer, "compute_dtype=float16,scale=dynamic(init_scale=64.0,min_scale=32.0)")

    def step():
        optimizer.zero_grad()
        model(torch.full((2, 4), 1e-4)).sum().backward()
        optimizer.step()

    step()
    with pytest.raises(NonFiniteError) as error:
        step()
    assert str(error.value) == (
        "The region needs finite gradients at its smallest scale, but gradients held inf at 32, "
        "and min_scale lets it go no lower. The loss was finite. Parameters with non-finite "
        "gradients: weight (inf). Compute the operations behind them in float32, use bfloat16, or "
        "lower the learning rate. halfstep.torch.diagnose(model, batch, loss_fn), or halfstep "
        "doctor on the script, tells the operation."
    )


def test_skipping_on_and_on_is_told():
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    prepare(model, optimizer, FLOAT32)

    def step():
        optimizer.zero_grad()
        (model(torch.ones(5, 3)).sum() * torch.nan).backward()
        optimizer.step()

    for _ in range(24):
        step()
    with pytest.warns(SkippedStepsWarning, match="25 optimizer steps in a row were skipped"):
        step()


def test_hooks_of_a_step_run_only_when_it_happens():
    model, seen = network(), []
    optimizer = optim.Adam(model.parameters())
    optimizer.register_step_pre_hook(lambda *them: seen.append("before"))
    prepare(model, optimizer, FLOAT32)
    optimizer.register_step_post_hook(lambda *them: seen.append("after"))
    backward(model, optimizer, 1)
    optimizer.step()
    model[0].bias.grad[0] = torch.nan
    optimizer.step()
    assert seen == ["before", "after"]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_after_zero_grad_all_is_well(set_to_none):
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    region = prepare(model, optimizer, FLOAT32)
    for bad in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(torch.ones(5, 3)).sum().backward()
        if bad:
            model[0].weight.grad[0] = torch.inf
        optimizer.step()
        assert region.last_step.skipped is bad


def infinite(model):
    return model(torch.ones(5, 3)).sum() * torch.inf


def clean_step(model, optimizer):
    """Steps without a fault, after whatever was before, and returns whether anything moved."""
    before = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    return any(not torch.equal(before[name], now) for name, now in model.state_dict().items())


def unstepped(model, optimizer):
    infinite(model).backward()


def of_inputs(model, optimizer):
    values = torch.ones(5, 3, requires_grad=True)
    torch.autograd.grad(model(values).sum() * torch.nan, values)


def through_another_model(model, optimizer):
    """The pass of a generator goes through the discriminator, whose optimizer has no part in it."""
    generator = nn.Linear(3, 3)
    other = optim.SGD(generator.parameters(), lr=0.1)
    prepare(generator, other, FLOAT32)
    other.zero_grad()
    (model(generator(torch.ones(5, 3))).sum() * torch.nan).backward()
    other.step()


def skipped_by_a_scaler(model, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(infinite(model)).backward()
    scaler.step(optimizer)
    scaler.update()


FAULTS = [unstepped, of_inputs, through_another_model, skipped_by_a_scaler]


@pytest.mark.parametrize("kind", ["sgd", "adamw fused", "lion"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_happened_to_gradients_that_were_cleared_skips_no_step(fault, kind):
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    region = prepare(model, optimizer, FLOAT32)
    fault(model, optimizer)
    assert clean_step(model, optimizer)
    assert region.history.skipped == 0


def test_an_optimizer_that_sat_out_a_bad_batch_steps_after_it():
    model = network()
    both = [optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    region = prepare(model, both, FLOAT32)
    for each in both:
        each.zero_grad()
    infinite(model).backward()
    both[0].step()
    assert region.last_step.skipped
    assert clean_step(model, both[1])


def test_a_fault_after_zero_grad_still_skips_when_it_was_made_finite():
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    region = prepare(model, optimizer, FLOAT32)
    optimizer.zero_grad()
    infinite(model).backward()
    for parameter in model.parameters():
        parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()
    assert region.last_step.skipped


def test_zero_grad_is_given_back():
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    own = optimizer.zero_grad = lambda: optim.SGD.zero_grad(optimizer)
    region = prepare(model, optimizer, FLOAT32)
    infinite(model).backward()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    region.remove()
    assert optimizer.zero_grad is own
    assert "step" not in vars(optimizer)


class Referring(optim.SGD):
    """Has a use for itself while it steps."""

    def step(self, closure=None):
        self.seen = weakref.ref(self)
        return super().step(closure)


@pytest.mark.parametrize("scheduled", ["never", "before", "after"])
def test_a_step_and_its_hooks_are_given_the_optimizer_itself(scheduled):
    model, steps, same = network(), collections.Counter(), []
    optimizer = Referring(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1) if scheduled == "before" else None
    prepare(model, optimizer, FLOAT32)
    scheduler = lr_scheduler.StepLR(optimizer, 1) if scheduled == "after" else scheduler
    optimizer.register_step_pre_hook(lambda it, *_: same.append(it is optimizer))
    optimizer.register_step_post_hook(lambda it, *_: steps.update([it]))
    assert clean_step(model, optimizer)
    if scheduler:
        scheduler.step()
    assert clean_step(model, optimizer)
    # Twice a step, because PyTorch runs hooks for the class and for its parent.
    assert steps == {optimizer: 4}
    assert same == [True] * 4
    assert optimizer.seen() is optimizer


def proxies():
    return sum(type(each) is weakref.ProxyType for each in gc.get_objects())


def test_no_proxy_of_an_optimizer_is_left():
    before = proxies()
    for _ in range(3):
        model = network()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        prepare(model, optimizer, FLOAT32)
        clean_step(model, optimizer)
    assert proxies() <= before


@pytest.mark.parametrize("name", ["step", "zero_grad"])
def test_a_method_whose_optimizer_is_gone_says_so(name):
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer, FLOAT32)
    method = getattr(optimizer, name)
    del optimizer
    with pytest.raises(ReferenceError, match=rf"{name}\(\) needs its optimizer, which is gone"):
        method()


def test_a_step_without_gradients_is_the_optimizers_matter():
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    region = prepare(model, optimizer, FLOAT32)
    optimizer.step()
    assert not region.last_step.skipped


def test_state_pickles_and_copies_as_before():
    model, plain = network(), network()
    optimizer, other = (optim.Adam(each.parameters()) for each in (model, plain))
    prepare(model, optimizer, FLOAT32)
    for each, its in ((model, optimizer), (plain, other)):
        backward(each, its, 1)
        its.step()
    assert_same(other.state_dict(), optimizer.state_dict())
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(again) is optim.Adam
        assert_same(other.state_dict(), again.state_dict())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))
    for each, its in ((model, optimizer), (plain, other)):
        backward(each, its, 2)
        its.step()
    assert_same([*plain.parameters()], [*model.parameters()])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["copy", "pickle"]
)
def test_a_copy_of_the_pair_steps_its_own_parameters(copied):
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer, FLOAT32)
    again, other = copied((model, optimizer))
    before = copy.deepcopy(model.state_dict())
    backward(again, other, 1)
    weight = again[0].weight.clone()
    other.step()
    assert not torch.equal(weight, again[0].weight)
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in before)


def test_one_optimizer_of_two_regions_is_stopped_by_either():
    models = [network(), network()]
    optimizer = optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    regions = [prepare(model, optimizer, FLOAT32) for model in models]
    sum(model(torch.ones(5, 3)).sum() for model in models).backward()
    models[1][0].bias.grad[0] = torch.nan
    before = copy.deepcopy(models[0].state_dict())
    optimizer.step()
    assert all(torch.equal(before[name], models[0].state_dict()[name]) for name in before)
    assert [region.last_step.skipped for region in regions] == [True, True]
    assert [region.history.skipped for region in regions] == [1, 1]
    regions[0].remove()
    optimizer.step()
    assert (regions[0].history.steps, regions[1].history.steps) == (1, 2)


def test_an_optimizer_that_is_not_attached_is_left_alone():
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    region = prepare(model, policy=FLOAT32)
    assert "step" not in vars(optimizer)
    region.attach(optimizer)
    backward(model, optimizer, 1)
    model[0].bias.grad[0] = torch.nan
    optimizer.step()
    assert region.last_step.skipped


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_without_a_scale_a_bad_step_is_skipped_too(policy):
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    region = prepare(model, optimizer, policy)
    before = copy.deepcopy(model.state_dict())
    (model(torch.ones(5, 3)).sum() * torch.inf).backward()
    optimizer.step()
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in before)
    assert region.last_step.skipped
    assert region.scale == 1.0
