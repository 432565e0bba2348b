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


def test_what_is_no_function_is_refused():
    with pytest.raises(UsageError, match="needs a function, got 3"):
        explain(3)
