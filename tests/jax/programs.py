"""What tests ask of traced programs."""

from halfstep.jax._private import sub_jaxprs


def equations(jaxpr):
    """Yields the equations of a program and of those inside, without derivative rules."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in sub_jaxprs(equation.params):
            yield from equations(inner)


def dtypes(closed, name):
    """Returns the dtypes in which operations of that name run, as (operands, results)."""
    return [
        (
            tuple(str(var.aval.dtype) for var in each.invars),
            tuple(str(var.aval.dtype) for var in each.outvars),
        )
        for each in equations(closed.jaxpr)
        if each.primitive.name == name
    ]
