"""Optimizers of optax, and a loop that trains with given gradients.

XLA contracts a product and a sum to one rounding where both are in one loop, and orders sums as
the loop has it: two programs of the same operations differ in last bits. So results are compared
operation by operation, or in a process that compiles for a processor without such an instruction.
"""

import jax
import optax

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "lion": lambda: optax.lion(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "scheduled": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 20)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "adafactor": lambda: optax.adafactor(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3)),
}


def train(optimizer, params, grads, *, jit, apply=optax.apply_updates):
    """Yields the parameters and the state after each step."""

    def step(params, state, grad):
        updates, state = optimizer.update(grad, state, params)
        return apply(params, updates), state

    step = jax.jit(step) if jit else step
    # Most of optax promotes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(params)
        for grad in grads:
            params, state = step(params, state, grad)
            yield params, state
