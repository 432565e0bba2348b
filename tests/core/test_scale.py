import itertools
import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from halfstep.core import LossScale, ScaleState
from halfstep.errors import ScaleError
from tests.core.strategies import LOSS_SCALES, STEPS, loss_scales
from tests.reference.grad_scaler import GradScalerReference


def replay(rule, steps):
    states = [rule.init()]
    for finite in steps:
        states.append(rule.next(states[-1], finite=finite))
    return states


@given(LOSS_SCALES, STEPS)
def test_scale_stays_finite_and_within_its_limits(rule, steps):
    for state in replay(rule, steps):
        assert 0.0 < rule.min_scale <= state.scale <= rule.max_scale < math.inf
        assert 0 <= state.finite_steps < rule.growth_interval
        assert 0 <= state.overflows <= rule.hysteresis


@given(LOSS_SCALES, STEPS)
def test_the_reciprocal_of_the_scale_is_finite_too(rule, steps):
    assert all(0.0 < 1.0 / state.scale <= 2.0**126 for state in replay(rule, steps))


@given(STEPS)
def test_default_settings_do_what_the_reference_does(steps):
    reference = GradScalerReference()
    for state, finite in zip(replay(LossScale(), steps)[1:], steps, strict=True):
        reference.update(finite)
        assert (state.scale, state.finite_steps) == (reference.scale, reference.tracker)


@given(loss_scales(hysteresis=1, min_scale=2.0**-126, max_scale=LossScale().max_scale), STEPS)
def test_any_settings_do_what_the_reference_does_until_the_floor(rule, steps):
    reference = GradScalerReference(
        rule.init_scale, rule.growth_factor, rule.backoff_factor, rule.growth_interval
    )
    for state, finite in zip(replay(rule, steps)[1:], steps, strict=True):
        reference.update(finite)
        assume(reference.scale >= rule.min_scale)
        assert (state.scale, state.finite_steps) == (reference.scale, reference.tracker)


@pytest.mark.parametrize("seed", range(8))
def test_random_traces_equal_those_of_torch(seed):
    torch = pytest.importorskip("torch")
    choose = random.Random(seed)
    growth, backoff = choose.uniform(1.01, 5.0), choose.uniform(0.2, 0.99)
    rule = LossScale(
        growth_factor=growth, backoff_factor=backoff, growth_interval=3, min_scale=2.0**-100
    )
    if seed == 0:
        rule = LossScale(growth_interval=3, min_scale=2.0**-100)
    scale = torch.full((), rule.init_scale)
    tracker = torch.zeros((), dtype=torch.int32)
    state = rule.init()
    for _ in range(300):
        finite = choose.random() < 0.8
        torch._amp_update_scale_(
            scale,
            tracker,
            torch.tensor(0.0 if finite else 1.0),
            rule.growth_factor,
            rule.backoff_factor,
            rule.growth_interval,
        )
        state = rule.next(state, finite=finite)
        assert (state.scale, state.finite_steps) == (scale.item(), tracker.item())


def test_growth_comes_with_the_nth_finite_step_in_a_row():
    rule = LossScale(init_scale=8.0, growth_interval=3)
    scales = [state.scale for state in replay(rule, [True, True, False, True, True, True])]
    assert scales == [8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 8.0]


def test_growth_above_the_cap_does_not_happen_and_counts_anew():
    rule = LossScale(init_scale=8.0, growth_interval=2, max_scale=20.0)
    scales = [state.scale for state in replay(rule, [True] * 8)]
    assert scales == [8.0, 8.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0]
    assert replay(rule, [True] * 6)[-1].finite_steps == 0


def test_a_thousand_overflows_end_at_the_floor_and_a_good_step_goes_on_from_there():
    rule = LossScale(min_scale=0.5, growth_interval=1)
    state = replay(rule, [False] * 1000)[-1]
    assert state.scale == 0.5
    assert rule.at_floor(state)
    assert rule.next(state, finite=True).scale == 1.0


def test_a_static_scale_never_moves_and_has_no_floor():
    rule = LossScale.static(1024.0)
    states = replay(rule, [False, True, False] * 2000)
    assert {state.scale for state in states} == {1024.0}
    assert not rule.at_floor(ScaleState(rule.min_scale))


def test_hysteresis_tolerates_overflows_until_it_is_used_up_and_refills_only_by_growth():
    rule = LossScale(init_scale=64.0, hysteresis=2, growth_interval=2)
    steps = [False, True, False, False, True, True, False, False]
    scales = [state.scale for state in replay(rule, steps)[1:]]
    assert scales == [64.0, 64.0, 32.0, 16.0, 16.0, 32.0, 32.0, 16.0]


def test_hysteresis_refills_at_the_cap_as_well():
    rule = LossScale(init_scale=64.0, max_scale=64.0, hysteresis=2, growth_interval=1)
    assert [state.scale for state in replay(rule, [False, True] * 50)] == [64.0] * 101


def test_every_overflow_resets_the_count_of_finite_steps():
    state = LossScale(hysteresis=3).next(ScaleState(8.0, finite_steps=5), finite=False)
    assert state == ScaleState(8.0, finite_steps=0, overflows=1)


@given(loss_scales(), STEPS)
def test_only_growth_forgets_overflows(rule, steps):
    states = replay(rule, steps)
    for before, after in itertools.pairwise(states):
        assert after.overflows >= before.overflows or after.finite_steps == 0


def test_no_overflow_raises_a_scale_that_was_set_below_the_floor():
    assert LossScale(min_scale=1.0).next(ScaleState(0.5), finite=False).scale == 0.5


def test_kinds():
    assert [LossScale.none().kind, LossScale.static(2.0).kind, LossScale().kind] == [
        "none",
        "static",
        "dynamic",
    ]
    assert LossScale.static(1.0) == LossScale.none()
    assert LossScale(growth_factor=1.0).kind == "dynamic"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("none", LossScale.none()),
        ("static(1024.0)", LossScale.static(1024.0)),
        ("dynamic", LossScale()),
        ("dynamic(init_scale=8.0, growth_interval=4)", LossScale(init_scale=8, growth_interval=4)),
        (
            "static(2.0, hysteresis=3)",
            LossScale(init_scale=2, growth_factor=1, backoff_factor=1, hysteresis=3),
        ),
    ],
)
def test_texts(text, value):
    assert LossScale.parse(text) == value
    assert str(value) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" static( 1024 ) ", "static(1024.0)"),
        ("dynamic()", "dynamic"),
        ("dynamic(init_scale=65536)", "dynamic"),
        ("static(1)", "none"),
        ("static(init_scale=4)", "static(4.0)"),
    ],
)
def test_texts_that_are_not_canonical_are_read_as_well(text, value):
    assert str(LossScale.parse(text)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "dynamc",
            "LossScale needs none, static(...) or dynamic(...), got 'dynamc'."
            " Did you mean 'dynamic'?",
        ),
        (
            "",
            "LossScale needs none, static(...) or dynamic(...), got ''."
            " Write for example static(1024.0).",
        ),
        (
            "static(8.0",
            "LossScale needs none, static(...) or dynamic(...), got 'static(8.0'."
            " Write for example static(1024.0).",
        ),
        (
            None,
            "LossScale needs none, static(...) or dynamic(...), got None."
            " Write for example static(1024.0).",
        ),
        ("static", "A static scale needs a value, got 'static'. Write static(1024.0)."),
        (
            "static(big)",
            "LossScale needs init_scale to be a finite number, got 'big'. Write a float.",
        ),
        (
            "dynamic(8.0)",
            "The scale 'dynamic(8.0)' needs key=value, got '8.0'. Write for example init_scale=...",
        ),
        (
            "dynamic(growth_intervall=4)",
            "The scale 'dynamic(growth_intervall=4)' needs a key among init_scale, growth_factor,"
            " backoff_factor, growth_interval, min_scale, max_scale, hysteresis, got"
            " 'growth_intervall'. Did you mean 'growth_interval'?",
        ),
        (
            "dynamic(min_scale=1, min_scale=2)",
            "The scale 'dynamic(min_scale=1, min_scale=2)' needs each key once, got 'min_scale'"
            " twice. Remove one of them.",
        ),
        (
            "dynamic(growth_interval=2.5)",
            "LossScale needs growth_interval to be a whole number, got 2.5. Write an int.",
        ),
    ],
)
def test_errors_of_texts(text, message):
    with pytest.raises(ScaleError) as caught:
        LossScale.parse(text)
    assert str(caught.value) == message


def test_a_dict_with_an_unknown_key_is_refused():
    with pytest.raises(ScaleError, match=r"got 'init_scal'\. Did you mean 'init_scale'\?"):
        LossScale.from_dict({"init_scal": 8.0})


@given(st.floats(2.0**-16, 2.0**120))
def test_scales_are_rounded_to_float32_once(value):
    once = LossScale(init_scale=value)
    assert LossScale(init_scale=once.init_scale) == once
    assert once.init_scale == pytest.approx(value, rel=2.0**-23)
