"""What halfstep knows of each JAX primitive: one table per question, read by everything else."""

import re

_LISTS: dict[str, str] = {
    "matmul": "dot_general ragged_dot_general",
    "convolution": "conv_general_dilated",
    "reduction": """
        reduce_sum reduce_prod reduce_window_sum cumsum cumprod cumlogsumexp
        scatter_add scatter_sub scatter_mul psum psum_invariant reduce_scatter
    """,
    "exponential": """
        exp exp2 expm1 log log1p pow integer_pow square rsqrt cbrt
        tan sinh cosh asin acos asinh acosh atanh erf_inv
        lgamma digamma polygamma igamma igammac igamma_grad_a zeta
        bessel_i0e bessel_i1e regularized_incomplete_beta
    """,
    "pointwise": """
        add add_any sub mul div rem max min neg abs sign floor ceil round sqrt
        tanh sin cos atan atan2 logistic erf erfc is_finite
        eq ne lt le gt ge eq_to lt_to le_to
    """,
    "masking": "select_n clamp pad",
    "indexing": """
        concatenate gather scatter scatter_min scatter_max dynamic_update_slice
    """,
    "pooling": "reduce_window_max reduce_window_min select_and_scatter_add select_and_gather_add",
    "linear_algebra": """
        cholesky cholesky_update lu qr geqrf householder_product eig eigh svd schur hessenberg
        tridiagonal triangular_solve tridiagonal_solve
    """,
    "fourier": "fft",
}

FAMILY_OF: dict[str, str] = {
    name: family for family, names in _LISTS.items() for name in names.split()
}

_MOVING = """
    broadcast_in_dim reshape transpose squeeze expand_dims rev slice dynamic_slice copy copy_p name
    stop_gradient sharding_constraint layout_constraint optimization_barrier device_put split tile
    sort top_k approx_top_k argmax argmin reduce_max reduce_min cummax cummin
    pmax pmin all_gather all_gather_invariant all_to_all ppermute pvary pcast
"""
_RESHAPING = """
    broadcast_in_dim reshape transpose squeeze expand_dims copy copy_p name sharding_constraint
"""

# They hand on the values they are given, so that no rule speaks of them.
MOVING = frozenset(_MOVING.split())

# Of those, the ones whose outputs are their operands in another shape or place.
RESHAPING = frozenset(_RESHAPING.split())

# What a rule may speak of.
OPERATIONS = frozenset((*FAMILY_OF, *MOVING))

# Their operands are arrays of their own, whose dtypes need not agree.
SEPARATE = frozenset(("psum", "psum_invariant", *MOVING))

# The derivative of these adds up many terms, which happens in the dtype that they run in.
SPREADING = frozenset(("broadcast_in_dim", "gather"))

# A constant here stands for "less than anything" or the like, so the largest number will do.
BOUNDING = frozenset(("select_n", "clamp", "pad", "max", "min"))

# A constant here is compared with, which its rounding could decide.
COMPARING = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"))

_NO_WORD = re.compile(r"\W")


def plain_name(primitive: str) -> str:
    """Returns the name of a primitive as the tables and rules spell it.

    Example:
        >>> plain_name("scatter-add")
        'scatter_add'
    """
    return _NO_WORD.sub("_", primitive)


def operation_name(primitive: str) -> str:
    """Returns the name by which rules speak of a primitive.

    Example:
        >>> operation_name("scatter-add")
        'lax::scatter_add'
    """
    return f"lax::{plain_name(primitive)}"
