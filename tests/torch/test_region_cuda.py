"""Regions on an accelerator: the same numbers, and nobody waits for the device."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from halfstep.errors import NonFiniteError
from halfstep.torch import prepare, set_global_policy
from halfstep.torch._private import SEES_ATTRIBUTES

# With "cpu", whatever measures no device can be tried without one.
DEVICE = "cuda"
FLOAT32 = "compute_dtype=float32"
# A scale at which nothing overflows, because a skipped step would make loops differ.
FLOAT16 = "mixed_float16, scale=dynamic(init_scale=256.0)"
TOLERANCE = {FLOAT16: 0.01, "mixed_bfloat16": 0.05, FLOAT32: 1e-4}
POLICIES = [*TOLERANCE]

pytestmark = [
    pytest.mark.gpu,
    # PyTorch's own, of its code generator and where it looks at weights.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32"),
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous"),
]


@pytest.fixture(params=POLICIES, ids=["float16", "bfloat16", "float32"])
def policy(request):
    return request.param


@pytest.fixture(autouse=True)
def exact_products():
    """Products of float32 in float32, and nothing compiled."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    convolutions, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_float32_matmul_precision(before)
    torch.backends.cudnn.allow_tf32 = convolutions


class Block(nn.Module):
    def __init__(self, width, saving):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.saving = saving

    def forward(self, tokens):
        if self.saving and torch.is_grad_enabled():
            return checkpoint(self.computed, tokens, use_reentrant=False)
        return self.computed(tokens)

    def computed(self, tokens):
        batch, length, width = tokens.shape
        mixed = self.mix(self.before(tokens)).view(batch, length, 3, 4, -1)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return tokens + self.narrow(functional.gelu(self.widen(self.between(tokens))))


class Transformer(nn.Module):
    def __init__(self, width=32, blocks=2, saving=False):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Block(width, saving) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64))

    def forward(self, symbols):
        return self.head(self.blocks(self.embed(symbols)))


def transformer(**options):
    torch.manual_seed(0)
    symbols = torch.randint(64, (4, 17), device=DEVICE)
    return Transformer(**options).to(DEVICE), symbols[:, :-1], symbols[:, 1:].flatten()


def convolutional():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(),
    )  # fmt: skip
    model.append(nn.Linear(8 * 12 * 12, 10))
    model = model.to(DEVICE, memory_format=torch.channels_last)
    images = torch.rand(8, 3, 16, 16, device=DEVICE).to(memory_format=torch.channels_last)
    return model, images, torch.randint(10, (8,), device=DEVICE)


def recurrent():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 5)

        def forward(self, values):
            return self.head(self.inner(values)[0])

    values = torch.randn(4, 6, 8, device=DEVICE)
    return Net().to(DEVICE), values, torch.randint(5, (24,), device=DEVICE)


MODELS = {
    "transformer": transformer,
    "checkpointed": lambda: transformer(saving=True),
    "convolutional": convolutional,
    "recurrent": recurrent,
}


def loss_of(model, inputs, targets):
    outputs = model(inputs)
    assert outputs.dtype == torch.float32
    return functional.cross_entropy(outputs.flatten(0, -2), targets)


def gradients(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def distance(one, other):
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_float32(kind, factor, policy):
    model, *batch = MODELS[kind]()
    plain = copy.deepcopy(model)
    prepare(model, policy=policy)
    for each in (model, plain):
        (factor * loss_of(each, *batch)).backward()
    assert distance(gradients(model), gradients(plain)) < 2 * TOLERANCE[policy]
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.stride() == other.grad.stride()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_trains_as_in_float32(kind, fused, policy):
    losses = []
    for prepared in (False, True):
        model, *batch = MODELS[kind]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        region = prepare(model, optimizer, policy) if prepared else None
        curve = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = loss_of(model, *batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            curve.append(loss.item())
        losses.append(torch.tensor(curve))
    plain, ours = losses
    assert plain[-1] < plain[0]
    assert (ours - plain).abs().max() < max(TOLERANCE[policy], 1e-3) * plain[0]
    assert (region.history.steps, region.history.skipped) == (20, 0)


def test_gradients_that_underflow_survive():
    model, *batch = transformer()
    plain = copy.deepcopy(model)
    prepare(model, policy=FLOAT16)
    for each in (model, plain):
        (1e-9 * loss_of(each, *batch)).backward()
    full = gradients(plain)
    lost = (gradients(model)[full != 0] == 0).float().mean()
    assert lost < 0.01


# A scale at which only what overflows for any scale does.
START = "mixed_float16, scale=dynamic(init_scale=4096.0)"


class Loop:
    """A tiny model whose gradients overflow inside of the region when it is told so."""

    def __init__(self, policy=START, fused=True, device=None, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), Gain(), nn.Linear(4, 1))
        self.model.to(device or DEVICE)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.125, fused=fused, **options
        )
        self.region = prepare(self.model, self.optimizer, policy)
        self.values = torch.ones(2, 4, device=device or DEVICE)

    def run(self, gain=1.0, factor=1.0):
        self.optimizer.zero_grad()
        self.model[1].gain = gain
        (self.model(self.values).mean() * factor).backward()
        self.optimizer.step()

    def state(self):
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])


class Gain(nn.Module):
    """Multiplies gradients, not values."""

    gain = 1.0

    def forward(self, values):
        return values * self.gain - values.detach() * (self.gain - 1.0)


# Of an overflow inside the region, and of a loss that is not finite.
OVERFLOW, FOREIGN = {"gain": torch.inf}, {"factor": torch.inf}


def assert_same(one, other):
    torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def no_waiting():
    """Makes it an error to wait for the device, between the two functions that it gives."""
    if DEVICE == "cpu":
        yield lambda mode: None
        return
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("clip", [False, True])
def test_a_fused_step_does_not_wait_for_the_device(clip, no_waiting, policy):
    model, *batch = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    region = prepare(model, optimizer, policy)

    def step(factor=1.0):
        optimizer.zero_grad()
        (factor * loss_of(model, *batch)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    # The first step makes the state of the optimizer.
    step()
    no_waiting("error")
    for _ in range(5):
        step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(torch.inf)
    no_waiting("default")
    assert region.last_step.skipped
    assert_same(before, [*model.parameters()])
    no_waiting("error")
    step()
    no_waiting("default")
    assert not region.last_step.skipped
    assert (region.history.steps, region.history.skipped) == (8, 1)
    assert optimizer.state[model.head[1].weight]["step"].item() == 7


@pytest.mark.skipif(DEVICE == "cpu", reason="counts how often a device is waited for")
@pytest.mark.parametrize("kind", ["adamw", "adamw, not foreach", "sgd"])
def test_another_step_waits_once_at_most(kind, no_waiting, policy):
    model, *batch = transformer()
    optimizer = {
        "adamw": lambda them: torch.optim.AdamW(them),
        "adamw, not foreach": lambda them: torch.optim.AdamW(them, foreach=False),
        "sgd": lambda them: torch.optim.SGD(them, lr=0.1, momentum=0.9),
    }[kind](model.parameters())
    prepare(model, optimizer, policy)

    def step():
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        optimizer.step()

    step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        no_waiting("warn")
        for _ in range(5):
            step()
        no_waiting("default")
    waits = [each for each in caught if "synchronizing" in str(each.message)]
    assert len(waits) <= 5


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("what", [OVERFLOW, FOREIGN], ids=["overflow", "foreign"])
def test_a_skipped_step_leaves_no_trace(what, fused):
    loop = Loop(fused=fused)
    for bad in (False, True, False, True, True, False):
        before = loop.state()
        loop.run(**(what if bad else {}))
        if bad:
            assert_same(before, loop.state())
        assert loop.region.last_step.skipped is bad
    assert (loop.region.history.steps, loop.region.history.skipped) == (6, 3)
    assert (loop.region.scale < 4096.0) is (what is OVERFLOW)


def test_the_first_step_of_a_fused_optimizer_can_be_skipped():
    loop = Loop()
    loop.run(**OVERFLOW)
    assert not loop.optimizer.state
    loop.run()
    assert all(parameter.isfinite().all() for parameter in loop.model.parameters())
    assert not loop.region.last_step.skipped


def test_an_overflow_that_was_clipped_is_skipped():
    loop = Loop()
    loop.run()
    before = loop.state()
    loop.optimizer.zero_grad()
    loop.model[1].gain = torch.inf
    loop.model(loop.values).mean().backward()
    nn.utils.clip_grad_value_(loop.model.parameters(), 1.0)
    for parameter in loop.model.parameters():
        parameter.grad.nan_to_num_()
    loop.optimizer.step()
    assert_same(before, loop.state())


def test_what_was_not_finite_is_told_when_asked():
    loop = Loop()
    loop.run()
    loop.run(**OVERFLOW)
    record = loop.region.last_step
    assert {name for name, _ in record.nonfinite} >= {"0.weight", "0.bias"}
    assert record.skipped
    assert record.reason
    assert not record.loss_nonfinite
    loop.run(**FOREIGN)
    assert loop.region.last_step.loss_nonfinite


@pytest.mark.filterwarnings("ignore::halfstep.torch.SkippedStepsWarning")
def test_the_floor_is_noticed_in_the_end():
    def run():
        for _ in range(200):
            loop.run(**OVERFLOW)

    loop = Loop("mixed_float16, scale=dynamic(min_scale=1024.0)")
    loop.run()
    with pytest.raises(NonFiniteError, match="smallest scale"):
        run()


@pytest.mark.parametrize("fused", [False, True])
def test_the_state_moves_as_on_the_host(fused):
    events = [{}, OVERFLOW, OVERFLOW, *[{}] * 20, FOREIGN, OVERFLOW, *[{}] * 9]
    policy = f"{FLOAT32}, scale=dynamic(growth_interval=3)"
    loops = [Loop(policy, fused, device) for device in (DEVICE, "cpu")]
    for event in events:
        for loop in loops:
            loop.run(**event)
        one, other = (loop.region for loop in loops)
        assert one.state_dict() == other.state_dict()
        assert one.scale == other.scale
    assert one.history.skipped == other.history.skipped == 4
    for parameter, other in zip(*(loop.model.parameters() for loop in loops), strict=True):
        assert torch.allclose(parameter.cpu(), other, atol=1e-4)


def test_a_state_is_saved_and_loaded():
    policy = START.replace(")", ", growth_interval=2)")
    loop, other = Loop(policy), Loop(policy)
    for event in ({}, OVERFLOW, {}, {}, {}):
        loop.run(**event)
    saved = loop.region.state_dict()
    assert all(isinstance(value, int | float) for value in saved.values())
    other.model.load_state_dict(loop.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    other.region.load_state_dict(saved)
    for each in (loop, other):
        for event in ({}, {}, OVERFLOW, {}):
            each.run(**event)
    assert loop.region.state_dict() == other.region.state_dict()
    assert_same(loop.state(), other.state())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_is_moved_after_it_was_prepared(when, policy):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    region = prepare(model, policy=policy)
    if when == "after":
        model(torch.ones(2, 4)).sum().backward()
    scale = region.scale
    model.to(DEVICE)
    model(torch.ones(2, 4, device=DEVICE)).sum().backward()
    assert region.scale == scale
    if policy != "mixed_bfloat16":
        assert region._cells.scale.device.type == DEVICE
    model.zero_grad()
    model.cpu()
    model(torch.ones(2, 4)).sum().backward()
    assert region.scale == scale
    assert torch.allclose(model.weight.grad, torch.full((2, 4), 2.0))


@pytest.mark.parametrize("copied", ["deepcopy", "state"])
def test_a_copy_is_on_the_device_too(copied, policy):
    model, *batch = transformer()
    region = prepare(model, policy=policy)
    loss_of(model, *batch).backward()
    other = copy.deepcopy(model)
    if copied == "state":
        other, *_ = transformer()
        fresh = prepare(other, policy=policy)
        fresh.load_state_dict(region.state_dict())
        assert fresh.state_dict() == region.state_dict()
    for each in (model, other):
        each.zero_grad()
        loss_of(each, *batch).backward()
    assert distance(gradients(other), gradients(model)) < TOLERANCE[policy]


COMPILED = {
    "default": {"fullgraph": SEES_ATTRIBUTES},
    "reduce-overhead": {"fullgraph": SEES_ATTRIBUTES, "mode": "reduce-overhead"},
    "in parts": {},
}


@pytest.mark.parametrize("first", ["compile", "prepare"])
@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_region_has_the_gradients_of_an_eager_one(how, first, policy):
    found = []
    for compiled in (False, True):
        model, *batch = transformer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        called = model
        if compiled and first == "compile":
            called = torch.compile(model, **COMPILED[how])
        region = prepare(called, optimizer, policy)
        if compiled and first == "prepare":
            called = torch.compile(model, **COMPILED[how])
        steps = []
        for number in range(6):
            optimizer.zero_grad()
            (10.0**number * loss_of(called, *batch)).backward()
            steps.append(gradients(model).clone() / 10.0**number)
            for parameter in model.parameters():
                parameter.grad.div_(10.0**number)
            optimizer.step()
        found.append(steps)
        assert region.history.skipped == 0
    for eager, compiled in zip(*found, strict=True):
        assert distance(compiled, eager) < 3 * TOLERANCE[policy]


def test_a_compiled_model_that_overflows_lowers_its_scale():
    loop = Loop("mixed_float16")
    called = torch.compile(loop.model, fullgraph=SEES_ATTRIBUTES)
    weight = loop.model[2].weight
    with torch.no_grad():
        weight.fill_(64.0)
    for _ in range(5):
        loop.optimizer.zero_grad()
        called(loop.values).sum().backward()
        loop.optimizer.step()
    assert 0 < loop.region.history.skipped < 5
    assert not loop.region.last_step.skipped
    assert loop.region.scale < 65536.0


def test_a_compiled_step_does_not_wait_for_the_device(no_waiting, policy):
    model, *batch = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    prepare(model, optimizer, policy)
    called = torch.compile(model, fullgraph=SEES_ATTRIBUTES)

    def step():
        optimizer.zero_grad()
        loss_of(called, *batch).backward()
        optimizer.step()

    for _ in range(3):
        step()
    no_waiting("error")
    for _ in range(3):
        step()


def test_a_gradient_penalty(policy):
    def loss(model):
        values = torch.linspace(-1, 1, 32, device=DEVICE).view(8, 4).requires_grad_()
        score = model(values)
        (gradient,) = torch.autograd.grad(score.sum(), values, create_graph=True)
        return score.mean() + (gradient.norm(dim=1) - 1).square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 1)).to(DEVICE)
    plain = copy.deepcopy(model)
    prepare(model, policy=policy)
    for each in (model, plain):
        loss(each).backward()
    assert distance(gradients(model), gradients(plain)) < 2 * TOLERANCE[policy]


def test_accumulation_and_autograd_grad(policy):
    model, *batch = transformer()
    plain = copy.deepcopy(model)
    prepare(model, policy=policy)
    for each in (model, plain):
        for _ in range(3):
            loss_of(each, *batch).backward()
    assert distance(gradients(model), gradients(plain)) < TOLERANCE[policy]
    one, other = (
        torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(m, *batch), m.parameters())])
        for m in (model, plain)
    )
    assert distance(one, other) < TOLERANCE[policy]


def test_a_global_policy(policy):
    model, *batch = transformer()
    plain = copy.deepcopy(model)
    loss_of(plain, *batch).backward()
    set_global_policy(policy)
    try:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        loss_of(model, *batch).backward()
        assert distance(gradients(model), gradients(plain)) < TOLERANCE[policy]
        optimizer.step()
    finally:
        set_global_policy("float32")
    assert "forward" not in vars(model)
    if policy != FLOAT32:
        assert not torch.equal(gradients(model), gradients(plain))


@pytest.mark.skipif(DEVICE == "cpu", reason="measures the memory of a device")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("saving", [False, True])
def test_memory_is_at_most_that_of_torch_amp(dtype, saving):
    def peak(prepared):
        torch.manual_seed(0)
        model = Transformer(256, 4, saving).to(DEVICE)
        symbols = torch.randint(64, (8, 257), device=DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        scaler = torch.amp.GradScaler(DEVICE)
        if prepared:
            prepare(model, optimizer, f"compute_dtype={dtype}, scale=dynamic")
        for number in range(4):
            if number == 3:
                torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            if prepared:
                loss_of(model, symbols[:, :-1], symbols[:, 1:].flatten()).backward()
                optimizer.step()
                continue
            with torch.autocast(DEVICE, dtype=getattr(torch, dtype)):
                outputs = model(symbols[:, :-1])
                loss = functional.cross_entropy(outputs.flatten(0, -2), symbols[:, 1:].flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return torch.cuda.max_memory_allocated()

    # Once for what libraries allocate on first use.
    peak(prepared=True)
    ours, theirs = peak(prepared=True), peak(prepared=False)
    assert ours <= theirs * 1.01


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("across", [False, True])
def test_several_devices(across, policy):
    """On the second device, while the first is the current one; and across both."""
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 8, device="cuda:0" if across else "cuda:1")
            self.second = nn.Linear(8, 2, device="cuda:1")

        def forward(self, values):
            return self.second(self.first(values).to("cuda:1").relu())

    model = Net()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    region = prepare(model, optimizer, policy)
    values = torch.ones(3, 4, device=model.first.weight.device)
    for _ in range(3):
        optimizer.zero_grad()
        model(values).square().mean().backward()
        if region.history.steps == 0:
            plain(values).square().mean().backward()
            for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert distance(parameter.grad, other.grad) < 5 * TOLERANCE[policy]
        optimizer.step()
    assert (region.history.steps, region.history.skipped) == (3, 0)
