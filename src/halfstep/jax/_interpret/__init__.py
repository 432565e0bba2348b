"""Runs what a function was traced to, each operation in the dtype that the rules say."""

# Loading these makes the equations that hold other programs known to the interpreter.
from halfstep.jax._interpret import _custom as _custom
from halfstep.jax._interpret import _loops as _loops
from halfstep.jax._interpret._calls import REGION as REGION
from halfstep.jax._interpret._context import Context as Context
from halfstep.jax._interpret._context import Decision as Decision
from halfstep.jax._interpret._context import Note as Note
from halfstep.jax._interpret._context import context_of as context_of
from halfstep.jax._interpret._interpreter import interpret as interpret
from halfstep.jax._interpret._rewrite import wanted_dtypes as wanted_dtypes
from halfstep.jax._interpret._true import holds_true as holds_true
from halfstep.jax._interpret._values import FLOAT32 as FLOAT32
from halfstep.jax._interpret._values import Value as Value
from halfstep.jax._interpret._values import is_low as is_low
from halfstep.jax._interpret._values import parameters as parameters
