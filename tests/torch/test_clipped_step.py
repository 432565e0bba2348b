"""`GradScaler.step(max_norm=)` against `unscale_`, PyTorch's clipping and `step`."""

import copy
import functools
import math
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from halfstep.errors import ScalerStateError, UsageError
from halfstep.torch import GradScaler
from halfstep.torch._scaling import _clipped_step, _one_pass

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd-fused": functools.partial(torch.optim.SGD, lr=0.1, fused=True),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "momentum-fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam-plain": functools.partial(torch.optim.Adam, lr=0.1, foreach=False),
    "adam-foreach": functools.partial(torch.optim.Adam, lr=0.1, foreach=True),
    "adamw-fused": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "adagrad-fused": functools.partial(torch.optim.Adagrad, lr=0.1, fused=True),
}
SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=4)


class Loop:
    """Parameters whose gradients are given, in any number of parts."""

    def __init__(self, kind, shapes, scale=8.0, enabled=True):
        torch.manual_seed(0)
        named = [(f"p{i}", nn.Parameter(torch.randn(shape))) for i, shape in enumerate(shapes)]
        self.parameters = [parameter for _, parameter in named]
        self.optimizer = OPTIMIZERS[kind](named)
        self.scaler = GradScaler("cpu", init_scale=scale, enabled=enabled)

    def backward(self, parts):
        self.optimizer.zero_grad()
        for part in parts:
            products = zip(self.parameters, part, strict=True)
            self.scaler.scale(sum((p * g).sum() for p, g in products)).backward()

    def step(self, parts, max_norm, **options):
        self.backward(parts)
        self.scaler.step(self.optimizer, max_norm=max_norm, **options)
        self.scaler.update()

    def reference(self, parts, max_norm):
        self.backward(parts)
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.parameters, max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm.item()

    @property
    def gradients(self):
        return [parameter.grad for parameter in self.parameters]

    def state(self):
        return copy.deepcopy([self.parameters, self.optimizer.state_dict()["state"]])


def parts_of(shapes, seed, count=1):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(count)]


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    shapes=SHAPES,
    scale=st.sampled_from([2.0**-10, 0.75, 1.0, 8.0, 1000.0, 65536.0, 2.0**40]),
    max_norm=st.sampled_from([1e-3, 0.5, 2.0, 1e4, math.inf]),
    count=st.integers(1, 3),
    bad=st.sampled_from([None, None, math.inf, -math.inf, math.nan]),
    seed=st.integers(0, 100),
)
def test_it_equals_the_three_calls(kind, shapes, scale, max_norm, count, bad, seed):
    ours, theirs = Loop(kind, shapes, scale), Loop(kind, shapes, scale)
    exact = math.log2(scale).is_integer()
    for step in range(3):
        parts = parts_of(shapes, seed + step, count)
        if bad is not None and step == 1:
            parts[-1][-1].view(-1)[0] = bad
        before = ours.state()
        ours.step(parts, max_norm)
        norm = theirs.reference(parts, max_norm)
        record = ours.scaler.last_step
        assert record.skipped == theirs.scaler.last_step.skipped == (bad is not None and step == 1)
        assert ours.scaler.state_dict() == theirs.scaler.state_dict()
        if record.skipped:
            assert_same(ours.state(), before)
            assert record.nonfinite == ((f"p{len(shapes) - 1}", "nan" if bad != bad else "inf"),)
            continue
        exact &= norm + 1e-6 <= max_norm
        assert math.isclose(record.grad_norm, norm, rel_tol=1e-6)
        torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=6e-7, atol=1e-38)
        if exact:
            assert record.grad_norm == norm
            assert_same(ours.gradients, theirs.gradients)
            assert_same(ours.state(), theirs.state())
        else:
            torch.testing.assert_close(ours.parameters, theirs.parameters, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("max_norm", [0.5, 1e4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_are_read_once_and_multiplied_at_most_once(kind, max_norm):
    loop, parts = Loop(kind, [(3, 2), (4,)]), parts_of([(3, 2), (4,)], 0)
    loop.backward(parts)
    versions = [gradient._version for gradient in loop.gradients]
    norm_of = mock.Mock(side_effect=_one_pass.norm_of)
    with (
        mock.patch.object(_clipped_step, "norm_of", norm_of),
        mock.patch.object(torch, "_amp_foreach_non_finite_check_and_unscale_", side_effect=OSError),
    ):
        loop.scaler.step(loop.optimizer, max_norm=max_norm)
    norm_of.assert_called_once()
    written = [gradient._version for gradient in loop.gradients]
    # Adagrad's kernel does not divide in every PyTorch.
    divides = getattr(loop.optimizer, "_step_supports_amp_scaling", False)
    assert written == [each + (not divides) for each in versions]


@pytest.mark.parametrize("kind", ["sgd", "adamw-fused"])
def test_gradients_that_are_unscaled_already_are_clipped(kind):
    ours, theirs = Loop(kind, [(3,), (2,)]), Loop(kind, [(3,), (2,)])
    parts = parts_of([(3,), (2,)], 1)
    ours.backward(parts)
    ours.scaler.unscale_(ours.optimizer)
    ours.scaler.step(ours.optimizer, max_norm=0.5)
    ours.scaler.update()
    norm = theirs.reference(parts, 0.5)
    assert ours.scaler.last_step.grad_norm == norm
    assert_same(ours.state(), theirs.state())


@pytest.mark.parametrize("kind", ["sgd", "adamw-fused"])
def test_a_number_that_breaks_after_unscaling_skips(kind):
    loop = Loop(kind, [(3,), (2,)])
    loop.backward(parts_of([(3,), (2,)], 1))
    loop.scaler.unscale_(loop.optimizer)
    loop.parameters[0].grad[1] = math.nan
    before = loop.state()
    loop.scaler.step(loop.optimizer, max_norm=0.5)
    assert loop.scaler.last_step.skipped
    assert loop.scaler.last_step.reason == "a gradient became non-finite after unscale_()"
    assert_same(loop.state(), before)


@pytest.mark.parametrize("size", [1e20, 3e38])
@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0**-16])
@pytest.mark.parametrize("kind", ["sgd", "adamw-fused"])
def test_a_sum_of_squares_that_overflows_is_no_overflow(kind, scale, size):
    true = size if scale == 1.0 else size * scale
    loop, before = Loop(kind, [(4,)], scale), Loop(kind, [(4,)], scale).state()
    loop.step([[torch.full((4,), true / 2)]], 1.0)
    record = loop.scaler.last_step
    assert not record.skipped
    assert math.isclose(record.grad_norm, true, rel_tol=1e-6)
    assert torch.allclose(loop.gradients[0], torch.tensor(0.5))
    assert not torch.equal(loop.parameters[0], before[0][0])


@pytest.mark.parametrize("kind", ["sgd", "adamw-fused"])
def test_unscaling_that_overflows_skips(kind):
    loop = Loop(kind, [(4,)], 2.0**-16)
    before = loop.state()
    loop.backward([[torch.ones(4)]])
    loop.parameters[0].grad.fill_(1e38)
    loop.scaler.step(loop.optimizer, max_norm=1.0)
    assert loop.scaler.last_step.nonfinite == (("p0", "inf"),)
    assert_same(loop.state(), before)


def test_what_no_kernel_can_divide_by_is_multiplied():
    loop = Loop("adamw-fused", [(4,)], 2.0**100)
    loop.step([[torch.full((4,), 2.0**20)]], 2.0**-20)
    assert torch.allclose(loop.gradients[0], torch.tensor(2.0**-21))


@pytest.mark.parametrize("kind", ["sgd", "adam-foreach", "adamw-fused"])
@pytest.mark.parametrize("value", [1e-4, 900.0, math.inf])
def test_float16_parameters_are_measured_in_float32(kind, value):
    loops = [Loop(kind, [(16,), (2,)], 1024.0) for _ in range(2)]
    for loop in loops:
        loop.parameters[0].data = loop.parameters[0].data.half()
    parts = [[torch.full((16,), 1.0), torch.ones(2)]]
    for loop, call in zip(loops, (Loop.step, Loop.reference), strict=True):
        loop.backward(parts)
        with mock.patch.object(loop, "backward"):
            loop.parameters[0].grad.fill_(value * 60.0)
            call(loop, parts, 1.0)
    ours, theirs = loops
    assert ours.scaler.last_step.skipped == theirs.scaler.last_step.skipped == math.isinf(value)
    assert ours.gradients[0].dtype is torch.float16
    if not ours.scaler.last_step.skipped:
        assert math.isclose(
            ours.scaler.last_step.grad_norm, math.hypot(4 * value * 60 / 1024, 2**0.5), rel_tol=1e-3
        )
        torch.testing.assert_close(ours.gradients, theirs.gradients)
    torch.testing.assert_close(ours.parameters, theirs.parameters)


@pytest.mark.parametrize("kind", ["sgd", "adamw-fused"])
def test_float64_gradients_are_clipped_in_float64(kind):
    loops = [Loop(kind, [(3,)]) for _ in range(2)]
    for loop in loops:
        loop.parameters[0].data = loop.parameters[0].data.double()
    parts = [[torch.rand(3, dtype=torch.float64) + 1e-12]]
    loops[0].step(parts, 0.1)
    loops[1].reference(parts, 0.1)
    torch.testing.assert_close(*[loop.gradients for loop in loops], rtol=1e-12, atol=0)


def test_sparse_gradients_are_clipped():
    table = nn.Embedding(5, 2, sparse=True)
    optimizer, scaler = torch.optim.SGD(table.parameters(), lr=1.0), GradScaler("cpu")
    before = table.weight.detach().clone()
    scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.step(optimizer, max_norm=1.0)
    norm = math.sqrt(2 * 4 + 2 * 1)
    assert math.isclose(scaler.last_step.grad_norm, norm, rel_tol=1e-6)
    assert torch.allclose(before - table.weight, torch.tensor([0, 2, 0, 1, 0])[:, None] / norm)


@pytest.mark.parametrize("kind", ["sgd", "adamw-fused"])
def test_no_gradients_are_skipped(kind):
    loop = Loop(kind, [(2,)])
    loop.scaler.scale(torch.ones(()))
    loop.scaler.step(loop.optimizer, max_norm=1.0)
    record = loop.scaler.last_step
    assert (record.skipped, record.reason, record.grad_norm) == (True, "no gradients", None)


@pytest.mark.parametrize("kind", ["sgd", "adamw-fused"])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_a_disabled_scaler_clips(kind, max_norm):
    ours, theirs = Loop(kind, [(3,), (2,)], enabled=False), Loop(kind, [(3,), (2,)], enabled=False)
    parts = parts_of([(3,), (2,)], 1)
    ours.step(parts, max_norm)
    norm = theirs.reference(parts, max_norm)
    assert ours.scaler.last_step.grad_norm == norm
    torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=6e-7, atol=0)
    assert not hasattr(ours.optimizer, "grad_scale")


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", ["sgd", "adamw-fused"])
def test_each_evaluation_of_a_closure_is_clipped(kind, enabled):
    ours, theirs = Loop(kind, [(3,), (2,)], enabled=enabled), Loop(kind, [(3,), (2,)])
    parts = parts_of([(3,), (2,)], 1)
    norm = theirs.reference(parts, 0.5)
    ours.scaler.step(ours.optimizer, lambda: ours.backward(parts), max_norm=0.5)
    assert ours.scaler.last_step.grad_norm == norm
    assert_same(ours.gradients, theirs.gradients)
    assert_same(ours.parameters, theirs.parameters)


def test_lbfgs_sees_clipped_gradients():
    parameter, scaler = nn.Parameter(torch.ones(2)), GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.LBFGS([parameter], lr=1.0, max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = (parameter * torch.tensor([3.0, 4.0])).sum()
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure, max_norm=0.5)
    scaler.update()
    assert torch.allclose(parameter.grad, torch.tensor([0.3, 0.4]))
    assert scaler.last_step.grad_norm == 5.0


@pytest.mark.parametrize("kind", ["sgd", "adamw-fused"])
def test_scaled_gradients_that_were_clipped_before_are_refused(kind):
    loop = Loop(kind, [(3,)])
    loop.backward(parts_of([(3,)], 1))
    nn.utils.clip_grad_norm_(loop.parameters, 0.5)
    with pytest.raises(ScalerStateError, match="needs unscaled gradients for clipping"):
        loop.scaler.step(loop.optimizer, max_norm=0.5)


def test_the_norm_is_that_of_the_step_alone():
    loop = Loop("sgd", [(3,)])
    loop.step(parts_of([(3,)], 1), 0.5)
    assert loop.scaler.last_step.grad_norm is not None
    loop.step(parts_of([(3,)], 1), None)
    assert loop.scaler.last_step.grad_norm is None


def test_a_limit_that_makes_no_sense_is_refused():
    loop = Loop("sgd", [(3,)])
    loop.backward(parts_of([(3,)], 1))
    with pytest.raises(UsageError, match=r"GradScaler.step\(\) needs max_norm > 0, got -1"):
        loop.scaler.step(loop.optimizer, max_norm=-1)


class Old(torch.optim.SGD):
    """The older protocol, in which the optimizer calls the scaler."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        return super().step(closure)


def test_the_older_protocol_is_refused():
    parameter, scaler = nn.Parameter(torch.ones(2)), GradScaler("cpu")
    optimizer = Old([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(UsageError, match="got Old, whose step"):
        scaler.step(optimizer, max_norm=1.0)
