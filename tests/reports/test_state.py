"""Entering, leaving, nesting and defaults."""

import asyncio
import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from halfstep.torch import autocast


def _product():
    return nn.Linear(2, 2)(torch.ones(1, 2)).dtype


def _exponential():
    return torch.ones(2).half().exp().dtype


def _is_outside():
    return (_product(), _exponential()) == (torch.float32, torch.float16)


def test_the_default_dtype_is_said():
    """Nobody knew that autocast means bfloat16 on a CPU and float16 on a GPU."""
    region = autocast("cpu")
    assert region.fast_dtype == torch.bfloat16
    assert "bfloat16" in repr(region)
    with region:
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")


def test_a_changed_default_dtype_counts():
    """torch.set_autocast_dtype sets what a region without dtype= computes in."""
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert autocast("cpu").fast_dtype == torch.float16
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "float16", torch.float8_e4m3fn])
def test_a_dtype_that_does_not_work_is_an_error(dtype):
    """Autocast with an unsupported dtype was switched off with a warning nobody read."""
    with pytest.raises(ValueError, match="dtype"):
        autocast("cpu", dtype=dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_an_error():
    """autocast('cuda') on a machine without CUDA trained in float32 in silence."""
    with pytest.raises(ValueError, match="PyTorch sees none"):
        autocast("cuda")


def test_validation_outside_of_the_region_is_in_float32(low):
    """Validation still ran in half after an exception in the training step."""
    with pytest.raises(KeyError), autocast("cpu", dtype=low), autocast("cpu", dtype=low):
        raise KeyError
    assert _is_outside()


def test_recursion_of_a_decorated_function(low):
    """A recursive decorated function leaves autocast switched on."""

    @autocast("cpu", dtype=low)
    def run(depth):
        assert _product() == low
        return run(depth - 1) if depth else _product()

    assert run(3) == low
    assert _is_outside()


def test_one_instance_in_itself(low):
    """with region: with region: leaves autocast switched on."""
    region = autocast("cpu", dtype=low)
    with region:
        with region:
            pass
        assert _product() == low
    assert _is_outside()


def test_methods_are_decorated(low):
    """The decorator on methods, static methods and class methods."""

    class Model:
        @autocast("cpu", dtype=low)
        def method(self):
            return _product()

        @staticmethod
        @autocast("cpu", dtype=low)
        def static():
            return _product()

        @classmethod
        @autocast("cpu", dtype=low)
        def of_class(cls):
            return _product()

    assert Model().method() == Model.static() == Model.of_class() == low


def test_a_decorated_generator_runs_in_the_region_or_is_refused(low):
    """The decorator on a generator function does nothing, since the body runs later."""
    try:

        @autocast("cpu", dtype=low)
        def produce():
            yield _product()
            yield _product()

    except ValueError:
        return
    generator = produce()
    seen = [next(generator)]
    assert _is_outside()
    assert [*seen, *generator] == [low, low]


def test_a_decorated_coroutine_runs_in_the_region_or_is_refused(low):
    """The decorator on an async function does nothing, since the body runs later."""
    try:

        @autocast("cpu", dtype=low)
        async def serve():
            await asyncio.sleep(0)
            return _product()

    except ValueError:
        return
    assert asyncio.run(serve()) == low
    assert _is_outside()


def test_a_generator_that_is_dropped_inside_a_region(low):
    """A generator with a region in it is never finished."""

    def produce():
        with autocast("cpu", dtype=low):
            yield 1

    generator = produce()
    next(generator)
    del generator
    gc.collect()
    assert _is_outside()


def test_copies_of_a_region_work(low):
    """A trainer that holds a region is pickled for another process."""
    region = autocast("cpu", dtype=low, rules="halfstep-1 + softmax=full")
    with region:
        copies = [pickle.loads(pickle.dumps(region)), copy.deepcopy(region), copy.copy(region)]
    for one in copies:
        with one:
            assert torch.ones(2).to(low).softmax(0).dtype == torch.float32
    assert _is_outside()


def test_plain_autocast_inside_and_outside(low):
    """Regions of both kinds in each other restore what was before."""
    other = torch.float16 if low is torch.bfloat16 else torch.bfloat16
    with torch.autocast("cpu", dtype=other):
        with autocast("cpu", dtype=low):
            assert (_product(), _exponential()) == (low, torch.float32)
            with torch.autocast("cpu", dtype=other):
                assert _product() == other
            assert _product() == low
            with torch.autocast("cpu", enabled=False):
                assert _is_outside()
            with torch.autocast("cuda", dtype=torch.float16, enabled=False):
                assert _product() == low
            assert (_product(), _exponential()) == (low, torch.float32)
        assert (_product(), _exponential()) == (other, torch.float16)
    assert _is_outside()


def test_islands_in_islands(low):
    """enabled=False inside a region, and a region inside of that."""
    with autocast("cpu", dtype=low):
        with autocast("cpu", enabled=False):
            assert _is_outside()
            with autocast("cpu", dtype=low):
                assert _product() == low
            assert _is_outside()
        assert _product() == low
    assert _is_outside()


def test_the_state_of_pytorch_is_restored(low):
    """Flags of PyTorch that a region sets are as before when it ends."""
    devices = torch._C._autocast_supported_devices()

    def state():
        return [
            torch.is_autocast_cache_enabled(),
            *(torch.is_autocast_enabled(device) for device in devices),
            *(torch.get_autocast_dtype(device) for device in devices),
        ]

    before = state()
    with autocast("cpu", dtype=low), autocast("cpu", dtype=low, cache_enabled=True):
        _product()
    assert state() == before


def test_integers_and_float64_are_never_cast(low):
    """Token ids and times in float64 pass through a region as they are."""
    with autocast("cpu", dtype=low):
        assert torch.arange(3).sum().dtype == torch.int64
        assert (torch.arange(4).view(2, 2) @ torch.arange(4).view(2, 2)).dtype == torch.int64
        assert torch.ones(2, dtype=torch.float64).exp().dtype == torch.float64


def test_inference_before_training_in_one_region(low):
    """inference_mode and then training in the same region."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    with autocast("cpu", dtype=low):
        with torch.inference_mode():
            model(torch.ones(1, 2))
        model(torch.ones(1, 2)).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
