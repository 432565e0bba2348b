"""The scale and what counts steps: what users of scalers reported, with a region."""

import copy
import io
import itertools
import logging
import warnings

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.errors import NonFiniteError, UsageError
from halfstep.torch import GradScaler, SkippedStepsWarning, prepare

FLOAT32 = "compute_dtype=float32"
# A scale at which nothing is skipped that should not be.
FLOAT16 = "mixed_float16, scale=dynamic(init_scale=128.0)"
POLICIES = [FLOAT16, "mixed_bfloat16", FLOAT32]


@pytest.fixture(params=POLICIES, ids=["float16", "bfloat16", "float32"])
def policy(request):
    return request.param


def network(outputs=1):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


class Steep(nn.Module):
    """Its gradients are several hundred times what enters: they overflow in float16 at first."""

    def __init__(self, gain=64.0):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.second.weight, gain)

    def forward(self, values):
        return self.second(self.first(values))


def backward(model, factor=1.0):
    (model(torch.ones(2, 4)).mean() * factor).backward()


def state_of(model, optimizer):
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()])


def assert_same(one, other):
    torch.testing.assert_close(other, one, rtol=0, atol=0)


# S: calls in the wrong state. A region has no calls to get wrong.


def test_a_head_that_got_no_gradient(policy):
    """'No inf checks were recorded for this optimizer', because a batch used one head only."""
    body, heads = nn.Linear(4, 4), [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [optim.Adam(each.parameters(), lr=0.1) for each in (body, *heads)]
    regions = [prepare(m, o, policy) for m, o in zip((body, *heads), optimizers, strict=True)]
    idle = copy.deepcopy(heads[1].state_dict())
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        heads[0](body(torch.ones(2, 4))).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same(idle, heads[1].state_dict())
    assert regions[2].history.skipped == 0


def test_a_layer_in_float16_is_named():
    """'Attempting to unscale FP16 gradients', and nobody said whose."""
    model = nn.Sequential()
    model.add_module("stem", nn.Linear(4, 8))
    model.add_module("act", nn.PReLU(8).half())
    with pytest.raises(UsageError, match=r"act\.weight.*float\(\)"):
        prepare(model, optim.SGD(model.parameters(), lr=0.1))


def test_a_frozen_model_in_float16_with_adapters_in_float32():
    """Adapters on a frozen model that was loaded in float16."""
    frozen, adapter = nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4)

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.adapter = frozen, adapter

        def forward(self, values):
            return self.frozen(values) + self.adapter(values)

    model = Adapted()
    optimizer = optim.SGD(adapter.parameters(), lr=0.1)
    region = prepare(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    backward(model)
    optimizer.step()
    assert region.history.steps == 1
    assert not torch.equal(model.state_dict()["adapter.weight"], before["adapter.weight"])
    assert torch.equal(model.state_dict()["frozen.weight"], before["frozen.weight"])


def test_a_trained_layer_in_bfloat16_is_named():
    """'_amp_foreach_non_finite_check_and_unscale_cuda not implemented for BFloat16'."""
    model = network()
    model[2].bfloat16()
    with pytest.raises(UsageError, match=r"bfloat16.*2\.weight"):
        prepare(model, optim.SGD(model.parameters(), lr=0.5))


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_losses_and_steps_in_any_order(order, policy):
    """Which of three losses, steps and updates comes first was asked again and again."""
    models = [network() for _ in range(3)]
    plain = copy.deepcopy(models)
    for model in models:
        prepare(model, policy=policy)
    for each in (models, plain):
        values = torch.ones(2, 4)
        for place in order:
            (each[place](values).square().mean() * 10.0**place).backward()
    for model, other in zip(models, plain, strict=True):
        for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.allclose(parameter.grad, expected.grad, rtol=0.05, atol=1e-3)


def test_complex_parameters_train(policy):
    """Unscaling was not implemented for complex gradients."""

    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter = nn.Parameter(torch.ones(3, dtype=torch.complex64) * (1 + 2j))
            self.last = nn.Linear(4, 1)

        def forward(self, values):
            return self.last(torch.fft.irfft(torch.fft.rfft(values) * self.filter, n=4))

    model = Spectral()
    plain = copy.deepcopy(model)
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    region = prepare(model, optimizer, policy)
    values = torch.tensor([[1.0, 2.0, 4.0, -1.0]])
    for each in (model, plain):
        each(values).square().sum().backward()
    assert torch.allclose(model.filter.grad, plain.filter.grad, rtol=0.05, atol=0.01)
    optimizer.step()
    assert not region.last_step.skipped
    model.filter.grad[1] = complex(0.0, torch.inf)
    before = state_of(model, optimizer)
    optimizer.step()
    assert region.last_step.skipped
    assert_same(before, state_of(model, optimizer))


class NoFloat64(TorchDispatchMode):
    """A device that has no float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            assert not (isinstance(each, torch.Tensor) and each.dtype == torch.float64), func
        return result


def test_nothing_needs_float64(policy):
    """Scalers failed on devices without float64."""
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    region = prepare(model, optimizer, policy)
    with NoFloat64():
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    assert region.history.steps == 3


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_sparse_gradients_are_true_and_looked_at(bad, policy):
    """A scaler had no path for the gradient of a sparse embedding."""
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    region = prepare(model, optimizer, policy)
    for each in (model, plain):
        each(torch.tensor([[1, 1, 7]])).square().sum().backward()
    assert model[0].weight.grad.is_sparse
    got, expected = (each[0].weight.grad.to_dense() for each in (model, plain))
    assert torch.allclose(got, expected, rtol=0.05, atol=0.01)
    optimizer.step()
    assert not region.last_step.skipped
    before = state_of(model, optimizer)
    model[0].weight.grad = model[0].weight.grad * bad
    optimizer.step()
    assert region.last_step.skipped
    assert_same(before, state_of(model, optimizer))


def test_duplicates_that_overflow_only_together():
    """Two rows of a sparse gradient were finite, their sum was not."""
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = optim.SGD(model.parameters(), lr=1e-39)
    region = prepare(model, optimizer, FLOAT32)
    before = model.weight.detach().clone()
    largest = torch.finfo(torch.float32).max
    model(torch.tensor([1, 1])).backward(torch.full((2, 2), 0.75 * largest))
    optimizer.step()
    assert region.last_step.skipped
    assert torch.equal(model.weight, before)


# C: the scale collapses, or grows without end.


class Noise(logging.Handler):
    """Keeps what is logged and warned of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("inside", [True, False])
def test_a_stream_of_nan_is_told_and_leaves_a_scale(inside):
    """The scale halved until it was 0, training did nothing, and nothing was said."""
    model = Steep()
    if inside:
        with torch.no_grad():
            model.second.weight[0, 0] = torch.nan
    optimizer = optim.AdamW(model.parameters())
    region = prepare(model, optimizer)
    before = model.first.weight.detach().clone()
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(200):
            optimizer.zero_grad()
            backward(model, 1.0 if inside else torch.nan)
            try:
                optimizer.step()
            except NonFiniteError as error:
                told.append(str(error))
                break
    told += [str(each.message) for each in caught if each.category is SkippedStepsWarning]
    assert any("second.weight" in text or "first.weight" in text for text in told)
    assert region.scale > 0.0
    assert torch.equal(model.first.weight, before)
    if not inside:
        assert region.scale == 65536.0


def test_a_fault_that_does_not_depend_on_the_scale_does_not_lower_it():
    """A NaN already in the forward, such as 0 / 0, was answered by lowering the scale."""

    class Dividing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, values):
            return self.layer(values / values.norm())

    model = Dividing()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    region = prepare(model, optimizer)
    for batch in (torch.ones(2, 4), torch.zeros(2, 4), torch.zeros(2, 4), torch.ones(2, 4)):
        optimizer.zero_grad()
        # The loss is NaN, so is the gradient that enters.
        model(batch).square().mean().backward()
        optimizer.step()
    assert region.scale == 65536.0
    assert (region.history.steps, region.history.skipped) == (4, 2)


def test_the_first_steps_are_skipped_in_silence():
    """'Is this message normal?' was asked about the first skipped steps."""
    model, noise = Steep(), Noise()
    optimizer = optim.SGD(model.parameters(), lr=1e-6)
    region = prepare(model, optimizer)
    logging.getLogger().addHandler(noise)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(6):
                optimizer.zero_grad()
                backward(model)
                optimizer.step()
    finally:
        logging.getLogger().removeHandler(noise)
    assert 0 < region.history.skipped <= 2
    assert not noise.texts
    assert not caught


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
def test_a_tiny_scale_makes_no_infinity(kind):
    """The reciprocal of the scale was infinite, and with it gradients, and the step was taken."""
    model = network()
    plain = copy.deepcopy(model)
    optimizer = kind(model.parameters(), lr=0.1)
    settings = f"init_scale={2.0**-100}, min_scale={2.0**-120}"
    prepare(model, optimizer, f"{FLOAT32}, scale=dynamic({settings})")
    for each in (model, plain):
        backward(each)
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_rare_overflow_does_not_ratchet_the_scale_down():
    """Backing off on every bad step and growing after 2000 good ones, it went down over epochs."""
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    region = prepare(model, optimizer, f"{FLOAT32}, scale=dynamic(growth_interval=100)")
    for number in range(120):
        optimizer.zero_grad()
        backward(model, torch.inf if number % 10 == 5 else 1.0)
        optimizer.step()
    assert region.history.skipped == 12
    assert region.scale >= 65536.0


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-12])
def test_the_scale_has_a_ceiling(factor):
    """With tiny gradients it grew to infinity."""
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    growing = "dynamic(growth_interval=1, max_scale=1048576.0)"
    region = prepare(model, optimizer, f"{FLOAT32}, scale={growing}")
    for _ in range(40):
        optimizer.zero_grad()
        backward(model, factor)
        optimizer.step()
    assert region.scale == 2.0**20
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1.0])
def test_without_a_ceiling_it_stays_finite(factor):
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    region = prepare(model, optimizer, f"{FLOAT32}, scale=dynamic(growth_interval=1)")
    for _ in range(150):
        optimizer.zero_grad()
        backward(model, factor)
        optimizer.step()
    assert 0 < region.scale < torch.inf
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, torch.max])
def test_half_outputs_make_no_infinite_loss(reduce):
    """A loss in half times 65536 was infinite at every step."""
    model = network(8)
    plain = copy.deepcopy(model)
    # Whoever wants half outputs gets them; the loss is not multiplied by anything.
    region = prepare(model, policy="mixed_float16, output_dtype=float16")
    losses = []
    for each in (model, plain):
        outputs = each(torch.ones(2, 4))
        losses.append(reduce(outputs))
        losses[-1].backward()
    assert losses[0].dtype == torch.float16
    assert losses[0].isfinite()
    assert region.scale == 65536.0
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter.grad, expected.grad, rtol=0.05, atol=0.01)


def test_a_loss_of_each_sample_in_half():
    """scale() of half tensors stays in half, and is infinite."""
    model = network(8)
    prepare(model, policy="mixed_float16, output_dtype=float16")
    losses = model(torch.ones(2, 4)).square().mean(1)
    losses.backward(torch.ones(2, dtype=torch.float16))
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_scale_below_one_is_possible():
    """The floor was 1, and gradients that needed less were skipped for a million steps."""
    model = Steep(gain=2.0**15)
    optimizer = optim.SGD(model.parameters(), lr=1e-9)
    region = prepare(model, optimizer)
    for _ in range(8):
        optimizer.zero_grad()
        (model(torch.ones(64, 4)) / 64).sum().backward()
        optimizer.step()
    assert region.scale < 65536.0
    assert not region.last_step.skipped
    assert region.history.consecutive_skips == 0


def test_a_floor_of_ones_own_is_told():
    """At the floor there was silence."""

    def run():
        for _ in range(20):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()

    model = Steep(gain=6e4)
    optimizer = optim.SGD(model.parameters(), lr=1e-9)
    region = prepare(model, optimizer, "mixed_float16, scale=dynamic(min_scale=256.0)")
    with pytest.raises(NonFiniteError, match=r"smallest scale.*first\.weight"):
        run()
    assert region.scale == 256.0


def test_every_change_of_the_scale_is_kept_with_its_reason():
    """The scale 'jumped' from 131072 to 5e-23 from one line of the log to the next."""
    model = Steep()
    optimizer = optim.SGD(model.parameters(), lr=1e-6)
    region = prepare(model, optimizer, "mixed_float16, scale=dynamic(growth_interval=3)")
    for _ in range(12):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    changes = region.history.scale_changes
    assert {change.after < change.before for change in changes} == {True, False}
    assert all(change.reason for change in changes)
    for one, other in itertools.pairwise(changes):
        assert one.after == other.before
    assert changes[0].before == 65536.0
    assert changes[-1].after == region.scale


def test_a_run_can_be_ended_when_nothing_but_skips_happens():
    """Wished for: stop the run instead of burning money on skipped steps."""

    def run():
        for _ in range(100):
            optimizer.zero_grad()
            backward(model, torch.nan)
            optimizer.step()

    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    region = prepare(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SkippedStepsWarning)
        with pytest.raises(SkippedStepsWarning):
            run()
    assert region.history.consecutive_skips < 100


# K: what counts steps.


SCHEDULERS = {
    "LambdaLR": lambda it: lr_scheduler.LambdaLR(it, lambda n: 0.5**n),
    "OneCycleLR": lambda it: lr_scheduler.OneCycleLR(it, max_lr=0.1, total_steps=50),
    "SequentialLR": lambda it: lr_scheduler.SequentialLR(
        it,
        [lr_scheduler.LinearLR(it), lr_scheduler.CosineAnnealingLR(it, 10)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_schedule_counts_real_steps_without_a_warning(kind, fused):
    """'lr_scheduler.step() before optimizer.step()', and a schedule ahead of the updates."""
    model = Steep()
    optimizer = optim.AdamW(model.parameters(), lr=1e-6, fused=fused)
    region = prepare(model, optimizer)
    scheduler, real = SCHEDULERS[kind](optimizer), 0
    for _ in range(8):
        before = model.first.weight.detach().clone()
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        real += not torch.equal(before, model.first.weight)
        if not region.last_step.skipped:
            scheduler.step()
    assert 0 < real < 8
    assert scheduler.last_epoch == real
    assert region.history.steps - region.history.skipped == real


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "kind", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad], ids=lambda kind: kind.__name__
)
def test_a_skipped_step_leaves_parameters_and_state_bit_identical(kind, fused):
    """A 'skipped' step still advanced the count and the moments, or decayed the weights."""
    model = network()
    extra = {"momentum": 0.9} if kind is optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.1, fused=fused, **extra)
    region = prepare(model, optimizer, FLOAT32)
    for number in range(6):
        optimizer.zero_grad()
        backward(model, torch.inf if number % 2 else 1.0)
        before = state_of(model, optimizer)
        optimizer.step()
        assert region.last_step.skipped is bool(number % 2)
        if number % 2:
            assert_same(before, state_of(model, optimizer))


def trained(stop, policy, how="fresh"):
    """Trains ten steps, with a checkpoint and a new process, so to say, after some of them."""
    torch.manual_seed(0)
    parts = made(policy)
    for number in range(10):
        if number == stop:
            file = io.BytesIO()
            torch.save([part.state_dict() for part in parts], file)
            file.seek(0)
            torch.manual_seed(3)
            parts = made(policy)
            if how == "used":
                step(parts, 99)
            for part, state in zip(parts, torch.load(file), strict=True):
                part.load_state_dict(state)
        step(parts, number)
    return [part.state_dict() for part in parts]


def made(policy):
    model = Steep()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, prepare(model, optimizer, policy)


def step(parts, number):
    model, optimizer, _ = parts
    values = torch.randn(4, 4, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(values).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("stop", [0, 1, 4, 9])
@pytest.mark.parametrize("how", ["fresh", "used"])
def test_a_resumed_run_is_the_run(stop, how):
    """The curve had a kink on resume: the state was lost, partly saved, or built too late."""
    policy = "mixed_float16, scale=dynamic(growth_interval=3)"
    assert_same(trained(None, policy), trained(stop, policy, how))


def test_loading_a_state_keeps_the_one_that_was_given():
    """Loading changed the dict that it was given, or kept a reference to it."""
    _, _, region = parts = made("mixed_float16")
    step(parts, 0)
    saved = region.state_dict()
    kept = copy.deepcopy(saved)
    _, _, other = others = made("mixed_float16")
    other.load_state_dict(saved)
    assert other.state_dict() == saved == kept
    step(others, 1)
    assert saved == kept


def test_the_state_dict_of_a_scaler_is_taken_over():
    """Whoever changes from a scaler to a region keeps the scale."""
    scaler = GradScaler("cpu", init_scale=512.0, growth_interval=4)
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    region = prepare(model, optimizer, f"{FLOAT32}, scale=dynamic(growth_interval=4)")
    region.load_state_dict(scaler.state_dict())
    assert region.scale == 512.0
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    # Two of the four finite steps that it takes to grow had been seen by the scaler.
    assert region.scale == 1024.0


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad])
def test_the_state_of_an_optimizer_stays_float32(kind, policy):
    """Loading a checkpoint cast the state to half, where 1e-9 is 0."""
    model = network()
    optimizer = kind(model.parameters(), lr=0.1)
    prepare(model, optimizer, policy)
    backward(model, 1e-6)
    optimizer.step()
    loaded = kind(model.parameters(), lr=0.1)
    loaded.load_state_dict(optimizer.state_dict())
    assert_same(optimizer.state_dict()["state"], loaded.state_dict()["state"])
    values = [v for state in loaded.state.values() for v in state.values() if torch.is_tensor(v)]
    assert {value.dtype for value in values} == {torch.float32}
    # Squares of such gradients are not zero.
    assert any((value > 0).any() for value in values)


def test_a_record_is_known_without_asking_the_device_again():
    """Asking for the scale in each step made training slower; what a step did is kept."""
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    region = prepare(model, optimizer)
    records = []
    for factor in (1.0, torch.nan, 1.0):
        optimizer.zero_grad()
        backward(model, factor)
        optimizer.step()
        records.append(region.last_step)
    assert [record.skipped for record in records] == [False, True, False]
    assert records[1].loss_nonfinite
    assert [record.scale for record in records] == [65536.0] * 3


def test_an_update_that_is_forgotten_cannot_be():
    """Without update() the scale never moved, and unscale_ raised in the second iteration."""
    model = Steep()
    optimizer = optim.SGD(model.parameters(), lr=1e-6)
    region = prepare(model, optimizer, "mixed_float16, scale=dynamic(growth_interval=2)")
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # Passes count, not steps: none was taken, and the scale has come down.
    assert region.scale < 65536.0


def test_an_evaluation_in_between_changes_nothing():
    """A validation, or a gradient that nobody steps with, between two steps."""
    curves = []
    for evaluating in (False, True):
        torch.manual_seed(0)
        model, optimizer, region = parts = made("mixed_float16")
        for number in range(5):
            step(parts, number)
            if evaluating:
                model.eval()
                with torch.no_grad():
                    model(torch.ones(2, 4))
                with torch.inference_mode():
                    model(torch.ones(2, 4))
                model.train()
        curves.append([model.state_dict(), optimizer.state_dict(), region.state_dict()])
    assert_same(*curves)
