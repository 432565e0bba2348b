import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from halfstep.errors import UsageError
from halfstep.jax import autocast
from tests.jax.programs import dtypes, equations

BF16, F32 = "bfloat16", "float32"
LOW = ((BF16, BF16), (BF16,))
KEYS = jax.random.split(jax.random.key(0), 2)
X, W = jax.random.normal(KEYS[0], (4, 8)), jax.random.normal(KEYS[1], (8, 8)) / 3


def scanned(x, w):
    def turn(carry, row):
        carry = jnp.tanh(carry @ w + row)
        return carry, carry @ w

    last, all_of_them = lax.scan(turn, x, jnp.ones((5, 8)))
    return jnp.sum(last) + jnp.sum(all_of_them)


def whiled(x, w):
    _, last = lax.while_loop(lambda at: at[0] < 3, lambda at: (at[0] + 1, at[1] @ w), (0, x))
    return jnp.sum(last)


def counted(x, w):
    return jnp.sum(lax.fori_loop(0, 3, lambda turn, x: jnp.tanh(x @ w), x))


def branched(x, w):
    return jnp.sum(lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w), lambda x: x, x))


def switched(x, w):
    branches = [lambda x: x @ w, lambda x: x @ w.T, lambda x: -(x @ w)]
    return jnp.sum(lax.switch(1, branches, x @ w))


def nested(x, w):
    def turn(carry, row):
        def inner(x):
            return lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x @ w.T, x)

        return jax.checkpoint(jax.jit(inner))(carry) + row, None

    return jnp.sum(lax.scan(turn, x, jnp.ones((3, 8)))[0])


def mapped(x, w):
    return jnp.sum(lax.map(lambda row: jnp.tanh(row @ w), x))


REVERSIBLE = [scanned, counted, branched, switched, nested, mapped]


@pytest.mark.parametrize("function", [*REVERSIBLE, whiled])
def test_products_inside_are_low_and_what_is_carried_keeps_its_dtype(function):
    closed = jax.make_jaxpr(autocast(function))(X, W)
    products = dtypes(closed, "dot_general")
    assert products
    assert set(products) == {LOW}
    for equation in equations(closed.jaxpr):
        if equation.primitive.name == "scan":
            first = equation.params["num_consts"]
            count = equation.params["num_carry"]
            carried = equation.invars[first : first + count]
            assert [var.aval.dtype for var in carried] == [
                var.aval.dtype for var in equation.outvars[:count]
            ]
            assert BF16 not in {str(var.aval.dtype) for var in carried}


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("function", REVERSIBLE)
def test_results_and_gradients_agree_with_float32(function, policy):
    cast = autocast(function, policy)
    np.testing.assert_allclose(cast(X, W), function(X, W), rtol=0.03, atol=0.1)
    for plain, ours in zip(
        jax.grad(function, (0, 1))(X, W), jax.jit(jax.grad(cast, (0, 1)))(X, W), strict=True
    ):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, plain, atol=0.03 * float(jnp.abs(plain).max()))


def test_a_while_loop_goes_forward():
    np.testing.assert_allclose(autocast(whiled)(X, W), whiled(X, W), rtol=0.05, atol=0.1)
    tangents = jax.jvp(autocast(whiled), (X, W), (X, W))[1]
    np.testing.assert_allclose(tangents, jax.jvp(whiled, (X, W), (X, W))[1], rtol=0.05, atol=0.1)


def test_the_gradient_of_a_weight_is_summed_over_turns_in_float32():
    # 1000 turns, each of which adds 1: in bfloat16, that ends at 256.
    def function(w):
        return lax.scan(lambda total, _: (total + jnp.ones(1) @ w, None), jnp.zeros(1), None, 1000)[
            0
        ][0]

    assert jax.grad(autocast(function))(jnp.ones((1, 1)))[0, 0] == 1000.0


def test_branches_hand_on_the_widest_of_what_they_give():
    def function(x, choose):
        return lax.cond(choose, lambda x: x @ W, lambda x: x * 1.0, x)

    closed = jax.make_jaxpr(autocast(function))(X, True)
    (cond,) = [each for each in closed.eqns if each.primitive.name == "cond"]
    assert [str(var.aval.dtype) for var in cond.outvars] == [F32]
    alike = jax.make_jaxpr(autocast(lambda x: lax.cond(x[0, 0] > 0, jnp.tanh, jnp.negative, x @ W)))
    (cond,) = [each for each in alike(X).eqns if each.primitive.name == "cond"]
    assert [str(var.aval.dtype) for var in cond.outvars] == [BF16]


def test_what_a_branch_prints_is_printed(capsys):
    def printed(x):
        jax.debug.print("seen {}", x[0, 0])
        return x

    def function(x):
        return lax.cond(x[0, 0] > -9, printed, jnp.sin, x)

    jax.block_until_ready(autocast(function)(X @ jnp.eye(8)))
    jax.effects_barrier()
    assert capsys.readouterr().out.startswith("seen ")


def in_a_reference(x):
    cell = jax.new_ref(jnp.zeros((4, 8)))
    cell[...] = x @ W
    cell[...] += 1.0
    return jnp.sum(cell[...])


def test_references_hold_what_they_were_made_for():
    np.testing.assert_allclose(autocast(in_a_reference)(X), in_a_reference(X), rtol=0.02)
    np.testing.assert_allclose(
        jax.grad(autocast(in_a_reference))(X), jax.grad(in_a_reference)(X), atol=0.05
    )
    with pytest.raises(UsageError, match=r"mutable array.*jax.new_ref.*mixed_bfloat16"):
        jax.grad(autocast(in_a_reference, "mixed_float16"))(X)
