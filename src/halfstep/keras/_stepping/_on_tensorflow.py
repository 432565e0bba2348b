"""Steps on the TensorFlow backend of Keras: eager, in graphs and on several replicas."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from halfstep.errors import UsageError

_LOW = (tf.float16, tf.bfloat16)


def widened(grad: Any) -> Any:
    """Returns a low-precision gradient in float32, others as they are."""
    return tf.cast(grad, tf.float32) if grad.dtype in _LOW else grad


def eager() -> bool:
    """Returns whether what is assigned now is assigned once."""
    return bool(tf.executing_eagerly())


def divided(grads: Sequence[Any], scale: Any) -> list[Any]:
    """Returns the gradients over the scale; those of embeddings keep their indices."""
    return [None if grad is None else _quotient(widened(grad), scale) for grad in grads]


def _quotient(grad: Any, scale: Any) -> Any:
    scale = tf.cast(scale, grad.dtype)
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / scale, grad.indices, grad.dense_shape)
    return grad / scale


def host(value: Any) -> Any:
    """Returns the numbers of a tensor on the host."""
    return keras.ops.convert_to_numpy(value).tolist()


def all_finite(grads: Sequence[Any], undivided: Any) -> Any:
    """Returns whether every number is finite, in every replica."""
    checks = [tf.reduce_all(tf.math.is_finite(values(grad))) for grad in grads]
    finite = tf.reduce_all(tf.stack(checks)) if checks else tf.constant(True)
    return _in_every_replica(finite) if _replicas() > 1 else finite


def values(grad: Any) -> Any:
    """Returns the numbers that a gradient holds."""
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def _replicas() -> int:
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def _in_every_replica(finite: Any) -> Any:
    # The gradients are summed only by the inner optimizer: each replica sees only its own here.
    replica = tf.distribute.get_replica_context()
    if replica is None:
        raise UsageError(
            "LossScaleOptimizer.apply needs to be called in each replica, got a call across "
            "replicas. Call it inside of the function that strategy.run() receives."
        )
    bad = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(replica.all_reduce(tf.distribute.ReduceOp.SUM, bad), 0.0)


def known(finite: Any) -> bool | None:
    """Returns the outcome in eager mode on one replica, where it is there."""
    return bool(finite) if tf.executing_eagerly() and _replicas() == 1 else None


def branch(
    finite: Any, grads: list[Any], update: Callable[[list[Any]], None], cell: Any, written: Any
) -> None:
    """Takes or skips a step inside of a graph or of replicas."""
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        _cond(finite, lambda: update(grads), cell)
        return

    # A tf.cond whose branches synchronise replicas must not be inside of one.
    def merged(strategy: Any, outcomes: Any, gradients: Any) -> None:
        each = functools.partial(strategy.extended.call_for_each_replica, update, (gradients,))
        _cond(strategy.experimental_local_results(outcomes)[0], each, cell)

    tf.distribute.get_replica_context().merge_call(merged, args=(finite, grads))


def _cond(finite: Any, update: Callable[[], object], cell: Any) -> None:
    def take() -> Any:
        update()
        cell.grow()
        return finite

    def skip() -> Any:
        cell.back_off()
        return finite

    tf.cond(finite, take, skip)


def wide_product(scale: Any, factor: float) -> Any:
    """Returns the product rounded once to float32."""
    return tf.cast(tf.cast(scale, tf.float64) * factor, tf.float32)
