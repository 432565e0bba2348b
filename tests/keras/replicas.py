"""A script that trains on two replicas, of which one overflows once, and writes what it did."""

import sys

import tensorflow as tf

DEVICE = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(DEVICE, [tf.config.LogicalDeviceConfiguration()] * 2)

import keras  # noqa: E402

from halfstep.keras import LossScaleOptimizer, MasterOptimizer  # noqa: E402


def trained(dtype, compiles, wrap):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = keras.Variable([256.0], dtype=dtype)
        optimizer = wrap(keras.optimizers.SGD(0.5))
        optimizer.build([weight])
        optimizer.scale_loss(1.0)

    def replica(second):
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.apply([tf.where(number == 1, second, [4.0])], [weight])

    def step(second):
        strategy.run(replica, (second,))

    step = tf.function(step) if compiles else step
    for second in (4.0, float("inf"), 2.0):
        step(tf.constant([second]))
    return weight, optimizer


def scaled(inner):
    return LossScaleOptimizer(inner, initial_scale=8.0)


def main(compiles):
    weight, optimizer = trained("float32", compiles, scaled)
    sys.stdout.write(f"{weight.numpy().tolist()} {optimizer.counts}\n")
    weight, optimizer = trained("bfloat16", compiles, lambda inner: scaled(MasterOptimizer(inner)))
    master = optimizer.inner_optimizer.variables[2]
    sys.stdout.write(f"{weight.numpy().tolist()} {master.numpy().tolist()}\n")


main(sys.argv[1] == "compiled")
