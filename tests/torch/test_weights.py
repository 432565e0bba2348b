import gc
import weakref

import pytest
import torch
from torch import nn

from halfstep.torch import autocast
from halfstep.torch._engine._weights import WeightCache

LOW = torch.bfloat16
BOTH = pytest.mark.parametrize("cached", [False, True])


def test_a_weight_is_cast_once_until_it_changes():
    cache, weight = WeightCache(), nn.Parameter(torch.ones(2))
    first = cache.cast(weight, LOW)
    assert cache.cast(weight, LOW) is first
    with torch.no_grad():
        weight.add_(1)
    second = cache.cast(weight, LOW)
    assert second is not first
    assert second.tolist() == [2.0, 2.0]


def test_replaced_data_is_noticed():
    cache, weight = WeightCache(), nn.Parameter(torch.ones(2))
    cache.cast(weight, LOW)
    weight.data = torch.full((2,), 3.0)
    assert cache.cast(weight, LOW).tolist() == [3.0, 3.0]


def test_casts_with_and_without_a_gradient_history_are_kept_apart():
    cache, weight = WeightCache(), nn.Parameter(torch.ones(2))
    with torch.no_grad():
        assert not cache.cast(weight, LOW).requires_grad
    assert cache.cast(weight, LOW).requires_grad


def test_what_is_no_weight_is_not_remembered():
    cache = WeightCache()
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    for tensor in (torch.ones(2), torch.ones(2, requires_grad=True), frozen):
        cache.cast(tensor, LOW)
    assert len(cache) == 0


def test_a_weight_that_dies_is_forgotten():
    cache, weight = WeightCache(), nn.Parameter(torch.ones(2))
    with torch.no_grad():
        cache.cast(weight, LOW)
    del weight
    gc.collect()
    assert len(cache) == 0


@BOTH
def test_a_training_loop_inside_one_region_trains(cached):
    def final(one_region):
        torch.manual_seed(0)
        layer, inputs, targets = nn.Linear(4, 4), torch.randn(8, 4), torch.randn(8, 4)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        outer, inner = autocast("cpu", enabled=one_region), autocast("cpu", cache_enabled=cached)
        outer = autocast("cpu", cache_enabled=cached) if one_region else outer
        with outer:
            for _ in range(20):
                optimizer.zero_grad()
                with inner:
                    loss = nn.functional.mse_loss(layer(inputs), targets)
                loss.backward()
                optimizer.step()
        return loss.item()

    assert final(True) == pytest.approx(final(False), abs=0.02)


@BOTH
def test_gradients_survive_a_pass_without_them(cached):
    layer = nn.Linear(2, 2)
    with autocast("cpu", cache_enabled=cached):
        with torch.no_grad():
            layer(torch.ones(1, 2))
        with torch.inference_mode():
            layer(torch.ones(1, 2))
        layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@BOTH
def test_tied_weights_get_the_sum_of_both_gradients(cached):
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    inputs = torch.randn(3, 4)

    def gradient(region):
        first.weight.grad = None
        with region:
            outputs = second(first(inputs))
        outputs.float().sum().backward()
        return first.weight.grad

    low = gradient(autocast("cpu", dtype=torch.float16, cache_enabled=cached))
    torch.testing.assert_close(low, gradient(autocast("cpu", enabled=False)), rtol=0.01, atol=0.01)


def test_a_loop_over_time_steps_keeps_one_copy_when_asked():
    cell, inputs = nn.Linear(64, 64, bias=False), torch.randn(1, 64)

    def copies(cached):
        kept = []
        pack = lambda tensor: kept.append(tensor.data_ptr()) or tensor  # noqa: E731
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, autocast("cpu", cache_enabled=cached):
            hidden = inputs
            for _ in range(8):
                hidden = cell(hidden)
        return len(set(kept))

    assert copies(True) < copies(False)


def test_recurrent_cells_keep_one_copy_when_asked():
    cell, inputs = nn.LSTMCell(8, 8), torch.ones(1, 8)

    def casts(cached):
        with autocast("cpu", cache_enabled=cached).explain() as explanation:
            hidden = cell(inputs)
            for _ in range(3):
                hidden = cell(inputs, hidden)
        return explanation.casts

    assert casts(False) - casts(True) == 3 * 4


def test_nothing_is_kept_after_the_region():
    layer = nn.Linear(4, 4)
    with autocast("cpu", cache_enabled=True):
        outputs = layer(torch.ones(1, 4))
        kept = weakref.ref(outputs)
    weight = weakref.ref(layer.weight)
    del outputs, layer
    gc.collect()
    assert (kept(), weight()) == (None, None)
