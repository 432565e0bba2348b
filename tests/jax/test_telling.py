import jax
import jax.numpy as jnp
import optax
import pytest

from halfstep.errors import NonFiniteError, UsageError
from halfstep.jax import apply_if_finite, check_skips, jmp, nonfinite
from tests.jax.compiling import Compiled


def test_the_host_learns_what_was_not_finite():
    params = {"a": jnp.ones(2), "b": [jnp.ones(2), jnp.ones(2)]}
    optimizer = optax.chain(apply_if_finite(optax.sgd(0.1)), optax.scale(1.0))
    grads = {"a": jnp.array([1, jnp.inf]), "b": [jnp.ones(2), jnp.array([jnp.nan, -jnp.inf])]}
    update, state = Compiled(optimizer.update), optimizer.init(params)
    assert nonfinite(state, params) == ()
    for each in (grads, params):
        _, state = update(each, state)
        assert nonfinite(state, params) == (("['a']", "inf"), ("['b'][1]", "inf and nan"))
    check_skips(state, params)


def test_a_standstill_is_an_error_that_names_the_leaves():
    optimizer = apply_if_finite(optax.sgd(0.1), 2)
    params = {f"layer{number}": jnp.ones(1) for number in range(7)}
    state = optimizer.init(params)
    grads = jax.tree.map(lambda leaf: leaf * jnp.nan, params)
    _, state = optimizer.update(grads, state)
    check_skips(state, params)
    _, state = optimizer.update(grads, state)
    with pytest.raises(NonFiniteError) as caught:
        check_skips(state, params)
    shown = ", ".join(f"['layer{number}'] (nan)" for number in range(5))
    assert str(caught.value) == (
        "apply_if_finite needs fewer than max_consecutive_errors=2 skipped steps in a row, got 2, "
        f"because gradients were not finite. Leaves with non-finite gradients: {shown} and 2 more. "
        "Where a region of halfstep.jax.autocast brings gradients to 1024, which is too much for "
        "some sums in float16, write autocast(f, policy, scale=64.0), or give it this state as "
        'scale=, with apply_if_finite(..., loss_scale="dynamic"), which comes down by itself. '
        "Otherwise compute what is behind them in float32, use bfloat16, or lower the learning "
        "rate; if the loss itself is not finite, no loss scale helps. "
        "halfstep.jax.diagnose(function, *arguments), or halfstep doctor on the script, tells the "
        "operation."
    )
    with pytest.raises(NonFiniteError, match="Pass params to be told which ones"):
        check_skips(state)


@pytest.mark.parametrize(("hysteresis", "steps"), [(1, 2), (2, 3)])
def test_an_overflow_at_the_floor_is_an_error_that_says_so(hysteresis, steps):
    rule = f"dynamic(init_scale=2.0, min_scale=1.0, hysteresis={hysteresis})"
    optimizer = apply_if_finite(optax.sgd(0.1), loss_scale=rule)
    weight = jnp.float32(1.0)
    state = optimizer.init(weight)
    for _ in range(steps):
        check_skips(state)
        _, state = optimizer.update(jnp.float32(jnp.inf), state)
    with pytest.raises(NonFiniteError, match=r"at its smallest scale, but they were not at 1, and"):
        check_skips(state, weight)
    _, state = optimizer.update(jnp.float32(1.0), state)
    check_skips(state)


def test_the_scale_is_named_that_may_be_to_blame():
    for rule, text in (
        ("static(4096.0)", "the scale, 4096, is too much for a sum in float16, lower it; a region"),
        ("dynamic(init_scale=4096.0)", "the scale, 2048, .* lower init_scale; a region of"),
        ("dynamic(init_scale=4.0, min_scale=2.0)", "the scale, 2, .* lower min_scale; a region of"),
        (
            jmp.DynamicLossScale(4096.0),
            "the scale, 2048, is too much for a sum in float16, lower it",
        ),
    ):
        optimizer = apply_if_finite(optax.sgd(0.1), 1, loss_scale=rule)
        _, state = optimizer.update(jnp.float32(jnp.inf), optimizer.init(jnp.float32(1.0)))
        with pytest.raises(NonFiniteError, match=f"{text}.*scale=.*diagnose"):
            check_skips(state)


def test_errors():
    optimizer = apply_if_finite(optax.sgd(0.1))
    state = optimizer.init({"w": 1.0})
    with pytest.raises(UsageError, match="needs exactly one ApplyIfFiniteState in it, got 0"):
        check_skips(optax.sgd(0.1).init(1.0))
    with pytest.raises(UsageError, match="needs exactly one ApplyIfFiniteState in it, got 2"):
        check_skips((state, state))
    with pytest.raises(UsageError, match="that the optimizer trains, 1 leaves, got 2"):
        nonfinite(state, {"w": 1.0, "b": 1.0})
