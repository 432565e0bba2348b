import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from halfstep.jax._steps import Steps


@pytest.fixture
def watched():
    calls = []
    steps = Steps(calls.append)
    end = steps.start()
    yield steps, calls
    end()


def square(x):
    return (x * x).sum()


def made_in(way):
    def step(x):
        return jax.grad(square)(x)

    ways = {
        "jit": lambda: jax.jit(step),
        "decorator": lambda: jax.jit(static_argnums=())(step),
        "partial": lambda: functools.partial(jax.jit, donate_argnums=0)(step),
        "grad": lambda: jax.grad(square),
        "value_and_grad": lambda: jax.value_and_grad(square),
        "both": lambda: jax.jit(jax.value_and_grad(square)),
        "nested": lambda: jax.jit(lambda x: jax.jit(step)(x)),
    }
    return ways[way]()


WAYS = ("jit", "decorator", "partial", "grad", "value_and_grad", "both", "nested")


@pytest.mark.parametrize("way", WAYS)
def test_each_call_is_told_once(watched, way):
    _, calls = watched
    step = made_in(way)
    for _ in range(3):
        step(jnp.ones(2))
    assert len(calls) == 3
    assert all(not isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(calls[0].args))


def test_a_function_that_is_made_anew_for_each_step_is_the_same(watched):
    _, calls = watched
    for _ in range(3):
        jax.jit(lambda x: jax.grad(square)(x))(1.0)
    assert len(calls) == 3


def test_without_a_gradient_nothing_is_told(watched):
    steps, calls = watched
    jax.jit(square)(jnp.ones(2))
    assert (calls, steps.seen) == ([], False)


def test_of_several_the_one_that_is_called_the_most_is_told(watched):
    _, calls = watched
    once, often = jax.grad(square), jax.grad(lambda x: 3 * square(x))
    once(1.0)
    for _ in range(4):
        often(1.0)
    assert [float(call.result) for call in calls] == [2.0, 6.0, 6.0, 6.0]


def test_donated_arguments_are_kept(watched):
    steps, calls = watched
    jax.jit(jax.grad(square), donate_argnums=0)(jnp.ones(2))
    assert steps.donated
    assert calls[0].args[0].tolist() == [1.0, 1.0]


def test_a_jitted_function_has_what_it_has_otherwise(watched):
    class Owner:
        @jax.jit(static_argnums=0)
        def double(self, x):
            """Doubles."""
            return 2 * x

    assert Owner().double(3.0) == 6.0
    assert Owner.double.__doc__ == "Doubles."
    assert Owner.double.lower(Owner(), 3.0).compile() is not None


def test_what_a_step_takes_gradients_of(watched):
    steps, calls = watched

    @jax.jit
    def step(x):
        return x - jax.grad(square, argnums=(0,))(x)[0]

    step(jnp.ones(2))
    (turn,) = steps.inside(calls[0])
    inner = turn.call
    assert inner.given.function is square
    assert (inner.args[0].tolist(), inner.given.options) == ([1.0, 1.0], {"argnums": (0,)})
    assert len(calls) == 1
    assert [each.call for each in steps.inside(inner)] == [inner]
    assert turn.number == 0


def in_a_loop(way):
    """Returns a compiled loop of training steps over rows, whose loss is the sum of a square."""

    def turn(x, row):
        return x - 0.1 * jax.grad(square)(x * row), None

    ways = {
        "scan": lambda x, rows: lax.scan(turn, x, rows)[0],
        "fori": lambda x, rows: lax.fori_loop(0, len(rows), lambda i, x: turn(x, rows[i])[0], x),
        "while": lambda x, rows: lax.while_loop(
            lambda state: state[0] < len(rows),
            lambda state: (state[0] + 1, turn(state[1], rows[state[0]])[0]),
            (0, x),
        )[1],
    }
    return jax.jit(ways[way])


@pytest.mark.parametrize("way", ["scan", "fori", "while"])
def test_the_turn_of_a_loop_that_gives_what_is_not_finite(watched, way):
    steps, calls = watched
    rows = jnp.ones(40).at[6].set(jnp.inf)
    in_a_loop(way)(jnp.ones(2), rows)
    (turn,) = steps.inside(calls[0], until_broken=True)
    assert (turn.call.given.function, turn.number) == (square, 7)
    assert [each.number for each in steps.inside(calls[0])] == [1, 10]


def test_of_a_loop_no_more_turns_run_than_are_looked_at(watched):
    steps, calls = watched
    ran = []

    def turn(x, row):
        jax.debug.callback(ran.append, row)
        return x - 0.1 * jax.grad(square)(x), None

    jax.jit(lambda x, rows: lax.scan(turn, x, rows)[0])(jnp.ones(2), jnp.arange(30.0))
    jax.effects_barrier()
    ran.clear()
    steps.inside(calls[0])
    jax.effects_barrier()
    # Once as it is, to see whether what takes gradients is called there.
    assert len(ran) == 30 + 10


def test_everything_is_as_before_at_the_end():
    before = jax.jit, jax.grad, jax.value_and_grad
    calls = []
    steps = Steps(calls.append)
    end = steps.start()
    step = jax.jit(jax.grad(square))
    end()
    assert (jax.jit, jax.grad, jax.value_and_grad) == before
    assert (step(3.0), calls) == (6.0, [])
