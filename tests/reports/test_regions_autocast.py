"""What autocast was reported for, where a region is another way to run the same code."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from halfstep.torch import autocast, custom_bwd, custom_fwd, prepare
from halfstep.torch._private import SEES_ATTRIBUTES
from tests.reports.agreement import tensors, weighted_sum

# A scale at which nothing overflows that would not overflow by itself.
FLOAT16 = "compute_dtype=float16, scale=dynamic(init_scale=256.0)"
POLICIES = [FLOAT16, "mixed_bfloat16"]
TOLERANCE = {FLOAT16: 0.02, "mixed_bfloat16": 0.1}


@pytest.fixture(params=POLICIES, ids=["float16", "bfloat16"])
def policy(request):
    return request.param


def results(model, *inputs):
    """Returns the outputs, and the gradients of parameters and of inputs."""
    inputs = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
    outputs = model(*inputs)
    weighted_sum(outputs).backward()
    grown = [*inputs, *model.parameters()]
    return [*tensors(outputs), *(each.grad for each in grown if each.grad is not None)]


def assert_close(got, expected, tolerance):
    """Compares tensors one by one; what should be zero may be as large as its neighbours' noise."""
    assert len(got) == len(expected)
    noise = 0.1 * max(each.detach().float().norm() for each in expected)
    for one, other in zip(got, expected, strict=True):
        one, other = one.detach().float(), other.detach().float()
        assert (one - other).norm() <= tolerance * (other.norm() + noise)


def assert_runs_as_in_float32(model, policy, *inputs):
    """Compares a model with its copy that is a region, twice, since caches fill the first time."""
    region = copy.deepcopy(model)
    prepare(region, policy=policy)
    for _ in range(2):
        assert_close(results(region, *inputs), results(model, *inputs), TOLERANCE[policy])
        model.zero_grad()
        region.zero_grad()


class Written(nn.Module):
    """Writes half results into a float32 tensor."""

    def __init__(self, write, registered=False):
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4), write
        self.registered = registered
        self.register_buffer("buffer", torch.zeros(5, 4))

    def forward(self, values):
        buffer = self.buffer if self.registered else torch.zeros(5, 4)
        before = buffer.dtype
        self.write(
            buffer, self.layer(values) if not self.registered else self.layer(values).detach()
        )
        assert buffer.dtype == before
        return buffer * 1.0 + self.layer(values).sum()


ROWS = torch.tensor([0, 3])
WIDE = ROWS[:, None].expand(2, 4)
MASK = torch.tensor([True, False, False, True, False])
WRITES = {
    "b[rows] = ": lambda b, y: b.__setitem__(ROWS, y),
    "b[mask] = ": lambda b, y: b.__setitem__(MASK, y),
    "b[:2] = ": lambda b, y: b.__setitem__(slice(2), y),
    "index_put_": lambda b, y: b.index_put_((ROWS,), y),
    "index_add_": lambda b, y: b.index_add_(0, ROWS, y),
    "index_copy_": lambda b, y: b.index_copy_(0, ROWS, y),
    "scatter_": lambda b, y: b.scatter_(0, WIDE, y),
    "scatter_add_": lambda b, y: b.scatter_add_(0, WIDE, y),
    "scatter_reduce_": lambda b, y: b.scatter_reduce_(0, WIDE, y, "sum"),
    "masked_scatter_": lambda b, y: b.masked_scatter_(MASK[:, None], y),
    "copy_": lambda b, y: b[:2].copy_(y),
    "lerp_": lambda b, y: b[:2].lerp_(y, 0.1),
    "add_": lambda b, y: b[:2].add_(y),
    "mul_, add_": lambda b, y: b[:2].mul_(0.9).add_(y, alpha=0.1),
}


@pytest.mark.parametrize("registered", [False, True], ids=["made inside", "registered"])
@pytest.mark.parametrize("way", WRITES)
def test_half_results_are_written_into_float32_buffers(way, registered, policy):
    """'Index put requires the source and destination dtypes match'."""
    model = Written(WRITES[way], registered)
    region = copy.deepcopy(model)
    prepare(region, policy=policy)
    for _ in range(2):
        got, expected = (results(each, torch.ones(2, 4)) for each in (region, model))
        assert_close(got, expected, TOLERANCE[policy])
        region.zero_grad()
        model.zero_grad()
    assert region.buffer.dtype == torch.float32
    assert not region.buffer.requires_grad
    assert torch.allclose(region.buffer, model.buffer, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("fill", [-1e9, -torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("how", ["masked_fill", "where", "added"])
def test_masks_with_constants_beyond_half(fill, how, policy):
    """'value cannot be converted to type at::Half without overflow'."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, values):
            scores = self.query(values) @ self.key(values).transpose(-1, -2)
            hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
            if how == "masked_fill":
                scores = scores.masked_fill(hidden, fill)
            elif how == "where":
                scores = torch.where(hidden, fill, scores)
            else:
                scores = scores + torch.zeros(4, 4).masked_fill(hidden, fill)
            return scores.softmax(-1) @ self.value(values)

    assert_runs_as_in_float32(Attention(), policy, torch.randn(2, 4, 8))


class Of(nn.Module):
    """A layer, whose half result and a float32 tensor go into a function."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, values):
        return self.function(self.layer(values), self.weight)


PAIRS = {
    "a @ b": lambda h, w: h @ w,
    "b @ a": lambda h, w: w @ h.T,
    "bmm": lambda h, w: torch.bmm(h[None], w[None]),
    "addmm": lambda h, w: torch.addmm(w[0], h, w),
    "einsum": lambda h, w: torch.einsum("ij,jk->ik", h, w),
    "cat": lambda h, w: torch.cat([h, w]),
    "stack": lambda h, w: torch.stack([h[0], w[0]]),
    "where": lambda h, w: torch.where(h[0] > 0, h[0], w[0]),
    "linear": lambda h, w: functional.linear(h, w),
    "bilinear": lambda h, w: functional.bilinear(h, h, w.view(1, 8, 8)),
    "layer_norm": lambda h, w: functional.layer_norm(h, (8,), w[0], w[1]),
    "conv1d": lambda h, w: functional.conv1d(h[None], w[:6].view(2, 6, 4)),
    "conv2d": lambda h, w: functional.conv2d(h[None, None], w.view(4, 1, 4, 4)),
    "attention": lambda h, w: functional.scaled_dot_product_attention(h[None], w[None], w[None]),
    "cosine": lambda h, w: functional.cosine_similarity(h, w[:6], dim=1),
    "cross_entropy": lambda h, w: functional.cross_entropy(h, w[:6].softmax(1)),
    "binary_cross_entropy": lambda h, w: functional.binary_cross_entropy(
        h.sigmoid(), w[:6].sigmoid()
    ),
    "mse_loss": lambda h, w: functional.mse_loss(h, w[:6]),
    "cdist": lambda h, w: torch.cdist(h, w),
    "lerp": lambda h, w: torch.lerp(h, w[:6], 0.3),
    "solve": lambda h, w: torch.linalg.solve(w + 10 * torch.eye(8), h.T),
    "inverse": lambda h, w: torch.linalg.inv(h[:, :6] + 10 * torch.eye(6)) @ w[:6],
    "svd": lambda h, w: torch.linalg.svdvals(h),
    "fft": lambda h, w: torch.fft.rfft(h).abs() + torch.fft.rfft(w[:6]).abs(),
    "exp of much": lambda h, w: (h * 0.1 + 12).exp() * 1e-5,
    "square of much": lambda h, w: (1000 * h).square().sum().sqrt() * 1e-3,
    "logsumexp": lambda h, w: (h * 100).logsumexp(0) * 0.01,
    "cumsum": lambda h, w: (h * 0.1 + 1000).repeat(20, 1).cumsum(0)[-1] * 1e-5,
    "var": lambda h, w: (h * 1000).var() * 1e-6,
    "categorical": lambda h, w: torch.distributions.Categorical(h.softmax(-1)).entropy(),
    "normal": lambda h, w: torch.distributions.Normal(h, w[:6].exp()).log_prob(w[:6]),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_operands_of_two_dtypes(pair, policy):
    """'expected scalar type Half but found Float', no kernel for half, or an overflow in half."""
    assert_runs_as_in_float32(Of(PAIRS[pair]), policy, torch.randn(6, 8))


LAYERS = {
    "rnn": lambda: (nn.RNN(4, 8, batch_first=True), torch.randn(2, 5, 4)),
    "lstm": lambda: (nn.LSTM(4, 8, 2, batch_first=True), torch.randn(2, 5, 4)),
    "both ways": lambda: (nn.LSTM(4, 8, bidirectional=True), torch.randn(2, 5, 4)),
    "projected": lambda: (nn.LSTM(4, 8, proj_size=3), torch.randn(2, 5, 4)),
    "gru": lambda: (nn.GRU(4, 8), torch.randn(2, 5, 4)),
    "gru with a state": lambda: (nn.GRU(4, 8), torch.randn(2, 5, 4), torch.randn(1, 5, 8)),
    "lstm cell": lambda: (nn.LSTMCell(4, 8), torch.randn(5, 4)),
    "attention": lambda: (nn.MultiheadAttention(8, 2, batch_first=True), *torch.randn(3, 2, 5, 8)),
    "encoder": lambda: (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        ),
        torch.randn(2, 5, 8),
    ),
    "decoder": lambda: (
        nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        torch.randn(2, 5, 8),
        torch.randn(2, 3, 8),
    ),
    "embedding": lambda: (nn.Embedding(9, 4), torch.tensor([[1, 1, 8]])),
    "bag": lambda: (nn.EmbeddingBag(9, 4, mode="mean"), torch.tensor([[1, 1, 8]])),
    "convolutions": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2, 2)
        ),
        torch.randn(2, 3, 8, 8),
    ),
    "norms": lambda: (
        nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True), nn.RMSNorm(6)),
        torch.randn(2, 4, 6),
    ),
    "weight norm": lambda: (
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        torch.randn(3, 4),
    ),
    "spectral norm": lambda: (
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
        torch.randn(3, 4),
    ),
    "softmax at the end": lambda: (
        nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)),
        torch.randn(3, 4),
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_run_as_in_float32(layer, policy):
    """Layers that mixed their dtypes, or kept copies of their weights."""
    model, *inputs = LAYERS[layer]()
    assert_runs_as_in_float32(model, policy, *inputs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_recurrent_state_is_carried_from_batch_to_batch(kind, packed, policy):
    """The state of the batch before came back in another dtype, or with its history."""

    def final(enclose):
        torch.manual_seed(0)
        model, head = kind(4, 8, batch_first=True), nn.Linear(8, 1)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        if enclose:
            prepare(model, optimizer, policy)
            prepare(head, optimizer, policy)
        state = None
        for number in range(4):
            generator = torch.Generator().manual_seed(number)
            values = torch.randn(2, 5, 4, generator=generator)
            if packed:
                values = nn.utils.rnn.pack_padded_sequence(values, [5, 3], batch_first=True)
            output, state = model(values, state)
            if packed:
                output, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
            assert output.dtype == torch.float32
            optimizer.zero_grad()
            head(output).square().mean().backward()
            optimizer.step()
            state = tuple(s.detach() for s in state) if kind is nn.LSTM else state.detach()
        return [*model.parameters(), *head.parameters()]

    assert_close(final(True), final(False), TOLERANCE[policy])


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_stay_float32(momentum, policy):
    """Statistics in half overflowed, and were of another dtype in the checkpoint."""
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, momentum=momentum))
    with torch.no_grad():
        model[0].weight.mul_(1500)
    region = copy.deepcopy(model)
    prepare(region, policy=policy)
    for number in range(3):
        values = 2 + torch.randn(4, 2, 9, generator=torch.Generator().manual_seed(number))
        for each in (model, region):
            each(values).square().mean().backward()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        expected, got = getattr(model[1], name), getattr(region[1], name)
        assert got.dtype == expected.dtype
        assert torch.allclose(got.float(), expected.float(), rtol=0.02, atol=5.0)
    # The variances are beyond the largest half.
    assert model[1].running_var.max() > 7e4
    for each in (model, region):
        each.eval()
    assert torch.allclose(region(values), model(values), atol=0.05)


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_pass_without_gradients_comes_first(mode, where, policy):
    """Weights got no gradient after a pass without gradients in the same region."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, values):
            if where == "inside":
                with MODES[mode]():
                    guess = self.layer(values).relu()
                values = values + guess.clone()
            return self.last(self.layer(values))

    model = Twice()
    region = copy.deepcopy(model)
    prepare(region, policy=policy)
    for each in (model, region):
        with MODES[mode]():
            each(torch.ones(2, 4))
    assert_close(
        results(region, torch.ones(2, 4)), results(model, torch.ones(2, 4)), TOLERANCE[policy]
    )


WAYS_TO_CHANGE = {
    "add_": lambda weight: weight.add_(1.0),
    "data": lambda weight: weight.data.add_(1.0),
    "new data": lambda weight: setattr(weight, "data", weight.data + 1.0),
    "copy_": lambda weight: weight.copy_(weight + 1.0),
    "foreach": lambda weight: torch._foreach_add_([weight], 1.0),
}


@pytest.mark.parametrize("way", WAYS_TO_CHANGE)
def test_changed_weights_are_used_at_once(way, policy):
    """Casts of weights were cached, and the loop trained the first weights for ever."""
    model = nn.Linear(4, 4, bias=False)
    prepare(model, policy=policy)
    before = model(torch.ones(1, 4))
    with torch.no_grad():
        WAYS_TO_CHANGE[way](model.weight)
    assert torch.allclose(model(torch.ones(1, 4)), before + 4.0, atol=0.05)
    with torch.no_grad():
        assert torch.allclose(model(torch.ones(1, 4)), before + 4.0, atol=0.05)


def test_activations_and_casts_are_freed(policy):
    """Casts of weights stayed until the end, and memory grew with every step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer, policy)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    def alive():
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    step()
    step()
    before = alive()
    for _ in range(20):
        step()
    # The record of a skipped step may stay, but nothing of each step.
    assert alive() < before + 20


def test_a_gradient_cache_computes_chunks_again(policy):
    """Chunks are computed again, from the gradients of their representations."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    prepare(model, policy=policy)
    inputs = torch.randn(8, 6)

    def loss_of(them):
        scores = them @ them.T
        return functional.cross_entropy(scores, torch.arange(len(them)))

    loss_of(plain(inputs)).backward()
    with torch.no_grad():
        kept = torch.cat([model(chunk) for chunk in inputs.split(2)])
    kept.requires_grad_()
    loss_of(kept).backward()
    for chunk, gradient in zip(inputs.split(2), kept.grad.split(2), strict=True):
        model(chunk).backward(gradient)
    got, expected = ([p.grad for p in each.parameters()] for each in (model, plain))
    assert_close(got, expected, TOLERANCE[policy])


def product(decorated):
    forward_decorator, backward_decorator = decorated

    class Product(torch.autograd.Function):
        @staticmethod
        @forward_decorator
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @backward_decorator
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            return gradient @ b.T, a.T @ gradient

    return Product


def identity(function):
    return function


DECORATORS = {
    "ours": (custom_fwd(device_type="cpu"), custom_bwd(device_type="cpu")),
    "theirs": (
        torch.amp.custom_fwd(device_type="cpu"),
        torch.amp.custom_bwd(device_type="cpu"),
    ),
    "ours, in float32": (
        custom_fwd(device_type="cpu", cast_inputs=torch.float32),
        custom_bwd(device_type="cpu"),
    ),
    "theirs, in float32": (
        torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32),
        torch.amp.custom_bwd(device_type="cpu"),
    ),
}


@pytest.mark.parametrize("decorators", DECORATORS)
def test_functions_of_ones_own(decorators, policy):
    """The backward of a custom function ran outside of autocast and met two dtypes."""
    function = product(DECORATORS[decorators]).apply
    assert_runs_as_in_float32(Of(function), policy, torch.randn(6, 8))


def test_a_function_without_decorators_works_or_the_error_names_them(policy):
    """The error in backward spoke of two matrices, not of what to do."""
    model = Of(product((identity, identity)).apply)
    prepare(model, policy=policy)
    message = "custom_fwd custom_bwd"
    try:
        model(torch.randn(6, 8)).sum().backward()
    except Exception as error:
        message = str(error)
    assert "custom_fwd" in message
    assert "custom_bwd" in message


class Straight(torch.autograd.Function):
    """Needs no decorator: its backward passes on what it gets."""

    @staticmethod
    def forward(ctx, values):
        return values.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_straight_through_estimator(policy):
    def function(hidden, weight):
        return Straight.apply(4 * hidden) @ weight

    torch.manual_seed(2)
    model = Of(function)
    region = copy.deepcopy(model)
    prepare(region, policy=policy)
    values = torch.eye(6, 8)
    got, expected = results(region, values), results(model, values)
    # Rounding may differ in single elements, gradients behind it do not.
    assert_close(got[1:2], expected[1:2], TOLERANCE[policy])


def test_a_function_that_fails_in_backward_leaves_no_scale_behind(policy):
    """An exception in the middle of backward."""

    class Failing(torch.autograd.Function):
        fails = True

        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            if Failing.fails:
                raise KeyError("once")
            return gradient

    model = Of(lambda hidden, weight: Failing.apply(hidden) @ weight)
    plain = copy.deepcopy(model)
    prepare(model, policy=policy)
    with pytest.raises(KeyError):
        model(torch.ones(2, 8)).sum().backward()
    Failing.fails = False
    for each in (model, plain):
        each.zero_grad()
    got, expected = (results(each, torch.ones(2, 8)) for each in (model, plain))
    assert_close(got, expected, TOLERANCE[policy])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rng", [False, True], ids=["", "dropout"])
def test_what_is_computed_again_has_the_dtypes_of_the_first_time(reentrant, rng, policy):
    """Checkpointing recomputed in another dtype."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
            self.dtypes = []

        def forward(self, values):
            hidden = self.layer(self.norm(values))
            self.dtypes.append(hidden.dtype)
            hidden = functional.dropout(hidden, 0.5, rng)
            return values + hidden

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.saving = False

        def forward(self, values):
            for block in self.blocks:
                if self.saving:
                    values = checkpoint(block, values, use_reentrant=reentrant)
                else:
                    values = block(values)
            return values

    model = Net()
    region = copy.deepcopy(model)
    prepare(model, policy=policy)
    prepare(region, policy=policy)
    region.saving = True
    found = []
    for each in (model, region):
        torch.manual_seed(1)
        found.append(results(each, torch.ones(3, 8)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    low = torch.bfloat16 if policy == "mixed_bfloat16" else torch.float16
    assert set(region.blocks[0].dtypes) == {low}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("first", ["compile", "prepare"])
def test_compiled_gradients_are_those_of_eager_mode(first, policy):
    """A part in float32 overflowed, but only when compiled."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mix", torch.ones(4, 4))
            self.out = nn.Linear(4, 1)

        def forward(self, values):
            mixed = values @ self.mix
            with autocast("cpu", enabled=False):
                return self.out(mixed.float())

    torch._dynamo.reset()
    gradients = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Net()
        called = model
        if compiled and first == "compile":
            called = torch.compile(model, backend="aot_eager", fullgraph=SEES_ATTRIBUTES)
        prepare(called, policy=policy)
        if compiled and first == "prepare":
            called = torch.compile(model, backend="aot_eager", fullgraph=SEES_ATTRIBUTES)
        (called(torch.ones(1, 4)) * 16384).sum().backward()
        gradients.append(model.out.weight.grad)
    assert torch.equal(*gradients)
    assert gradients[0].isfinite().all()
    torch._dynamo.reset()


@pytest.mark.parametrize("island", ["autocast", "torch", "region"])
def test_an_island_of_float32(island, policy):
    """What a user put into float32 stays there, with gradients that fit into no half."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, values):
            self.seen = values.dtype
            hidden = self.layer(values.float())
            assert hidden.dtype == torch.float32
            return (hidden * 3e4).square().sum() * 1e-9

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.wide = nn.Linear(4, 4), Wide()

        def forward(self, values):
            hidden = self.first(values)
            if island == "autocast":
                with autocast("cpu", enabled=False):
                    return self.wide(hidden)
            if island == "torch":
                with torch.autocast("cpu", enabled=False):
                    return self.wide(hidden)
            return self.wide(hidden)

    model = Net()
    region = copy.deepcopy(model)
    if island == "region":
        prepare(region.wide, policy="float32")
    prepare(region, policy=policy)
    got, expected = (results(each, torch.ones(2, 4)) for each in (region, model))
    assert_close(got, expected, TOLERANCE[policy])


def test_backward_in_another_thread(policy):
    """Threads of autograd, and of whoever calls backward, used the default dtype."""
    model = Of(lambda hidden, weight: product(DECORATORS["ours"]).apply(hidden, weight))
    plain = copy.deepcopy(model)
    prepare(model, policy=policy)
    for each in (model, plain):
        loss = weighted_sum(each(torch.ones(2, 8)))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    got, expected = ([p.grad for p in each.parameters()] for each in (model, plain))
    assert_close(got, expected, TOLERANCE[policy])


def test_a_forward_in_another_thread_is_in_the_region(policy):
    """Autocast is of one thread: in others, such as those of DataParallel, it was off."""
    model, seen = Of(lambda hidden, weight: hidden @ weight), []
    prepare(model, policy=policy)
    model.layer.register_forward_hook(lambda *them: seen.append(torch.is_autocast_enabled("cpu")))
    outputs = []
    thread = threading.Thread(target=lambda: outputs.append(model(torch.ones(2, 8))))
    thread.start()
    thread.join()
    assert outputs[0].dtype == torch.float32
    assert seen == [True]
    assert not torch.is_autocast_enabled("cpu")


def test_several_threads_train_models_of_their_own(policy):
    """Each thread has a model, an optimizer and a region."""

    def train(results, place):
        generator = torch.Generator().manual_seed(place)
        model = models[place]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        prepare(model, optimizer, policy)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
        results[place] = [parameter.detach() for parameter in model.parameters()]

    start = [Of(lambda hidden, weight: hidden @ weight) for _ in range(4)]
    models, together, alone = copy.deepcopy(start), {}, {}
    threads = [threading.Thread(target=train, args=(together, place)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    models = copy.deepcopy(start)
    for place in range(4):
        train(alone, place)
    for place in range(4):
        for one, other in zip(together[place], alone[place], strict=True):
            assert torch.equal(one, other)


def test_the_effective_dtype_is_told(policy):
    """autocast('cpu') meant bfloat16 and nobody knew; evaluation was still in half afterwards."""
    model = nn.Linear(4, 4)
    region = prepare(model, policy=policy)
    assert region.policy.compute_dtype in repr(region) + str(region.policy)
    with torch.no_grad():
        low = model.eval()(torch.ones(1, 4))
    region.remove()
    with torch.no_grad():
        wide = model(torch.ones(1, 4))
    assert low.dtype == wide.dtype == torch.float32
    assert not torch.equal(low, wide)
    assert not torch.is_autocast_enabled("cpu")


def test_a_norm_keeps_half_in_half_out(policy):
    """Norms in float32 doubled what is kept for backward."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, values):
            hidden = self.norm(self.layer(values))
            self.dtype = hidden.dtype
            return hidden

    model = Net()
    prepare(model, policy=policy)
    model(torch.ones(2, 8))
    low = torch.bfloat16 if policy == "mixed_bfloat16" else torch.float16
    assert model.dtype == low


@pytest.mark.parametrize("rotary", [False, True])
def test_queries_that_became_float32_meet_half_values(rotary, policy):
    """After a norm or a rotation in float32, attention refused queries with half values."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

        def forward(self, values):
            query, key, value = self.mix(values).chunk(3, -1)
            if rotary:
                angle = torch.arange(5.0)[:, None] * torch.ones(8)
                turn = torch.cat([-query[..., 4:], query[..., :4]], -1)
                query = query * angle.cos() + turn * angle.sin()
            else:
                query, key = self.norm(query).float(), self.norm(key).float()
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    assert_runs_as_in_float32(Attention(), policy, torch.randn(2, 5, 8))


def test_integers_and_masks_pass_as_they_are(policy):
    """Token ids above 256 were rounded in bfloat16."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(2000, 4)

        def forward(self, ids, mask):
            assert ids.dtype == torch.int64
            assert mask.dtype == torch.bool
            return self.embed(ids + 1), ids + 1, mask

    model = Net()
    prepare(model, policy=policy)
    values, ids, mask = model(torch.tensor([1001]), torch.tensor([True]))
    assert ids.tolist() == [1002]
    assert mask.dtype == torch.bool
    assert torch.allclose(values, model.embed.weight[1002:1003], rtol=0.01)


def test_whole_numbers_times_half_stay_exact_outside(policy):
    """Positions times half frequencies lost the last bits: outside of a region nothing is half."""
    model = nn.Linear(1, 1)
    prepare(model, policy=policy)
    output = model(torch.zeros(1, 1))
    assert (output * 0 + torch.arange(2000)).tolist()[0][-1] == 1999.0


def test_losses_outside_are_float32(policy):
    """Losses of half predictions and float32 targets, and 1 - 1e-6, which is 1 in half."""
    model = nn.Linear(4, 3)
    plain = copy.deepcopy(model)
    prepare(model, policy=policy)

    def loss_of(each):
        probability = each(torch.ones(2, 4)).sigmoid().clamp(1e-6, 1 - 1e-6)
        assert probability.dtype == torch.float32
        focal = -((1 - probability) ** 2 * probability.log()).mean()
        target = torch.ones(2, 3)
        return (
            focal
            + functional.binary_cross_entropy(probability, target)
            + functional.mse_loss(probability.double(), target.double()).float()
        )

    for each in (model, plain):
        loss_of(each).backward()
    got, expected = ([p.grad for p in each.parameters()] for each in (model, plain))
    assert_close(got, expected, TOLERANCE[policy])


@pytest.mark.parametrize("saved", ["state_dict", "pickle"])
def test_a_checkpoint_is_float32(saved, policy, tmp_path):
    """Checkpoints of half weights, that no longer loaded into the float32 model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    prepare(model, policy=policy)
    model(torch.randn(3, 4)).sum().backward()
    path = tmp_path / "model.pt"
    if saved == "pickle":
        torch.save(model, path)
        state = torch.load(path, weights_only=False).state_dict()
    else:
        torch.save(model.state_dict(), path)
        state = torch.load(path)
    floats = {value.dtype for value in state.values() if value.is_floating_point()}
    assert floats == {torch.float32}
    nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).load_state_dict(state)
