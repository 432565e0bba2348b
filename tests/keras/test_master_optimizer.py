import keras
import numpy as np
import pytest
from keras import ops

from halfstep.errors import UsageError
from halfstep.keras import LossScaleOptimizer, MasterOptimizer
from tests.keras.loops import BACKEND, LOOPS, array, numbers, values_of, variable

INNER = {
    "SGD": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True),
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "ScheduleFreeAdamW": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
}


def rounded(values, dtype):
    return numbers(ops.cast(array(values), dtype))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", INNER)
def test_a_variable_is_the_rounded_float32_one(name, dtype, loop):
    plain, low = variable([[1.0, -2.0]]), variable([[1.0, -2.0]], dtype=dtype)
    reference, optimizer = INNER[name](), MasterOptimizer(INNER[name]())
    follow, step = loop(reference, [plain]), loop(optimizer, [low])
    for number in range(8):
        grad = rounded([[np.sin(number), 0.125]], dtype)
        follow(array(grad))
        step(array(grad, dtype=dtype))
        master = values_of(optimizer)[2]
        np.testing.assert_allclose(master, numbers(plain), rtol=1e-6)
        np.testing.assert_array_equal(numbers(low), rounded(master, dtype))
    for ours, theirs in zip(values_of(optimizer.optimizer), values_of(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("loop", LOOPS)
def test_small_steps_add_up(loop):
    moved = variable([256.0], dtype="bfloat16")
    step = loop(MasterOptimizer(keras.optimizers.SGD(1.0)), [moved])
    for _ in range(8):
        step(array([0.25], dtype="bfloat16"))
    stuck = variable([256.0], dtype="bfloat16")
    step = loop(keras.optimizers.SGD(1.0), [stuck])
    for _ in range(8):
        step(array([0.25], dtype="bfloat16"))
    assert (numbers(moved).tolist(), numbers(stuck).tolist()) == ([254.0], [256.0])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_variable_that_somebody_else_changed_gives_its_master_the_value(loop):
    weight = variable([256.0, 1.0], dtype="bfloat16")
    step = loop(MasterOptimizer(keras.optimizers.SGD(1.0)), [weight])
    step(array([0.25, 0.0], dtype="bfloat16"))
    weight.assign(array([256.0, 8.0], dtype="bfloat16"))
    for _ in range(3):
        step(array([0.25, 0.0], dtype="bfloat16"))
    assert numbers(weight).tolist() == [255.0, 8.0]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_master_beyond_the_range_of_its_variable_is_not_rounded_to_infinity(loop):
    weight = variable([65504.0], dtype="float16")
    step = loop(MasterOptimizer(keras.optimizers.SGD(1.0)), [weight])
    step(array([-1000.0], dtype="float16"))
    assert numbers(weight).tolist() == [65504.0]
    step(array([2000.0], dtype="float16"))
    assert numbers(weight).tolist() == [64512.0]


def test_variables_in_float32_have_no_master():
    weights = [variable([1.0]), variable([1.0], dtype="bfloat16")]
    optimizer = MasterOptimizer(keras.optimizers.SGD(0.5))
    optimizer.apply([array([1.0]), array([1.0], dtype="bfloat16")], weights)
    assert [numbers(weight).tolist() for weight in weights] == [[0.5], [0.5]]
    # Its own two numbers, one master, and the two numbers of the other optimizer.
    assert len(optimizer.variables) == 5


@pytest.mark.parametrize("choose", [{"var_names": ["bias"]}, {"var_list": True}])
@pytest.mark.parametrize("through", [True, False])
def test_variables_that_are_excluded_from_weight_decay_do_not_decay(choose, through):
    weights = [variable([1.0], dtype="bfloat16", name=name) for name in ("kernel", "bias")]
    inner = keras.optimizers.SGD(0.5, weight_decay=0.5)
    optimizer = MasterOptimizer(inner)
    chosen = {"var_list": weights[1:]} if "var_list" in choose else choose
    (optimizer if through else inner).exclude_from_weight_decay(**chosen)
    optimizer.apply([array([0.0], dtype="bfloat16")] * 2, weights)
    assert [numbers(weight).tolist() for weight in weights] == [[0.75], [1.0]]


def test_several_optimizers_train_masters_by_the_paths_of_the_variables():
    weights = [variable([1.0], dtype="bfloat16", name=name) for name in ("first", "second")]
    inner = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.5), {"second": keras.optimizers.SGD(0.25)}
        )
    )
    MasterOptimizer(inner).apply([array([1.0], dtype="bfloat16")] * 2, weights)
    assert [numbers(weight).tolist() for weight in weights] == [[0.5], [0.75]]


def test_constraints_hold_for_masters():
    weight = variable([1.0], dtype="bfloat16")
    weight.constraint = keras.constraints.NonNeg()
    optimizer = MasterOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([array([2.0], dtype="bfloat16")], [weight])
    assert numbers(weight).tolist() == [0.0]


def test_settings_are_those_of_the_other_optimizer():
    optimizer = MasterOptimizer(keras.optimizers.SGD(0.5, loss_scale_factor=4.0))
    optimizer.learning_rate = 0.25
    assert float(numbers(optimizer.optimizer.learning_rate)) == 0.25
    assert float(numbers(optimizer.scale_loss(array(1.0)))) == 4.0
    LossScaleOptimizer(optimizer)
    assert optimizer.optimizer.loss_scale_factor is None


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("loop", LOOPS)
def test_variables_without_gradient_are_left_alone(loop):
    weights = [variable([1.0], dtype="bfloat16") for _ in range(2)]
    step = loop(MasterOptimizer(keras.optimizers.SGD(0.5)), weights)
    step(None, array([1.0], dtype="bfloat16"))
    assert [numbers(weight).tolist() for weight in weights] == [[1.0], [0.5]]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow has IndexedSlices")
@pytest.mark.parametrize("loop", LOOPS)
def test_sparse_gradients_train_masters(loop):
    import tensorflow as tf

    table = variable(np.full((4, 1), 256.0), dtype="bfloat16")
    step = loop(MasterOptimizer(keras.optimizers.SGD(1.0)), [table])
    for _ in range(4):
        values, rows = tf.constant([[0.5]], tf.bfloat16), tf.constant([1])
        step(tf.IndexedSlices(values, rows, tf.constant([4, 1])))
    assert numbers(table).tolist() == [[256.0], [254.0], [256.0], [256.0]]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow builds inside of graphs")
@pytest.mark.parametrize("compiles", [False, True])
def test_a_graph_that_builds_the_masters_starts_them_from_the_variables(compiles):
    import tensorflow as tf

    weight = variable([256.0], dtype="bfloat16")
    optimizer = MasterOptimizer(keras.optimizers.SGD(1.0))
    grad = array([0.5], dtype="bfloat16")
    step = tf.function(lambda: optimizer.apply([grad], [weight]), jit_compile=compiles)
    for _ in range(4):
        step()
    assert numbers(weight).tolist() == [254.0]


def test_what_it_wraps_must_be_an_optimizer_that_trains():
    with pytest.raises(UsageError, match="needs a Keras optimizer, got 'adam'"):
        MasterOptimizer("adam")
    for wrapper in (LossScaleOptimizer, MasterOptimizer):
        wrapped = wrapper(keras.optimizers.SGD())
        with pytest.raises(UsageError, match=r"Write LossScaleOptimizer\(MasterOptimizer"):
            MasterOptimizer(wrapped)


def test_arguments_of_apply_must_match():
    optimizer = MasterOptimizer(keras.optimizers.SGD())
    with pytest.raises(UsageError, match=r"MasterOptimizer.apply needs the variables"):
        optimizer.apply([array([1.0])])
