import jax.numpy as jnp
import pytest

from halfstep.errors import MissingExtraError
from halfstep.jax import apply_if_finite, clip_by_global_norm, global_norm, with_masters


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: apply_if_finite(None), "apply_if_finite"),
        (lambda: with_masters(None), "with_masters"),
        (lambda: clip_by_global_norm(1.0), "clip_by_global_norm"),
    ],
)
def test_without_optax_an_error_says_what_to_install(monkeypatch, build, name):
    monkeypatch.setattr("halfstep.jax._transformations._installed.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as caught:
        build()
    assert str(caught.value) == (
        f"halfstep.jax.{name} needs optax, and it is not installed. "
        "Run: pip install 'halfstep[optax]'"
    )
    assert global_norm(jnp.array([3.0, 4.0])) == 5.0
