import functools
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from halfstep import Plan, Policy
from halfstep.core import override_policy
from halfstep.errors import PolicyError, RuleError, ScaleError, UsageError
from halfstep.jax import autocast
from tests.jax.programs import dtypes

X, W = jnp.ones((4, 8)), jnp.ones((8, 8)) / 3


def test_arguments_and_results_are_trees_of_anything():
    @autocast
    def function(tree, name, activation, *more, count=2, training=True):
        if training and count > 1 and name == "tanh":
            out = activation(tree["x"] @ tree["w"])
            return {"out": out, "name": name, "more": more, "none": None}
        raise AssertionError

    out = function({"x": X, "w": W}, "tanh", jnp.tanh, 1, [2.5, "three"])
    assert (out["name"], out["more"], out["none"]) == ("tanh", (1, [2.5, "three"]), None)
    assert out["out"].dtype == jnp.float32
    np.testing.assert_allclose(out["out"], jnp.tanh(X @ W), atol=0.01)


def test_a_plan_is_a_policy(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[policy]\ncompute_dtype = "bfloat16"\nscale = "none"')
    for plan in (str(path), Plan.load(path)):
        made = jax.make_jaxpr(autocast(lambda x: x @ W, policy=plan))(X)
        assert dtypes(made, "dot_general")[0][0] == ("bfloat16", "bfloat16")


def test_programs_may_branch_on_integers_and_booleans():
    @autocast
    def function(x, flag, step):
        return x @ W if flag or step % 2 else x

    np.testing.assert_array_equal(function(X, jnp.asarray(False), np.int64(2)), X)


def test_objects_that_are_no_trees_stay_what_they_are():
    @dataclass
    class Layer:
        weights: jax.Array

        @autocast
        def __call__(self, x):
            return x @ self.weights

    out = Layer(W)(X)
    assert out.dtype == jnp.float32
    assert out[0, 0] != (X @ W)[0, 0]


def test_callable_objects_and_bound_methods():
    class Layer:
        def __init__(self, weights):
            self.weights = weights

        def __call__(self, x):
            return x @ self.weights

    layer = Layer(W)
    for call in (autocast(layer), autocast(layer.__call__), autocast(jax.jit(layer))):
        assert dtypes(jax.make_jaxpr(call)(X), "dot_general")[0][1] == ("bfloat16",)
    assert not hasattr(autocast(layer), "weights")


def test_closures_over_values_that_are_differentiated():
    def outer(w, policy):
        inner = autocast(lambda x: jnp.sum(jnp.tanh(x @ w)), policy)
        return inner(X) + jnp.sum(w**2)

    plain = jax.grad(outer)(W, "float32")
    for policy in ("mixed_bfloat16", "mixed_float16"):
        for gradient in (jax.grad(outer), jax.jit(jax.grad(outer), static_argnums=1)):
            np.testing.assert_allclose(gradient(W, policy), plain, atol=0.02)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_value_and_grad_with_further_results(policy):
    @autocast(policy=policy)
    def loss(w, x):
        out = x @ w
        return jnp.mean(out**2), {"out": out, "count": jnp.arange(3), "text": "kept"}

    (value, further), gradient = jax.value_and_grad(loss, has_aux=True)(W, X)
    np.testing.assert_allclose(value, jnp.mean((X @ W) ** 2), rtol=0.01)
    assert further["text"] == "kept"
    assert further["count"].dtype == jnp.int32
    assert gradient.dtype == further["out"].dtype == jnp.float32


def test_forms_of_a_decorator():
    @autocast
    def first(x):
        """Says what it does."""
        return x @ W

    @autocast(policy="mixed_float16")
    def second(x):
        return x @ W

    @functools.partial(autocast, policy="mixed_float16")
    def third(x):
        return x @ W

    assert first.__doc__ == "Says what it does."
    assert dtypes(jax.make_jaxpr(first)(X), "dot_general")[0][1] == ("bfloat16",)
    for function in (second, third):
        assert dtypes(jax.make_jaxpr(function)(X), "dot_general")[0][1] == ("float16",)


def test_results_come_back_in_the_output_dtype():
    policy = Policy.parse("mixed_bfloat16, output_dtype=bfloat16")
    assert autocast(lambda x: x + 1.0, policy)(X).dtype == jnp.bfloat16
    half = autocast(lambda x: (x @ W).astype(jnp.float16))(X)
    assert half.dtype == jnp.float16


def test_float32_is_not_even_traced():
    assert autocast(lambda x: x if x[0, 0] > 0 else None, "float32")(X) is X


def test_a_policy_for_the_whole_process_wins_but_over_float32():
    with override_policy("mixed_float16"):
        low = jax.make_jaxpr(autocast(lambda x: x @ W))(X)
        full = jax.make_jaxpr(autocast(lambda x: x @ W, "float32"))(X)
    assert dtypes(low, "dot_general")[0][1] == ("float16",)
    assert dtypes(full, "dot_general")[0][1] == ("float32",)


def branching(params, flag, *more):
    if more[0] > 0:
        return params["w"]
    return params["w"][int(flag[1])]


class Branching:
    def __call__(self, x):
        return float(x)

    def method(self, x):
        return int(x)


NAMED = {
    "branching": (branching, ({"w": W}, [1, W[0, 0]], X[0, 0]), "more[0]"),
    "partial": (functools.partial(branching, {"w": W}), ([1, W[0, 0]], -1.0), "flag[1]"),
    "__call__": (Branching(), (W[0, 0],), "x"),
    "method": (Branching().method, (W[0, 0],), "x"),
    "jit": (jax.jit(branching), ({"w": W}, [1, W[0, 0]], X[0, 0]), "more[0]"),
}


@pytest.mark.parametrize("name", NAMED)
def test_errors_of_jax_speak_of_the_function_and_its_arguments(name):
    function, args, argument = NAMED[name]
    with pytest.raises(TypeError) as caught:
        autocast(function)(*args)
    own = {"partial": "branching", "jit": "branching"}.get(name, name)
    assert f"while tracing the function {own} at {__file__}:" in str(caught.value)
    assert f"the argument {argument}" in str(caught.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:flax.*")
def test_so_they_do_of_parameters_in_modules():
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"the argument args\[0\].*bias"):
        autocast(lambda layer, x: x if layer.bias[...][0] > 0 else layer(x))(layer, X)


BAD = [
    (
        lambda: autocast(3),
        UsageError,
        r"a function.*got 3\. Write autocast\(function, pol",
    ),
    (lambda: autocast(dict), UsageError, "needs a function"),
    (lambda: autocast(_suspended), UsageError, "runs in one go"),
    (lambda: autocast(jnp.sin, "half"), PolicyError, "Did you mean 'mixed_float16'"),
    (
        lambda: autocast(jnp.sin, "mixed_float16, compute_dtype=float64"),
        PolicyError,
        "compute_dtype to be one of float32, bfloat16, float16, got 'float64'",
    ),
    (
        lambda: autocast(jnp.sin, "mixed_float16, rules=torch-2.13")(X),
        PolicyError,
        "'torch-2.13'.*another framework. Write rules=halfstep-1",
    ),
    (
        lambda: autocast(jnp.sin, "mixed_float16, rules=halfstep-1 + lax::dot_generl=full")(X),
        RuleError,
        "got 'lax::dot_generl'. Did you mean 'lax::dot_general'",
    ),
    (
        lambda: autocast(jnp.sin, "mixed_float16, rules=halfstep-1 + matmul[device=gpu]=full")(X),
        RuleError,
        "got device=gpu for 'matmul'. Write device=cuda",
    ),
    (lambda: autocast(jnp.sin, scale=-1.0), ScaleError, "scale to be a number above 0.*got -1.0"),
    (
        lambda: autocast(jnp.sin, "mixed_float16", scale="dynamic"),
        ScaleError,
        r"got 'dynamic'.*policy='mixed_float16, scale=static\(1024\.0\)'",
    ),
    (
        lambda: autocast(jnp.sin, scale="1024"),
        ScaleError,
        r"got '1024'\. Write scale=1024\.0, without quotes",
    ),
    (
        lambda: autocast(jnp.sin, "mixed_float16", scale=jnp.ones(3)),
        ScaleError,
        r"array of one.*got an array of shape \(3,\)\. Write scale=1024\.0",
    ),
    (lambda: autocast("float32"), UsageError, r"Write @autocast\(policy='float32'\)"),
    (lambda: autocast(Policy()), UsageError, r"Write @autocast\(policy=Policy\("),
    (lambda: _as_context("mixed_float16"), UsageError, r"no context: write autocast\(function, p"),
    (
        lambda: _as_context(policy="mixed_float16"),
        UsageError,
        r"a function, got a with statement\. In JAX it transforms a function and is no context",
    ),
    (
        lambda: autocast(jnp.sin, "mixed_float16, rules=halfstep-1+dot=full"),
        RuleError,
        r"Families are matmul, .*'aten::dot' in PyTorch, 'lax::dot_general' and the like in JAX",
    ),
    (
        lambda: autocast(jnp.sin, "mixed_float16, rules=halfstep-1+lax::dot=full")(X),
        RuleError,
        r"got 'lax::dot'\. Did you mean 'lax::dot_general'",
    ),
]


def _as_context(*args, **kwargs):
    with autocast(*args, **kwargs):
        pytest.fail("It is no context.")


def _suspended():
    yield X


@pytest.mark.parametrize(("call", "error", "text"), BAD)
def test_what_makes_no_sense_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
