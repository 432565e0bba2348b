"""`Region.clip_grad_norm_` against `torch.nn.utils.clip_grad_norm_`."""

import copy
import gc
import math
import weakref
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from halfstep.errors import NonFiniteError, ScalerStateError, UsageError
from halfstep.torch import GradScaler, prepare
from halfstep.torch._regions import _guard
from tests.torch.test_clipped_step import OPTIMIZERS, SHAPES, assert_same, parts_of

FUSED = "adamw-fused"
PLAIN = "adam-foreach"


class Weights(nn.Module):
    """Parameters whose gradients are the arguments of the forward."""

    def __init__(self, shapes):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, part):
        return sum((p * g).sum() for p, g in zip(self.weights, part, strict=True))


class Loop:
    def __init__(self, kind, shapes=((3,), (2,)), prepared=True):
        torch.manual_seed(0)
        self.model = Weights(shapes)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        if prepared:
            self.region = prepare(
                self.model, self.optimizer, "compute_dtype=float32, scale=dynamic"
            )
        self.parts = parts_of(shapes, 0)

    def backward(self, parts=None):
        self.optimizer.zero_grad()
        for part in parts or self.parts:
            self.model(part).backward()

    def reference(self, parts, max_norm, **options):
        self.backward(parts)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, **options)
        self.optimizer.step()
        return norm

    @property
    def gradients(self):
        return [parameter.grad for parameter in self.model.parameters()]

    @property
    def norm(self):
        return nn.utils.get_total_norm(self.gradients).item()

    def state(self):
        return copy.deepcopy([[*self.model.parameters()], self.optimizer.state_dict()["state"]])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    shapes=SHAPES,
    max_norm=st.sampled_from([1e-3, 0.5, 2.0, 1e4, math.inf]),
    norm_type=st.sampled_from([2.0, 2.0, 1.0, 3.0, math.inf, 0.5]),
    count=st.integers(1, 3),
    bad=st.sampled_from([None, None, math.inf, -math.inf, math.nan]),
    seed=st.integers(0, 100),
)
def test_it_equals_pytorch(kind, shapes, max_norm, norm_type, count, bad, seed):
    ours, theirs = Loop(kind, shapes), Loop(kind, shapes, prepared=False)
    exact = True
    for step in range(3):
        parts = parts_of(shapes, seed + step, count)
        broken = bad is not None and step == 1
        if broken:
            parts[-1][-1].view(-1)[0] = bad
        before = ours.state()
        ours.backward(parts)
        norm = ours.region.clip_grad_norm_(max_norm, norm_type)
        ours.optimizer.step()
        record = ours.region.last_step
        assert record.skipped == broken
        if broken:
            assert_same(ours.state(), before)
            name = f"weights.{len(shapes) - 1}"
            assert record.nonfinite == ((name, "nan" if bad != bad else "inf"),)
            continue
        expected = theirs.reference(parts, max_norm, norm_type=norm_type)
        assert torch.equal(norm, expected)
        assert record.grad_norm == norm.item()
        exact &= expected + 1e-6 <= max_norm
        torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=6e-7, atol=0)
        if exact:
            assert_same(ours.state(), theirs.state())
        else:
            torch.testing.assert_close(ours.state()[0], theirs.state()[0], rtol=1e-5, atol=1e-4)
    assert not hasattr(ours.optimizer, "grad_scale")


def checks(loop):
    """Returns how often a step reads the gradients to check them."""
    with mock.patch.object(_guard, "check", side_effect=_guard.check) as check:
        loop.optimizer.step()
    return check.call_count


@pytest.mark.parametrize("max_norm", [0.5, 1e4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_norm_is_the_check(kind, max_norm):
    loop = Loop(kind)
    for _ in range(2):
        loop.backward()
        loop.region.clip_grad_norm_(max_norm)
        assert checks(loop) == 0
        assert not loop.region.last_step.skipped


@pytest.mark.parametrize("kind", [FUSED, PLAIN])
def test_gradients_that_were_written_to_are_checked_again(kind):
    loop = Loop(kind)
    loop.backward()
    loop.region.clip_grad_norm_(math.inf)
    loop.gradients[0][0] = math.nan
    assert checks(loop) == 1
    assert loop.region.last_step.skipped
    assert loop.region.last_step.grad_norm is None


def test_gradients_that_no_region_knows_are_checked():
    other = nn.Parameter(torch.ones(2))
    loop = Loop(PLAIN)
    loop.optimizer.add_param_group({"params": [other]})
    loop.backward()
    other.grad = torch.tensor([1.0, math.nan])
    loop.region.clip_grad_norm_(0.5)
    assert checks(loop) == 1
    assert loop.region.last_step.skipped


@pytest.mark.filterwarnings("ignore::halfstep.torch.UnusedRegionWarning")
@pytest.mark.parametrize("value", [1.0, math.nan])
def test_two_regions_that_both_clip_are_one_check(value):
    loop, models = Loop(PLAIN), [Weights([(3,)]), Weights([(2,)])]
    parameters = [parameter for model in models for parameter in model.parameters()]
    loop.optimizer = torch.optim.SGD(parameters, lr=0.1)
    regions = [prepare(model, loop.optimizer) for model in models]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)
    for region in regions:
        region.clip_grad_norm_(0.5)
    assert checks(loop) == 0
    assert regions[0].last_step.skipped == math.isnan(value)
    assert regions[0].last_step.grad_norm is None


def test_an_old_check_is_not_taken_for_a_new_one():
    loop = Loop(PLAIN)
    loop.backward()
    loop.region.clip_grad_norm_(0.5)
    loop.optimizer.step()
    assert checks(loop) == 1
    loop.region.clip_grad_norm_(0.5)
    loop.optimizer.zero_grad()
    for parameter in loop.model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    assert checks(loop) == 1


def test_nothing_is_kept_alive_after_the_step():
    loop = Loop(FUSED)
    loop.backward()
    loop.region.clip_grad_norm_(0.5)
    refs = [weakref.ref(each) for each in loop.gradients]
    loop.optimizer.step()
    loop.model.zero_grad()
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def put_off(kind=FUSED, max_norm=0.5):
    loop = Loop(kind)
    loop.backward()
    before = copy.deepcopy(loop.gradients)
    loop.region.clip_grad_norm_(max_norm)
    return loop, before


def test_fused_optimizers_clip_in_their_step():
    loop, before = put_off()
    assert_same(loop.gradients, before)
    loop.optimizer.step()
    assert math.isclose(loop.norm, 0.5, rel_tol=1e-5)


def test_others_find_clipped_gradients():
    loop, _ = put_off(PLAIN)
    assert math.isclose(loop.norm, 0.5, rel_tol=1e-5)


def writes(loop):
    loop.gradients[0].mul_(2.0)


def replaces(loop):
    for parameter in loop.model.parameters():
        parameter.grad = parameter.grad * 2.0


def adds(loop):
    loop.model(loop.parts[0]).backward()


def grows(loop):
    extra = nn.Parameter(torch.ones(1))
    extra.grad = torch.ones(1)
    loop.optimizer.add_param_group({"params": [extra]})


@pytest.mark.parametrize("change", [writes, replaces, adds, grows])
def test_gradients_that_change_before_they_are_clipped_are_refused(change):
    loop, _ = put_off()
    change(loop)
    before = loop.state()
    with pytest.raises(UsageError) as caught:
        loop.optimizer.step()
    assert str(caught.value) == (
        "Region.clip_grad_norm_() needs gradients that stay as they are until the step that clips "
        "them, got some that were written to, added to or replaced. Clip last, or call "
        "torch.nn.utils.clip_grad_norm_() instead; optimizer.zero_grad() drops the clipping."
    )
    assert_same(loop.state(), before)
    loop.backward()
    loop.optimizer.step()
    assert not loop.region.last_step.skipped


@pytest.mark.parametrize("change", [writes, adds])
def test_clipping_gradients_that_changed_is_refused_too(change):
    loop, _ = put_off()
    change(loop)
    with pytest.raises(UsageError, match="stay as they are"):
        loop.region.clip_grad_norm_(0.5)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_was_put_off(set_to_none):
    loop, before = put_off()
    loop.optimizer.zero_grad(set_to_none=set_to_none)
    loop.model(loop.parts[0]).backward()
    loop.optimizer.step()
    assert_same(loop.gradients, before)


def test_gradients_that_are_gone_are_no_reason_to_refuse_new_ones():
    loop, _ = put_off()
    loop.model.zero_grad()
    loop.model(loop.parts[0]).backward()
    loop.region.clip_grad_norm_(0.25)
    loop.optimizer.step()
    assert math.isclose(loop.norm, 0.25, rel_tol=1e-5)


@pytest.mark.parametrize("kind", [FUSED, PLAIN])
@pytest.mark.parametrize("second", [0.25, math.inf])
def test_clipping_twice_clips_what_was_clipped(kind, second):
    loop, _ = put_off(kind)
    assert math.isclose(loop.region.clip_grad_norm_(second).item(), 0.5, rel_tol=1e-5)
    loop.optimizer.step()
    assert math.isclose(loop.norm, min(second, 0.5), rel_tol=1e-5)


def test_each_of_several_optimizers_clips_its_part():
    model = Weights([(3,), (2,)])
    optimizers = [torch.optim.AdamW([each], fused=True) for each in model.parameters()]
    region = prepare(model, optimizers, "compute_dtype=float32")
    model(parts_of([(3,), (2,)], 0)[0]).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    norm = region.clip_grad_norm_(0.5)
    optimizers[0].step()
    assert torch.allclose(next(model.parameters()).grad, before[0] * 0.5 / norm)
    optimizers[1].step()
    assert region.last_step.grad_norm == norm
    torch.testing.assert_close(
        [parameter.grad for parameter in model.parameters()],
        [each * 0.5 / norm for each in before],
    )


def half_attached(model):
    return [torch.optim.AdamW([model.weights[0]], fused=True)]


def mixed(model):
    return [*half_attached(model), torch.optim.AdamW([model.weights[1]])]


def twice(model):
    return [torch.optim.AdamW(model.parameters(), fused=True) for _ in range(2)]


def more(model):
    extra = nn.Parameter(torch.ones(1))
    extra.grad = torch.ones(1)
    return [torch.optim.AdamW([*model.parameters(), extra], fused=True)]


@pytest.mark.parametrize("make", [half_attached, mixed, twice, more, lambda model: []])
def test_where_kernels_cannot_do_it_gradients_are_multiplied(make):
    model = Weights([(3,), (2,)])
    region = prepare(model, make(model), "compute_dtype=float32")
    model(parts_of([(3,), (2,)], 0)[0]).backward()
    region.clip_grad_norm_(0.5)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert math.isclose(norm.item(), 0.5, rel_tol=1e-5)


def test_removing_the_region_clips_first():
    loop, _ = put_off()
    loop.region.remove()
    assert math.isclose(loop.norm, 0.5, rel_tol=1e-5)
    assert "step" not in vars(loop.optimizer)


def test_state_dicts_in_between_change_nothing():
    loop, _ = put_off()
    loop.region.load_state_dict(loop.region.state_dict())
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    loop.optimizer.step()
    assert math.isclose(loop.norm, 0.5, rel_tol=1e-5)


@pytest.mark.parametrize("kind", [FUSED, PLAIN])
def test_a_closure_may_clip(kind):
    ours, theirs = Loop(kind), Loop(kind, prepared=False)

    def closure():
        ours.backward()
        ours.region.clip_grad_norm_(0.5)

    ours.optimizer.step(closure)
    theirs.reference(theirs.parts, 0.5)
    torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=6e-7, atol=0)
    torch.testing.assert_close([*ours.model.parameters()], [*theirs.model.parameters()])


@pytest.mark.parametrize("scaler", [GradScaler, torch.amp.GradScaler])
def test_a_scaler_steps_from_what_a_region_clipped(scaler):
    loop = Loop(FUSED)
    scaler = scaler("cpu", init_scale=8.0)
    loop.optimizer.zero_grad()
    scaler.scale(loop.model(loop.parts[0])).backward()
    scaler.unscale_(loop.optimizer)
    loop.region.clip_grad_norm_(0.5)
    scaler.step(loop.optimizer)
    scaler.update()
    assert math.isclose(loop.norm, 0.5, rel_tol=1e-5)


def test_clipping_what_a_scaler_has_scaled_is_refused():
    loop, scaler = Loop(PLAIN), GradScaler("cpu", init_scale=8.0)
    loop.optimizer.zero_grad()
    scaler.scale(loop.model(loop.parts[0])).backward()
    loop.region.clip_grad_norm_(0.5)
    with pytest.raises(ScalerStateError, match="needs unscaled gradients for clipping"):
        scaler.step(loop.optimizer)


@pytest.mark.parametrize("kind", [FUSED, PLAIN])
def test_a_sum_of_squares_that_overflows_is_no_overflow(kind):
    loop = Loop(kind)
    loop.backward()
    for gradient in loop.gradients:
        gradient.fill_(3e38)
    norm = loop.region.clip_grad_norm_(0.5)
    assert math.isclose(norm.item(), 3e38 * 5**0.5, rel_tol=1e-6)
    loop.optimizer.step()
    assert not loop.region.last_step.skipped
    assert math.isclose(loop.norm, 0.5, rel_tol=1e-5)


def test_norms_that_are_not_finite_are_an_error_if_asked_for():
    loop = Loop(PLAIN)
    loop.backward()
    loop.gradients[0][0] = math.inf
    with pytest.raises(NonFiniteError) as caught:
        loop.region.clip_grad_norm_(0.5, error_if_nonfinite=True)
    assert str(caught.value) == (
        "Region.clip_grad_norm_() needs a finite norm, got inf. Leave error_if_nonfinite out to "
        "let the optimizer skip the step."
    )


def test_no_gradients_have_the_norm_zero():
    loop = Loop(FUSED)
    assert loop.region.clip_grad_norm_(0.5) == 0.0
    loop.optimizer.step()


def test_a_limit_that_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match=r"clip_grad_norm_\(\) needs max_norm > 0, got 0"):
        Loop(FUSED).region.clip_grad_norm_(0)


def test_a_model_that_is_gone_is_refused():
    region = prepare(nn.Linear(2, 2))
    gc.collect()
    with pytest.raises(UsageError, match="needs the model of the region, which is gone"):
        region.clip_grad_norm_(1.0)
