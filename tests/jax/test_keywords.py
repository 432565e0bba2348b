"""What is written by habit of another autocast is answered with what to write here."""

import ml_dtypes
import numpy as np
import optax
import pytest
from jax import numpy as jnp

from halfstep.errors import ScaleError, UsageError
from halfstep.jax import apply_if_finite, autocast

INSTEAD = [
    ({"dtype": jnp.float16}, r"dtype=float16\. .*autocast\(function, 'mixed_float16'\)"),
    ({"dtype": "bfloat16"}, r"dtype='bfloat16'\. .*autocast\(function, 'mixed_bfloat16'\)"),
    ({"dtype": np.dtype(ml_dtypes.bfloat16)}, r"autocast\(function, 'mixed_bfloat16'\)"),
    ({"compute_dtype": jnp.float32}, r"autocast\(function, 'float32'\)"),
    ({"output_dtype": jnp.bfloat16}, "policy='mixed_bfloat16, output_dtype=bfloat16'"),
    (
        {"rules": "halfstep-1 + matmul=full"},
        r"policy='mixed_bfloat16, rules=halfstep-1 \+ matmul=full'",
    ),
    ({"dtype": jnp.int8}, r"dtype=int8\. Policies compute in float16, bfloat16 or float32: write"),
    ({"dtype": "fp16"}, r"autocast\(function, 'mixed_float16'\)"),
    ({"rules": None}, r"got rules=None\. Leave it out\."),
    ({"enabled": False}, r"enabled=False\. Write policy='float32'"),
    ({"enabled": True}, r"enabled=True\. Leave it out"),
    ({"enabled": jnp.bool_(True)}, "policy='mixed_bfloat16' if enabled else 'float32'"),
    ({"cache_enabled": True}, "in jax.jit, what is cast is cast once"),
    ({"device_type": "cuda"}, "It runs where its arrays are: leave it out"),
    ({"init_scale": 2.0**10}, r"Write scale=1024\.0, by name"),
    ({"loss_scale": "dynamic"}, "policy='mixed_float16, scale=dynamic'"),
    ({"loss_scale": {"scale": 3}}, r"loss_scale=a dict\. Write scale=state"),
    ({"dtype_policy": "mixed_float16"}, "Write policy='mixed_float16'"),
    ({"static_argnums": (1,)}, "whatever is no array of real numbers is static"),
    ({"polcy": "float32"}, r"polcy='float32'\. Did you mean 'policy'"),
    ({"training": True}, "Arguments of the function are given where it is called"),
]


@pytest.mark.parametrize(("given", "text"), INSTEAD)
def test_an_argument_of_another_autocast_is_answered(given, text):
    for wrap in (lambda: autocast(jnp.sin, **given), lambda: autocast(**given)):
        with pytest.raises(UsageError, match=text):
            wrap()


def test_so_is_a_scale_by_position_and_the_name_of_a_device():
    with pytest.raises(UsageError, match=r"got 256\.0 after the policy\. Write scale=256\.0, by"):
        autocast(jnp.sin, "mixed_float16", 256.0)
    with pytest.raises(UsageError, match=r"got bfloat16 in place of the policy\. .*mixed_bfloat16"):
        autocast(jnp.sin, jnp.bfloat16)
    with pytest.raises(UsageError, match=r"the device 'cuda:0'.*@autocast\(policy='mixed_bfloat1"):
        autocast("cuda:0")
    with pytest.raises(UsageError, match=r"dtype=float16\."):
        autocast("cuda", dtype=jnp.float16)


def test_what_is_written_instead_is_accepted():
    for policy in ("mixed_bfloat16, output_dtype=bfloat16", "mixed_float16, scale=dynamic"):
        assert autocast(jnp.sin, policy)(jnp.ones(2)).shape == (2,)


def test_a_state_that_is_no_scale_is_not_printed_as_a_whole():
    optimizer = apply_if_finite(optax.sgd(0.1), loss_scale="dynamic")
    state = optimizer.init({"w": jnp.ones(1000)})
    with pytest.raises(ScaleError, match=r"got a tuple\. Write scale=state\[1\]\.$"):
        autocast(jnp.sin, "mixed_float16", scale=((), state))
    with pytest.raises(ScaleError, match=r"got a dict\. Write scale=1024\.0, for example\.$"):
        autocast(jnp.sin, "mixed_float16", scale={"w": jnp.ones(1000)})
    with pytest.raises(ScaleError, match="got a Holder that holds an array of shape"):
        autocast(jnp.sin, "mixed_float16", scale=Holder())
    assert autocast(jnp.sin, "mixed_float16", scale=((), state)[1])(jnp.ones(2)).shape == (2,)


class Holder:
    loss_scale = jnp.ones(3)
