import functools
import json
import re

import jax
import pytest
from jax import lax
from jax import numpy as jnp

from halfstep.errors import UsageError
from halfstep.jax import UnmatchedRuleWarning, autocast, explain

X, W = jnp.ones((4, 8)), jnp.ones((8, 8))


def loss(x, w):
    with jax.named_scope("encoder"):
        x = jnp.tanh(x @ w)
    x = lax.scan(lambda carry, _: (carry @ w, None), x, None, 3)[0]
    return jnp.sum(lax.bitcast_convert_type(x, jnp.int32)), jnp.mean(jnp.exp(x))


def test_rows_tell_what_runs_where_in_what_and_why():
    found = {(row.operation, row.module): row for row in explain(loss, X, W).rows}
    product = found["lax::dot_general", "encoder"]
    assert product.shapes == ((4, 8), (8, 8))
    assert product.inputs == ("float32", "float32")
    assert (product.runs_in, product.outputs) == ("bfloat16", ("bfloat16",))
    assert (product.action, product.count) == ("lower", 1)
    assert product.reason.startswith("Matrix products")
    assert found["lax::exp", ""].runs_in == "float32"
    assert found["lax::bitcast_convert_type", ""].action == "as written"


def test_shapes_do_for_arrays_and_nothing_is_computed():
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (X, W)]
    assert explain(loss, *shapes) == explain(loss, X, W)


def test_it_prints_a_table_and_gives_plain_data():
    explanation = explain(loss, X, W, policy="mixed_float16")
    lines = str(explanation).splitlines()
    titles = ["operation", "module", "count", "shapes", "in", "runs in", "out", "rule", "why"]
    assert re.split("  +", lines[0]) == titles
    assert lines[1].split()[:5] == ["lax::dot_general", "encoder", "1", "4x8", "8x8"]
    assert lines[-1].startswith("3 in float16")
    assert json.loads(json.dumps(explanation.to_dict()))["rows"][0]["runs_in"] == "float16"


def test_the_reason_of_an_edit_is_told():
    policy = 'mixed_bfloat16, rules=halfstep-1 + matmul[where=encoder]=full "It is the first one."'
    row = explain(loss, X, W, policy=policy).rows[0]
    assert (row.runs_in, row.reason) == ("float32", "It is the first one.")


def test_in_float32_there_is_nothing_to_explain():
    assert str(explain(loss, X, W, policy="float32")).endswith("nothing is cast")


class Model:
    @autocast(policy="mixed_float16")
    def __call__(self, x, w):
        return loss(x, w)


def test_what_autocast_made_is_explained_with_its_own_policy():
    expected = explain(loss, X, W, policy="mixed_float16")
    cast = autocast(loss, "mixed_float16")
    for function in (cast, jax.jit(cast), Model().__call__):
        assert explain(function, X, W) == expected
    with pytest.raises(UsageError, match=r"='mixed_bfloat16' beside its own, .*__wrapped__"):
        explain(cast, X, W, policy="mixed_bfloat16")


def test_a_rule_for_a_scope_that_is_not_there_is_told_of():
    def headed(x):
        with jax.named_scope("head"):
            return x @ x

    policy = "mixed_bfloat16, rules=halfstep-1 + matmul[where=haed]=full"
    inputs = jnp.ones((2, 2))
    for asked in (
        lambda: explain(headed, inputs, policy=policy),
        lambda: autocast(jax.jit(headed), policy)(inputs),
    ):
        with pytest.warns(UnmatchedRuleWarning, match="such as 'head'"):
            asked()
    explain(headed, inputs, policy=policy.replace("haed", "he*"))
    with pytest.warns(UnmatchedRuleWarning, match=r"has a path: in JAX, open a jax\.named_scope"):
        explain(jnp.matmul, inputs, inputs, policy=policy)


def mean(w, x):
    with jax.named_scope("head"):
        return jnp.mean(jnp.tanh(x @ w) @ w)


GRADIENTS = [
    ("float16", lambda cast: jax.grad(cast)),
    ("bfloat16", lambda cast: jax.jit(jax.value_and_grad(cast))),
    ("float16", lambda cast: jax.grad(jax.jit(cast))),
    ("bfloat16", lambda cast: lambda w, x: w - 0.1 * jax.grad(cast)(w, x)),
    ("float16", lambda cast: functools.partial(jax.vmap(jax.grad(cast), (None, 0)), W)),
]


@pytest.mark.parametrize(("low", "build"), GRADIENTS)
def test_the_gradient_of_what_autocast_made_is_explained_as_it_runs(low, build):
    cast = autocast(mean, f"mixed_{low}")
    function = build(cast)
    args = (X[None],) if isinstance(function, functools.partial) else (W, X)
    function(*args)  # What JAX knows already is told of as well.
    rows = explain(function, *args).rows
    products = [row for row in rows if row.operation == "lax::dot_general"]
    assert {(row.action, row.runs_in, row.module) for row in products} == {
        ("lower", low, "head"),
        ("gradient", low, "head"),
    }
    assert products[0].reason.startswith("Matrix products")
    assert products[-1].reason == "It belongs to the gradient of lax::dot_general."
    of_tanh = [row for row in rows if row.reason.endswith("gradient of lax::tanh.")]
    assert {row.runs_in for row in of_tanh} == {low}
    assert explain(function, *args).rows == rows


def test_a_function_with_a_derivative_of_its_own_is_explained_in_a_gradient():
    def silu(w, x):
        return jnp.mean(jax.nn.silu(x @ w))

    rows = explain(jax.grad(autocast(silu, "mixed_bfloat16")), W, X).rows
    assert {row.action for row in rows if row.operation == "lax::logistic"} == {"widest"}
    assert all(row.action != "as written" for row in rows)


def test_a_gradient_is_not_explained_with_another_policy():
    gradient = jax.grad(autocast(mean))
    with pytest.raises(UsageError, match=r"got policy='float32' beside its own.* Leave it out"):
        explain(gradient, W, X, policy="float32")


def test_what_is_in_no_region_is_told_so():
    def step(w, x):
        return jnp.exp(autocast(mean)(w, x))

    found = {row.operation: row for row in explain(step, W, X).rows}
    assert (found["lax::exp"].action, found["lax::exp"].runs_in) == ("as written", "float32")
    assert found["lax::dot_general"].runs_in == "bfloat16"


def test_a_number_that_follows_is_told_so():
    rows = explain(lambda w: 0.5 * (w @ w), W[0]).rows
    (row,) = [each for each in rows if each.operation == "lax::mul"]
    assert (row.inputs, row.runs_in) == (("float32", "bfloat16"), "bfloat16")
    assert row.reason.endswith("A number that the program holds follows the others.")
    (row,) = [each for each in explain(lambda w: w * w[::-1], W).rows if each.action == "widest"]
    assert "number" not in row.reason


def test_what_is_no_function_is_refused():
    with pytest.raises(UsageError, match="needs a function, got 3"):
        explain(3)
