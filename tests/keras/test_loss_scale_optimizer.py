import keras
import numpy as np
import pytest
from keras import ops

from halfstep.errors import ScaleError, UsageError
from halfstep.keras import LossScaleOptimizer, MasterOptimizer
from tests.keras.loops import BACKEND, LOOPS, array, compiled, eager, numbers, values_of, variable

INNER = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "AdamW with averages": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1, use_ema=True),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.5),
    "accumulation": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "averages that overwrite": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_overwrite_frequency=2
    ),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    ),
}
GRADS = ([[1.0, -2.0]], [[0.5, 3.0]], [[-4.0, 0.25]], [[2.0, 2.0]])


def test_it_is_an_optimizer_of_keras():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD())
    assert isinstance(optimizer, keras.optimizers.Optimizer)
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (2.0**15, 2000)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", INNER)
def test_training_is_that_of_the_inner_optimizer_whatever_the_scale_does(name, loop):
    plain, scaled = variable([[1.0, 2.0]]), variable([[1.0, 2.0]])
    reference = INNER[name]()
    optimizer = LossScaleOptimizer(INNER[name](), initial_scale=8.0, dynamic_growth_steps=2)
    follow, step = eager(reference, [plain]), loop(optimizer, [scaled])
    for values in GRADS:
        follow(array(values))
        scale = float(numbers(optimizer.loss_scale))
        step(array([[value * scale for value in values[0]]]))
        # An overflow between two steps changes the scale and nothing else.
        step(array([[np.inf, 1.0]]))
        assert int(numbers(optimizer.iterations)) == int(numbers(reference.iterations))
    np.testing.assert_allclose(numbers(scaled), numbers(plain), rtol=1e-6)
    for ours, theirs in zip(
        values_of(optimizer.inner_optimizer), values_of(reference), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_skipped_step_leaves_everything_as_it_is(loop, bad):
    weights = [variable([1.0, 2.0]), variable([[3.0]])]
    optimizer = LossScaleOptimizer(INNER["AdamW with averages"](), initial_scale=8.0)
    optimizer.scale_loss(1.0)
    step = loop(optimizer, weights)
    step(array([8.0, 8.0]), array([[8.0]]))
    before = [*map(numbers, weights), *values_of(optimizer.inner_optimizer)]
    step(array([8.0, 8.0]), array([[bad]]))
    after = [*map(numbers, weights), *values_of(optimizer.inner_optimizer)]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert optimizer.counts.skipped == 1


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_that_overflow_only_when_they_are_unscaled_are_skipped(loop):
    weight = variable([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**-10)
    optimizer.scale_loss(1.0)
    step = loop(optimizer, [weight])
    step(array([3e38]))
    assert numbers(weight).tolist() == [1.0]
    assert optimizer.counts.skipped == 1


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_that_overflow_in_the_dtype_of_their_variable_are_skipped(loop):
    weight = variable([1.0], dtype="float16")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=2.0**-10)
    optimizer.scale_loss(1.0)
    loop(optimizer, [weight])(array([1000.0]))
    assert numbers(weight).tolist() == [1.0]


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_in_float16_are_divided_in_float32(loop):
    weight = variable([0.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale="static(131072.0)")
    optimizer.scale_loss(1.0)
    loop(optimizer, [weight])(array([1.0], dtype="float16"))
    assert numbers(weight).tolist() == [-(2.0**-17)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_loss_is_scaled_in_float32(dtype):
    for optimizer in (LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**20),) * 2:
        scaled = optimizer.scale_loss(array(3.0, dtype=dtype))
        assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
        assert float(numbers(scaled)) == 3.0 * 2.0**20
        optimizer.build([variable([1.0])])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_static_scale_stays_and_overflows_are_skipped(loop):
    weight = variable([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale="static(1024.0)")
    optimizer.scale_loss(1.0)
    step = loop(optimizer, [weight])
    step(array([1024.0]))
    step(array([np.inf]))
    assert numbers(weight).tolist() == [0.5]
    assert optimizer.counts.scale == 1024.0


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("scaled", "after"), [(2.0**126, 1.0), (2.0**120, 0.0)])
def test_a_gradient_that_only_dividing_makes_infinite_is_skipped(loop, scaled, after):
    weight = variable([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(2.0**-124), loss_scale="static(0.0625)")
    optimizer.scale_loss(1.0)
    loop(optimizer, [weight])(array([scaled]))
    assert numbers(weight).tolist() == [after]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_variables_without_gradient_are_left_alone():
    weights = [variable([1.0]), variable([1.0])]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    optimizer.scale_loss(1.0)
    optimizer.apply([None, array([8.0])], weights)
    assert [float(numbers(weight)[0]) for weight in weights] == [1.0, 0.5]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_variables_without_gradient_are_left_alone_in_compiled_loops():
    weights = [variable([1.0]), variable([1.0])]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    optimizer.scale_loss(1.0)
    compiled(optimizer, weights)(None, array([8.0]))
    assert [float(numbers(weight)[0]) for weight in weights] == [1.0, 0.5]


@pytest.mark.parametrize("loop", LOOPS)
def test_variables_that_become_their_gradients_get_them_undivided(loop):
    amax = variable([1.0])
    amax.overwrite_with_gradient = True
    weight = variable([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    optimizer.scale_loss(1.0)
    loop(optimizer, [amax, weight])(array([5.0]), array([8.0]))
    assert (float(numbers(amax)[0]), float(numbers(weight)[0])) == (5.0, 0.5)


def test_apply_gradients_returns_the_iterations_of_the_inner_optimizer():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    optimizer.scale_loss(1.0)
    steps = optimizer.apply_gradients([(array([8.0]), variable([1.0]))])
    assert int(numbers(steps)) == 1


def test_some_of_the_variables_can_be_trained_alone():
    weights = [variable([1.0]), variable([1.0])]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    optimizer.build(weights)
    optimizer.scale_loss(1.0)
    optimizer.apply([array([8.0])], weights[1:])
    assert [float(numbers(weight)[0]) for weight in weights] == [1.0, 0.5]


def test_several_optimizers_train_under_one_scale():
    weights = [variable([1.0], name="first"), variable([1.0], name="second")]
    inner = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.5), {"second": keras.optimizers.SGD(0.25)}
        )
    )
    optimizer = LossScaleOptimizer(inner, loss_scale="static(8.0)")
    optimizer.scale_loss(1.0)
    for loop in LOOPS:
        loop(optimizer, weights)(array([8.0]), array([8.0]))
        loop(optimizer, weights)(array([8.0]), array([np.nan]))
    assert [float(numbers(weight)[0]) for weight in weights] == [0.0, 0.5]


def test_weight_decay_can_be_switched_off_through_the_wrapper():
    weights = [variable([1.0], name="kernel"), variable([1.0], name="bias")]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5, weight_decay=0.5), initial_scale=8.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.scale_loss(1.0)
    optimizer.apply([array([0.0]), array([0.0])], weights)
    assert [float(numbers(weight)[0]) for weight in weights] == [0.75, 1.0]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow has IndexedSlices")
@pytest.mark.parametrize("loop", LOOPS)
def test_sparse_gradients_are_divided_and_checked(loop):
    import tensorflow as tf

    table = variable(np.ones((4, 2)))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    optimizer.scale_loss(1.0)
    step = loop(optimizer, [table])
    for value in (8.0, np.inf):
        values, rows = tf.constant([[value, 8.0]] * 2), tf.constant([1, 1])
        step(tf.IndexedSlices(values, rows, tf.constant([4, 2])))
    assert numbers(table).tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    assert optimizer.counts.skipped == 1


@pytest.mark.skipif(BACKEND == "tensorflow", reason="Keras has no stateless_apply there")
def test_stateless_apply_returns_new_values_and_assigns_none():
    weight = variable([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    optimizer.build([weight])
    optimizer.scale_loss(1.0)
    own = [ops.copy(each.value) for each in optimizer.variables]
    trained, after = optimizer.stateless_apply(own, [array([8.0])], [ops.copy(weight.value)])
    assert numbers(trained[0]).tolist() == [0.5]
    assert (numbers(weight).tolist(), optimizer.counts.steps) == ([1.0], 0)
    assert len(after) == len(own)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"initial_scale": -1.0}, ScaleError, "min_scale <= initial_scale"),
        ({"dynamic_growth_steps": -5}, ScaleError, "1 <= dynamic_growth_steps"),
        ({"initial_scale": float("nan")}, ScaleError, "LossScaleOptimizer needs initial_scale"),
        ({"max_consecutive_skips": 0}, UsageError, "max_consecutive_skips >= 1 or None, got 0"),
        ({"loss_scale": "static"}, ScaleError, r"Write static\(1024.0\)"),
        (
            {"loss_scale": "static(8.0)", "initial_scale": 4.0},
            UsageError,
            "got loss_scale='static.8.0.' and initial_scale=4.0",
        ),
        ({"clipnorm": 1.0}, ValueError, "on the `inner_optimizer`"),
        ({"dynamic": False}, ValueError, "loss_scale_factor"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, error, text):
    with pytest.raises(error, match=text):
        LossScaleOptimizer(keras.optimizers.SGD(), **settings)


def test_a_small_initial_scale_brings_its_own_floor():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**-20)
    assert optimizer.rule.min_scale == 2.0**-20


def test_what_it_wraps_must_be_an_optimizer_without_scale():
    with pytest.raises(UsageError, match="needs a Keras optimizer, got 'adam'"):
        LossScaleOptimizer("adam")
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(UsageError, match="got a LossScaleOptimizer"):
        LossScaleOptimizer(inner)


def test_arguments_of_apply_must_match():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(UsageError, match="needs the variables in its first call"):
        optimizer.apply([array([1.0])])
    with pytest.raises(UsageError, match="for each of 2 variables, got 1"):
        optimizer.apply([array([1.0])], [variable([1.0]), variable([1.0])])


def test_it_works_around_masters():
    weight = variable([256.0], dtype="bfloat16")
    optimizer = LossScaleOptimizer(MasterOptimizer(keras.optimizers.SGD(1.0)), initial_scale=8.0)
    optimizer.scale_loss(1.0)
    for loop in LOOPS:
        step = loop(optimizer, [weight])
        for value in (4.0, 4.0, np.inf):
            step(array([value * optimizer.counts.scale / 8.0]))
    assert numbers(weight).tolist() == [254.0]
