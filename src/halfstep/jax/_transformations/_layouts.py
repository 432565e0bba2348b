"""How float32 masters of low-precision parameters are kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from halfstep.core._text import suggestion
from halfstep.errors import UsageError
from halfstep.jax._numbers import is_low
from halfstep.jax._transformations._bits import FORMATS, merge, rounded, same_bits, split


@dataclass(frozen=True)
class Layout:
    """What is kept beside a parameter, and how it is read and written.

    Args:
        dtypes: Of which parameters it can keep masters.
        start: From a parameter to what is kept first.
        read: From a parameter and what is kept to the master.
        low: From a master and a dtype to the parameter that belongs to it, in float32.
        keep: From a parameter, its new master and its update to what is kept next.
    """

    dtypes: tuple[str, ...]
    start: Callable[[Any], Any]
    read: Callable[[Any, Any], Any]
    low: Callable[[Any, Any], Any]
    keep: Callable[[Any, Any, Any], Any]

    def step(self, param: Any, master: Any) -> tuple[Any, Any]:
        """Returns the update of a parameter that belongs to a new master, and what is kept."""
        now, low = widened(param), self.low(master, param.dtype)
        # The zero that changes no number, not even a negative zero.
        update = jnp.where(now == low, -0.0, low - now)
        return update, self.keep(param, master, update)

    def check(self, path: Any, param: Any) -> None:
        """Refuses a parameter whose master cannot be kept."""
        name = jnp.result_type(param).name
        if is_low(param) and name not in self.dtypes:
            keeps = "layout='cast'" if name in FORMATS else "another dtype"
            raise UsageError(
                f"with_masters needs parameters in {', '.join(self.dtypes)} or float32 in this "
                f"layout, got {name} at {jax.tree_util.keystr(path) or 'the root'}. Write {keeps}."
            )


def chosen(name: Any) -> Layout:
    """Returns the layout of a name."""
    if name not in LAYOUTS:
        raise UsageError(
            f"with_masters needs layout to be 'cast' or 'split', got {name!r}."
            f"{suggestion(name, LAYOUTS) or ' Write for example split.'}"
        )
    return LAYOUTS[name]


def widened(leaf: Any) -> Any:
    """Returns a low-precision leaf in float32, others as they are."""
    return leaf.astype(jnp.float32) if is_low(leaf) else leaf


def _read_cast(param: Any, master: Any) -> Any:
    now = widened(param)
    return jnp.where(rounded(master, param.dtype) == now, master, now)


def _keep_split(param: Any, master: Any, update: Any) -> Any:
    """Returns what the parameter will lack; nothing, where the update cannot bring it there."""
    low, remainder = split(master)
    reached = rounded(widened(param) + update, param.dtype)
    return jnp.where(same_bits(reached, low), remainder, jnp.int16(0))


LAYOUTS = {
    "cast": Layout(
        dtypes=tuple(FORMATS),
        start=widened,
        read=_read_cast,
        low=rounded,
        keep=lambda param, master, update: master,
    ),
    "split": Layout(
        dtypes=("bfloat16",),
        start=lambda param: jnp.zeros_like(param, jnp.int16),
        read=merge,
        low=lambda master, dtype: split(master)[0],
        keep=_keep_split,
    ),
}
