"""What is told of a model is what happens when it runs."""

import numpy as np
import pytest

from halfstep.errors import UsageError
from halfstep.keras import LossScaleOptimizer, explain, set_global_policy
from tests.keras.policies import classifier, dtype_of, keras, noise, nothing_left  # noqa: F401

layers = keras.layers
SMALL = "small probabilities round to 0 and their gradients overflow"
LONG = "long sums lose their small terms and overflow"


def encoder():
    inputs = keras.Input((6, 8))
    hidden = layers.Normalization(mean=0.0, variance=1.0, name="raw")(inputs)
    hidden = layers.MultiHeadAttention(2, 4, name="attention")(hidden, hidden)
    hidden = layers.LayerNormalization(name="norm")(hidden)
    hidden = layers.GRU(8, return_sequences=True, name="gru")(hidden)
    hidden = layers.GlobalAveragePooling1D(name="pool")(hidden)
    hidden = layers.Dense(8, activation="sigmoid", name="wide", dtype="float32")(hidden)
    hidden = layers.Dense(8, activation="sigmoid", name="gate")(hidden)
    outputs = [
        layers.Dense(3, activation="softmax", name="kind")(hidden),
        layers.Dense(1, activation="sigmoid", name="sure")(hidden),
    ]
    return keras.Model(inputs, outputs, name="encoder")


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="own")
        self.body, self.head = layers.Dense(8, name="body"), layers.Softmax(name="head")

    def call(self, inputs):
        return self.head(self.body(inputs))


def by_name(explanation):
    return {row.path.rpartition("/")[2]: row for row in explanation.rows}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
def test_the_dtypes_are_those_that_occur(policy, safe, monkeypatch):
    if keras.config.backend() == "jax" and policy == "mixed_float16" and not safe:
        pytest.skip("JAX has no attention in float16 on a CPU")
    set_global_policy(policy, safe=safe)
    model, seen = encoder(), {}
    told = by_name(explain(model))
    for layer in [model, *model.layers[1:]]:
        note_outputs(layer, seen, monkeypatch)
    outputs = model(np.ones((2, 6, 8), "float32"))
    assert {dtype_of(each) for each in outputs} == set(told["encoder"].output_dtypes)
    assert seen.pop("encoder")
    assert seen == {name: set(told[name].output_dtypes) for name in seen}
    assert len(seen) == len(model.layers) - 1


def note_outputs(layer, seen, monkeypatch):
    original = layer.call

    def call(*args, **kwargs):
        result = original(*args, **kwargs)
        seen[layer.name] = {dtype_of(each) for each in keras.tree.flatten(result)}
        return result

    monkeypatch.setattr(type(layer), "call", type(layer).call)
    object.__setattr__(layer, "call", call)


def test_what_is_kept_wide_and_why():
    set_global_policy("mixed_bfloat16")
    told = by_name(explain(encoder()))
    assert {name: row.kept_wide for name, row in told.items() if row.kept_wide} == {
        "encoder": ("outputs: they leave the model in float32, as a loss needs them",),
        "raw": ("all of it: its inputs are raw data, which may lie outside the range of float16",),
        "attention": ("dot_product_attention: its kernel computes the softmax in float32",),
        "norm": ("by Keras itself: statistics need more digits than 16 bits have",),
        "pool": (f"all of it: {LONG}",),
        "wide": ("all of it: its own dtype is float32",),
        "kind": (f"softmax: {SMALL}",),
        "sure": (f"sigmoid: {SMALL}",),
    }
    assert told["kind"].compute_dtype == told["gate"].compute_dtype == "bfloat16"
    assert {row.variable_dtypes for row in told.values()} == {("float32",), ()}


def test_a_policy_that_keeps_nothing_wide():
    set_global_policy("mixed_bfloat16", safe=False)
    told = by_name(explain(encoder()))
    assert [name for name, row in told.items() if row.kept_wide] == ["norm", "wide"]
    assert told["encoder"].output_dtypes == ("bfloat16",)


def test_a_subclassed_model_needs_inputs():
    set_global_policy("mixed_float16")
    model = Subclassed()
    with pytest.raises(UsageError, match=r"explain\(model, inputs\)"):
        explain(model)
    told = by_name(explain(model, noise(4)[0]))
    assert told["own"].output_dtypes == ("float32",)
    assert told["head"].kept_wide == (f"all of it: {SMALL}",)


def test_what_is_no_model():
    with pytest.raises(UsageError, match=r"got 3\. Write explain\(model, inputs\)"):
        explain(3, noise(4)[0])


def test_the_table():
    set_global_policy("mixed_float16")
    model = classifier()
    model.compile("sgd", "mse")
    lines = str(explain(model)).splitlines()
    assert lines[0].split() == ["layer", "kind", "compute", "variables", "output", "kept", "wide"]
    assert lines[2].split() == ["classifier/body", "Dense", "float16", "float32", "float16", "-"]
    assert lines[3].split(maxsplit=5)[-1] == f"softmax: {SMALL}"
    assert lines[-2:] == [
        "losses: computed in float32",
        "optimizer: LossScaleOptimizer scales the loss, because layers compute in float16",
    ]
    assert explain(model).to_dict()["rows"][1]["path"] == "classifier/body"


def by_path(keys):
    low = keras.DTypePolicy("mixed_float16")
    return keras.dtype_policies.DTypePolicyMap("float32", dict.fromkeys(keys, low))


@pytest.mark.parametrize("key", ["classifier/nobody", "nobody_.*"])
def test_a_map_that_matches_nothing_is_told(key):
    set_global_policy(by_path(["classifier/body", key]))
    model = classifier()
    model.compile("sgd", "mse")
    assert explain(model).training[-2:] == (
        "optimizer: LossScaleOptimizer scales the loss, because layers compute in float16",
        f"policy map: {key!r} matches the path of no layer",
    )
    set_global_policy(by_path([key]))
    model = classifier()
    model.compile("sgd", "mse")
    assert explain(model).training[-2:] == (
        "optimizer: LossScaleOptimizer scales the loss, although no layer computes in float16",
        f"policy map: {key!r} matches the path of no layer",
    )


def test_a_map_that_matches_has_nothing_to_tell():
    set_global_policy(by_path(["(.*/)?body"]))
    assert explain(classifier()).training == ()


class Adding(Subclassed):
    def __init__(self, dtype):
        super().__init__()
        self.wanted = dtype

    def call(self, inputs):
        hidden = self.body(inputs)
        squares = keras.ops.square(keras.ops.cast(hidden, self.wanted or hidden.dtype))
        self.add_loss(keras.ops.max(squares))
        return self.head(hidden)


def test_losses_that_a_layer_adds_by_itself():
    set_global_policy("mixed_float16")
    inputs = noise(4)[0]
    told = "add_loss: what own adds was computed in float16"
    assert explain(Adding(None), inputs).training == (told,)
    assert explain(Adding("float32"), inputs).training == ()


class Two(Subclassed):
    def compile(self, first, second):
        super().compile(loss="mse")
        self.first, self.second = first, second


def test_each_optimizer_of_a_model_is_told():
    set_global_policy("mixed_float16")
    model, inputs = Two(), noise(4)[0]
    model.compile(keras.optimizers.SGD(), LossScaleOptimizer(keras.optimizers.Adam()))
    assert explain(model, inputs).training[1:] == (
        "optimizer: LossScaleOptimizer was not asked for a step so far",
        "first: SGD does not scale the loss, although layers compute in float16",
        "second: LossScaleOptimizer scales the loss, because layers compute in float16",
    )
    model.optimizer.build(model.trainable_variables)
    model.optimizer.scale_loss(1.0)
    model.optimizer.apply([keras.ops.zeros(each.shape) for each in model.trainable_variables])
    scales = "optimizer: LossScaleOptimizer scales the loss, because layers compute in float16"
    assert explain(model, inputs).training[1] == scales


def test_one_low_layer_under_float32_is_told():
    set_global_policy("float32")
    low = layers.Dense(4, dtype="mixed_float16")
    model = keras.Sequential([keras.Input((16,)), low, layers.Dense(10)])
    model.compile("sgd", "mse")
    told = "optimizer: SGD does not scale the loss, although layers compute in float16"
    assert explain(model).training[-1] == told


def test_nobody_watches_afterwards():
    set_global_policy("mixed_float16")
    model = classifier()
    first = explain(model)
    model(noise(4)[0])
    assert explain(model) == first
