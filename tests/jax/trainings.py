"""Trainings of one small CNN on real images, as the users of each library write them."""

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from sklearn.datasets import load_digits

from halfstep.jax import autocast


def data():
    digits = load_digits()
    images = digits.images.astype("float32")[..., None] / 16.0
    train, held_out = np.split(np.random.RandomState(0).permutation(len(images)), [1437])
    labels = digits.target.astype("int32")
    return images[train], labels[train], images[held_out], labels[held_out]


IMAGES, LABELS, TEST_IMAGES, TEST_LABELS = data()


def batches(epochs=4, seed=0):
    order = np.random.RandomState(seed)
    for _ in range(epochs):
        for batch in np.split(order.permutation(1437)[:1408], 22):
            yield jnp.asarray(IMAGES[batch]), jnp.asarray(LABELS[batch])


def accuracy(logits):
    return float((np.argmax(logits, axis=1) == TEST_LABELS).mean())


def cross_entropy(logits, labels):
    rows = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(rows, labels[:, None], axis=1))


def plain(policy):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"conv": (3, 3, 1, 16), "hidden": (1024, 64), "out": (64, 10)}
    params = {
        name: (jax.random.normal(key, shape) * np.prod(shape[:-1]) ** -0.5, jnp.zeros(shape[-1]))
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }

    def forward(params, images):
        weights, bias = params["conv"]
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(images, weights, (1, 1), "SAME", dimension_numbers=numbers)
        x = jax.nn.relu(x + bias).reshape(len(images), -1)
        x = jax.nn.gelu(x @ params["hidden"][0] + params["hidden"][1])
        return x @ params["out"][0] + params["out"][1]

    @jax.jit
    def step(params, momentum, images, labels):
        loss = autocast(lambda params: cross_entropy(forward(params, images), labels), policy)
        gradient = jax.grad(loss)(params)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        return jax.tree.map(lambda p, m: p - 0.05 * m, params, momentum), momentum

    momentum = jax.tree.map(jnp.zeros_like, params)
    for images, labels in batches():
        params, momentum = step(params, momentum, images, labels)
    return accuracy(jax.jit(autocast(forward, policy))(params, TEST_IMAGES))


def functional(init, apply, policy):
    """Trains what has parameters apart from functions, as linen and Haiku do."""
    import optax

    rule = optax.adam(2e-3)
    params = init(jax.random.key(0), jnp.ones((1, 8, 8, 1)))
    state = rule.init(params)

    @autocast(policy=policy)
    def loss(params, images, labels):
        return cross_entropy(apply(params, images), labels)

    @jax.jit
    def step(params, state, images, labels):
        updates, state = rule.update(jax.grad(loss)(params, images, labels), state)
        return optax.apply_updates(params, updates), state

    for images, labels in batches():
        params, state = step(params, state, images, labels)
    return accuracy(jax.jit(autocast(apply, policy))(params, TEST_IMAGES))


def linen(policy):
    from flax import linen as nn

    layers = [nn.Conv(16, (3, 3)), nn.relu, lambda x: x.reshape(x.shape[0], -1)]
    model = nn.Sequential([*layers, nn.Dense(64), nn.gelu, nn.LayerNorm(), nn.Dense(10)])
    return functional(model.init, model.apply, policy)


def haiku(policy):
    import haiku as hk

    def forward(images):
        layers = [hk.Conv2D(16, 3), jax.nn.relu, hk.Flatten(), hk.Linear(64), jax.nn.gelu]
        return hk.Sequential([*layers, hk.Linear(10)])(images)

    model = hk.without_apply_rng(hk.transform(forward))
    return functional(model.init, model.apply, policy)


def nnx(policy):
    import optax
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs, momentum=0.9)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.hidden = nnx.Linear(1024, 64, rngs=rngs)
            self.out = nnx.Linear(64, 10, rngs=rngs)

        @autocast(policy=policy)
        def __call__(self, images):
            x = nnx.relu(self.norm(self.conv(images))).reshape(images.shape[0], -1)
            return self.out(nnx.gelu(self.hidden(self.dropout(x))))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, images, labels):
        gradient = nnx.grad(lambda model: cross_entropy(model(images), labels))(model)
        optimizer.update(model, gradient)

    model.train()
    for images, labels in batches():
        step(model, optimizer, images, labels)
    model.eval()
    return accuracy(model(jnp.asarray(TEST_IMAGES)))


def equinox(policy):
    import equinox as eqx
    import optax

    keys = jax.random.split(jax.random.key(0), 3)
    flat = eqx.nn.Lambda(jnp.ravel)
    layers = [eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0]), eqx.nn.Lambda(jax.nn.relu), flat]
    layers += [eqx.nn.Linear(1024, 64, key=keys[1]), eqx.nn.Lambda(jax.nn.gelu)]
    model = eqx.nn.Sequential([*layers, eqx.nn.Linear(64, 10, key=keys[2])])
    rule = optax.adam(2e-3)
    state = rule.init(eqx.filter(model, eqx.is_inexact_array))

    @autocast(policy=policy)
    def forward(model, images):
        return jax.vmap(model)(images.transpose(0, 3, 1, 2))

    def loss(model, images, labels):
        return cross_entropy(forward(model, images), labels)

    @eqx.filter_jit
    def step(model, state, images, labels):
        gradient = eqx.filter_grad(loss)(model, images, labels)
        updates, state = rule.update(gradient, state)
        return eqx.apply_updates(model, updates), state

    for images, labels in batches():
        model, state = step(model, state, images, labels)
    return accuracy(eqx.filter_jit(forward)(model, jnp.asarray(TEST_IMAGES)))
