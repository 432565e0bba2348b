"""Whether a program is linear, so that its derivative is the program itself.

What gradients went through is, but for a backward that somebody wrote.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from halfstep.jax._ops import plain_name
from halfstep.jax._primitives import linear_p
from halfstep.jax._private import Literal, sub_jaxprs

_IN_ALL = """
    add add_any sub neg real imag complex conj convert_element_type reduce_precision concatenate pad
    broadcast_in_dim reshape transpose squeeze expand_dims rev slice split tile copy copy_p name
    reduce_sum cumsum reduce_window_sum fft sharding_constraint layout_constraint device_put
    optimization_barrier psum psum_invariant reduce_scatter all_gather all_gather_invariant
    all_to_all ppermute pvary pcast scatter_add scatter_sub
"""
_IN_ONE = "mul dot_general conv_general_dilated ragged_dot_general"
_IN_FIRST = "div gather dynamic_slice select_and_scatter_add select_and_gather_add"
_CALLS = f"""
    jit pjit closed_call core_call remat2 checkpoint remat cond shard_map {linear_p.name}
"""

Moves = Sequence[bool]


def is_linear(jaxpr: Any, moves: Moves) -> bool:
    """Returns whether a program is linear in some of its operands, as far as can be told.

    Args:
        jaxpr: The program, without constants.
        moves: In which of them.
    """
    moving = set(compress(jaxpr.invars, moves))
    for equation in jaxpr.eqns:
        moved = [not isinstance(atom, Literal) and atom in moving for atom in equation.invars]
        if any(moved):
            rule = _RULES.get(plain_name(equation.primitive.name))
            if rule is None or not rule(equation, moved):
                return False
            moving.update(equation.outvars)
    return True


def _in_calls(equation: Any, moves: Moves) -> bool:
    """Returns whether held programs are, which take operands of the equation, from the last on."""
    held = list(sub_jaxprs(equation.params))
    return all(
        not any(moves[: len(moves) - len(jaxpr.invars)])
        and is_linear(jaxpr, moves[len(moves) - len(jaxpr.invars) :])
        for jaxpr in held
    )


def _in_loops(equation: Any, moves: Moves) -> bool:
    first = equation.params["num_consts"]
    last = first + equation.params["num_carry"]
    # What is handed on may move from the second turn on.
    return _in_calls(equation, [*moves[:first], *[True] * (last - first), *moves[last:]])


_LISTS: dict[str, Callable[[Any, Moves], bool]] = {
    _IN_ALL: lambda equation, moves: True,
    _IN_ONE: lambda equation, moves: sum(moves) == 1,
    _IN_FIRST: lambda equation, moves: not any(moves[1:]),
    "triangular_solve select_n": lambda equation, moves: not moves[0],
    "dynamic_update_slice": lambda equation, moves: not any(moves[2:]),
    _CALLS: _in_calls,
    "scan": _in_loops,
}
_RULES = {name: rule for names, rule in _LISTS.items() for name in names.split()}
