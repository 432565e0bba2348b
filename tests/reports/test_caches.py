"""Copies of weights that are kept for the rest of a region."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from halfstep.torch import autocast

CACHED = pytest.mark.parametrize("cached", [None, True, False])


class Once(nn.Module):
    """A layer, or a cell whose low weights are remembered by default."""

    def __init__(self, kind):
        super().__init__()
        self.inner = {"linear": nn.Linear, "conv": _conv, "cell": nn.GRUCell}[kind](4, 4)

    def forward(self, x):
        return self.inner(x)


def _conv(inputs, outputs):
    return nn.Sequential(nn.Unflatten(1, (inputs, 1)), nn.Conv1d(inputs, outputs, 1), nn.Flatten())


KINDS = pytest.mark.parametrize("kind", ["linear", "conv", "cell"])


def _weights(model):
    return list(model.parameters())


@KINDS
@CACHED
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_weights_get_gradients_after_a_pass_without(kind, cached, mode, low):
    """Weights get no gradient after a no_grad pass in the same region (self-conditioning)."""
    model, inputs = Once(kind), torch.randn(3, 4)
    with autocast("cpu", dtype=low, cache_enabled=cached):
        with mode():
            model(inputs)
        model(inputs).sum().backward()
    assert all(weight.grad is not None for weight in _weights(model))


@KINDS
@CACHED
def test_a_pass_without_gradients_after_one_with_has_no_history(kind, cached, low):
    """A validation pass in the region of a training pass does not grow a graph."""
    model, inputs = Once(kind), torch.randn(3, 4)
    with autocast("cpu", dtype=low, cache_enabled=cached):
        model(inputs)
        with torch.no_grad():
            assert not model(inputs).requires_grad
        assert model(inputs).requires_grad


def _step(model):
    with torch.no_grad():
        for weight in _weights(model):
            weight.zero_()


def _data(model):
    for weight in _weights(model):
        weight.data.zero_()


def _data_assigned(model):
    for weight in _weights(model):
        weight.data = torch.zeros_like(weight)


def _clipped(model):
    for weight in _weights(model):
        weight.data.clamp_(0, 0)


def _detached(model):
    for weight in _weights(model):
        weight.detach().zero_()


def _loaded(model):
    model.load_state_dict({name: value * 0 for name, value in model.state_dict().items()})


def _optimizer(model):
    for weight in _weights(model):
        weight.grad = weight.detach().clone()
    torch.optim.SGD(_weights(model), lr=1.0).step()


def _foreach(model):
    torch._foreach_zero_([weight.detach() for weight in _weights(model)])


def _from_vector(model):
    count = sum(weight.numel() for weight in _weights(model))
    nn.utils.vector_to_parameters(torch.zeros(count), _weights(model))


WRITES = [
    _step,
    _data,
    _data_assigned,
    _clipped,
    _detached,
    _loaded,
    _optimizer,
    _foreach,
    _from_vector,
]


# A write through `.data` leaves the version of the weight alone; who asks for a cache is told so.
SEEN = [
    (cached, write)
    for cached in (None, True, False)
    for write in WRITES
    if not (cached and write in (_data, _clipped))
]


@KINDS
@pytest.mark.parametrize(("cached", "write"), SEEN)
def test_a_changed_weight_is_used_at_once(kind, cached, write, low):
    """A loop inside one region trains on the weights of its first step: the loss does not move."""
    model, inputs = Once(kind), torch.randn(3, 4)
    with autocast("cpu", dtype=low, cache_enabled=cached):
        model(inputs)
        write(model)
        assert model(inputs).abs().sum() == 0


@CACHED
def test_weights_clipped_through_data_are_used_in_the_next_step(cached, low):
    """A Wasserstein critic clips weight.data after each step, inside the region of the epoch."""
    critic = nn.LSTMCell(4, 4)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    with autocast("cpu", dtype=low, cache_enabled=cached):
        for _ in range(3):
            optimizer.zero_grad()
            critic(torch.randn(3, 4))[0].sum().backward()
            optimizer.step()
            for weight in critic.parameters():
                weight.data.clamp_(-0.01, 0.01)
            inputs = torch.randn(3, 4)
            inside = critic(inputs)[0]
            with autocast("cpu", enabled=False):
                wide = critic(inputs)[0]
            assert torch.allclose(inside.float(), wide, atol=1e-3)


def _losses(one_region, cached, low):
    torch.manual_seed(0)
    model, inputs, targets = Once("cell"), torch.randn(8, 4), torch.randn(8, 4)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.05), []
    outer = autocast("cpu", dtype=low, enabled=one_region, cache_enabled=cached)
    with outer:
        for _ in range(20):
            optimizer.zero_grad()
            with autocast("cpu", dtype=low, cache_enabled=cached):
                loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@CACHED
def test_a_loop_inside_one_region_trains_like_one_region_per_step(cached, low):
    """The whole training loop sits inside one with-block, and the loss stays where it was."""
    assert _losses(True, cached, low) == pytest.approx(_losses(False, cached, low), rel=1e-2)


@CACHED
def test_backward_can_run_again_and_again_in_one_region(cached, low):
    """Trying to backward through the graph a second time, from a cast shared by two losses."""
    model, inputs = Once("cell"), torch.randn(3, 4)
    with autocast("cpu", dtype=low, cache_enabled=cached):
        for _ in range(3):
            model(inputs).sum().backward()
        twice = model(model(inputs)).sum()
        twice.backward(retain_graph=True)
        twice.backward()
        first, second = model(inputs).sum(), model(inputs * 2).sum()
        first.backward()
        second.backward()


@CACHED
def test_gradient_cache_recomputes_chunk_by_chunk(cached, low):
    """GradCache: a pass without gradients for all, then one with gradients for each chunk."""
    model, inputs = Once("linear"), torch.randn(6, 4)
    with autocast("cpu", dtype=low, cache_enabled=cached):
        with torch.no_grad():
            every = torch.cat([model(chunk) for chunk in inputs.chunk(3)])
        wanted = every.float().requires_grad_()
        wanted.pow(2).sum().backward()
        for chunk, gradient in zip(inputs.chunk(3), wanted.grad.chunk(3), strict=True):
            (model(chunk).float() * gradient).sum().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in _weights(model))


@pytest.mark.parametrize("cached", [None, False])
def test_an_average_of_weights_follows_inside_the_region(cached, low):
    """An EMA model that is evaluated in the region of the training step gives its first outputs."""
    model, inputs = Once("cell"), torch.randn(3, 4)
    average = copy.deepcopy(model)
    with autocast("cpu", dtype=low, cache_enabled=cached):
        for _ in range(2):
            _optimizer(model)
            average(inputs)
            for slow, fast in zip(_weights(average), _weights(model), strict=True):
                slow.data.copy_(fast.data)
            assert torch.equal(average(inputs), model(inputs))


@KINDS
@CACHED
def test_nothing_is_kept_after_the_region(kind, cached, low):
    """Memory grows from epoch to epoch: the copies of weights are not given back."""
    model = Once(kind)
    kept = weakref.ref(_weights(model)[0])
    with autocast("cpu", dtype=low, cache_enabled=cached):
        outputs = model(torch.randn(3, 4))
    del model, outputs
    gc.collect()
    assert kept() is None


@KINDS
@pytest.mark.parametrize("cached", [None, False])
def test_models_made_in_one_long_region_are_freed(kind, cached, low):
    """A search over models inside one region runs out of memory."""
    with autocast("cpu", dtype=low, cache_enabled=cached):
        model = Once(kind)
        kept = weakref.ref(_weights(model)[0])
        model(torch.randn(3, 4)).sum().backward()
        del model
        gc.collect()
        assert kept() is None


@CACHED
def test_activations_are_freed_inside_the_region(cached, low):
    """Activations of one step are still there in the next one of the same region."""
    model = Once("cell")
    with autocast("cpu", dtype=low, cache_enabled=cached):
        outputs = model(torch.randn(3, 4))
        kept = weakref.ref(outputs)
        outputs.sum().backward()
        del outputs
        gc.collect()
        assert kept() is None


@CACHED
@pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_weights_train(cached, wrap, low):
    """weight_norm and spectral_norm recompute the weight in each call."""
    layer = getattr(nn.utils.parametrizations, wrap)(nn.Linear(4, 4))
    with autocast("cpu", dtype=low, cache_enabled=cached):
        for _ in range(2):
            outputs = layer(torch.randn(3, 4))
            outputs.float().sum().backward()
    assert outputs.dtype == low
    assert all(weight.grad is not None for weight in layer.parameters())
