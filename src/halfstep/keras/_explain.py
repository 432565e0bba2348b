"""Which layer of a model computes in what, what is kept wide, and why."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import keras

from halfstep.core import replace
from halfstep.errors import UsageError
from halfstep.keras._explain_training import told_of_training
from halfstep.keras._kept import BY_KERAS, raw_data
from halfstep.keras._policies import LOW
from halfstep.keras._private import Functional, Layer, backend
from halfstep.keras._wide import low_dtype, watching

_HEADER = ("layer", "kind", "compute", "variables", "output", "kept wide")


@dataclass(frozen=True)
class LayerRow:
    """What a layer of a model does.

    Args:
        path: Its path, by which a policy map names it.
        kind: Its class.
        compute_dtype: What its operations run in, but for those kept wide.
        variable_dtypes: What its variables and those of the layers in it are kept in.
        output_dtypes: What it hands on; empty if it did not run.
        kept_wide: What of it runs in a wider format, or is handed on in one, and why.

    Example:
        >>> row = LayerRow("model/dense", "Dense", "float16", ("float32",), ("float16",), ())
        >>> row.compute_dtype
        'float16'
    """

    path: str
    kind: str
    compute_dtype: str
    variable_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    kept_wide: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """What the layers of a model compute in; made by `explain`.

    Print it for a table.

    Args:
        rows: The model, then the layers in it in the order in which they run.
        training: What is to say about its losses, its optimizers and its policy map.

    Example:
        >>> row = LayerRow("dense", "Dense", "float16", ("float32",), ("float16",), ())
        >>> print(Explanation((row,)))
        layer  kind   compute  variables  output   kept wide
        dense  Dense  float16  float32    float16  -
    """

    rows: tuple[LayerRow, ...]
    training: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the rows and notes as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [_HEADER, *(line for row in self.rows for line in _lines(row))]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        body = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*body, *self.training])


def explain(model: Any, *inputs: Any) -> Explanation:
    """Returns what each layer of a model computes in, what is kept wide, and why.

    The model runs once, without values where the backend can, so what is told are the dtypes that
    occur, under the policy that is in force now.

    Args:
        model: The model or layer.
        inputs: What it is called with, or arrays like it. A functional model needs none.

    Raises:
        UsageError: It is no model or layer, or needs inputs.

    Example:
        >>> import keras
        >>> from halfstep.keras import set_global_policy
        >>> set_global_policy("mixed_bfloat16")
        >>> layers = [keras.Input((4,)), keras.layers.Dense(2, activation="softmax", name="head")]
        >>> model, head = explain(keras.Sequential(layers)).rows
        >>> model.output_dtypes, head.compute_dtype, head.kept_wide
        (('float32',), 'bfloat16', ('softmax: small probabilities round to 0 and ...',))
        >>> set_global_policy("float32")
    """
    seen: dict[int, _Seen] = {}
    specs = _specs(_checked(model), inputs)
    with _watched(seen):
        backend.compute_output_spec(_with_dtypes(model), *specs)
    layers = {id(each): each for each in model._flatten_layers() if _is_told(each)}
    order = [*filter(layers.get, seen), *(key for key in layers if key not in seen)]
    rows = tuple(_row(layers[key], seen.get(key, _Seen())) for key in order)
    added = {_path(layers[key]): seen[key].added[0] for key in order if _adds(seen.get(key))}
    return Explanation(rows, tuple(told_of_training(model, layers.values(), added)))


def _checked(model: Any) -> Any:
    if isinstance(model, Layer):
        return model
    raise UsageError(
        f"explain needs a model or layer of Keras, got {model!r}. Write explain(model, inputs)."
    )


def _specs(model: Any, inputs: tuple[Any, ...]) -> Any:
    """Returns inputs without values."""
    if inputs:
        return keras.tree.map_structure(_spec, inputs)
    if isinstance(model, keras.Sequential) and model.inputs:
        return (model.inputs[0],)
    if isinstance(model, Functional):
        return (model.input,)
    raise UsageError(
        f"explain needs inputs to call {model.name!r} with, because it is neither a functional"
        " model nor a built sequential one, got none. Write explain(model, inputs)."
    )


def _with_dtypes(model: Any) -> Callable[..., Any]:
    """Returns what calls a model, but not with tensors that do not tell the truth."""

    def call(*inputs: Any) -> Any:
        # Keras reads variables in float32 there, whatever the layer computes in, and when it
        # cannot run a model so it runs it with values.
        if any("meta" in str(getattr(each, "device", "")) for each in keras.tree.flatten(inputs)):
            raise NotImplementedError("halfstep: a device without values")
        return model(*inputs, training=False)

    return call


def _spec(value: Any) -> Any:
    if not hasattr(value, "shape"):
        return value
    return keras.KerasTensor(value.shape, backend.standardize_dtype(value.dtype))


@dataclass(frozen=True)
class _Seen:
    """What was seen of a layer that ran."""

    outputs: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)


@contextlib.contextmanager
def _watched(seen: dict[int, _Seen]) -> Iterator[None]:
    """Notes what every layer hands on, and what runs wide in it, until the block ends."""
    running: list[_Seen] = []

    def call(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
        running.append(seen.setdefault(id(layer), _Seen()))
        try:
            result = original(layer, *args, **kwargs)
            running[-1].outputs.extend(_float_dtypes(keras.tree.flatten(result)))
        finally:
            running.pop()
        return result

    def add_loss(original: Callable[..., Any], layer: Any, losses: Any) -> Any:
        low = filter(None, map(low_dtype, keras.tree.flatten(losses)))
        seen.setdefault(id(layer), _Seen()).added.extend(low)
        return original(layer, losses)

    undo = replace(Layer, "__call__", call), replace(Layer, "add_loss", add_loss)
    watching.place = lambda: running[-1].reasons.append
    try:
        yield
    finally:
        watching.place = None
        for each in undo:
            each()


def _row(layer: Any, seen: _Seen) -> LayerRow:
    return LayerRow(
        path=_path(layer),
        kind=type(layer).__name__,
        compute_dtype=layer.compute_dtype,
        variable_dtypes=_unique(_float_dtypes(layer.variables)),
        output_dtypes=_unique(seen.outputs),
        kept_wide=_unique([*seen.reasons, *_own_reasons(layer)]),
    )


def _own_reasons(layer: Any) -> Iterator[str]:
    """Yields what keeps a layer wide apart from single operations."""
    compute, by_keras = layer.compute_dtype, BY_KERAS.get(type(layer).__name__)
    if compute in LOW and by_keras:
        yield f"by Keras itself: {by_keras}"
    elif raw_data(layer) and compute not in LOW and layer.dtype_policy.compute_dtype in LOW:
        yield f"all of it: {raw_data(layer)}"
    elif compute == "float32" and keras.config.dtype_policy().compute_dtype in LOW:
        yield f"all of it: its own dtype is {layer.dtype_policy.name}"


def _path(layer: Any) -> str:
    return str(layer.path or layer.name)


def _adds(seen: _Seen | None) -> bool:
    return seen is not None and bool(seen.added)


def _is_told(layer: Any) -> bool:
    return isinstance(layer, Layer) and not isinstance(layer, keras.layers.InputLayer)


def _float_dtypes(tensors: Any) -> list[str]:
    dtypes = [backend.standardize_dtype(t.dtype) for t in tensors if hasattr(t, "dtype")]
    return [each for each in dtypes if backend.is_float_dtype(each)]


def _unique(values: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _lines(row: LayerRow) -> Iterator[tuple[str, ...]]:
    """Yields the cells of a row, with a line for each reason."""
    first, *others = row.kept_wide or ("-",)
    dtypes = (" ".join(each) or "-" for each in (row.variable_dtypes, row.output_dtypes))
    yield (row.path, row.kind, row.compute_dtype, *dtypes, first)
    for reason in others:
        yield ("", "", "", "", "", reason)
