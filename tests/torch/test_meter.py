import weakref

import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch._meter import Meter


def build():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.ones(4, 64)


def test_each_measurement_builds_anew():
    built = []

    def counted():
        built.append(build())
        return built[-1]

    meter = Meter(counted, "build", "AdamW")
    meter.layout()
    meter.layout("mixed_bfloat16")
    (first, _), (second, _) = built
    assert first is not second


def test_activations_by_sample():
    meter = Meter(build, "build", "AdamW")
    full, low = (meter.activations(policy) for policy in ("float32", "mixed_bfloat16"))
    # What the first layer reads and what comes out of the activation.
    assert full == {"bytes": 4 * (64 + 64) * 4, "per_sample": (64 + 64) * 4, "fixed": 0}
    assert low["per_sample"] == full["per_sample"] / 2
    assert low["fixed"] == 64 * 8 * 2  # a copy of the second layer's weight


def test_a_model_that_cannot_do_with_another_batch():
    class Fixed(nn.Linear):
        def forward(self, x):
            return super().forward(x.reshape(4, 4))

    meter = Meter(lambda: (Fixed(4, 4), torch.ones(4, 4)), "build", "SGD")
    assert meter.activations("float32") == {"bytes": 64}


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (3, "got int from build"),
        ((build()[0], 1, 2), "got (Sequential, int, int) from build"),
        ((torch.ones(1), 1), "got (Tensor, int) from build"),
    ],
)
def test_what_is_no_model(result, got):
    with pytest.raises(UsageError) as raised:
        Meter(lambda: result, "build", "SGD").about()
    assert str(raised.value) == (
        "memory needs a callable that returns a torch.nn.Module, or one and its inputs, "
        f"{got}. Return the model, or (model, inputs)."
    )


def test_a_model_without_parameters():
    with pytest.raises(UsageError, match="a model with parameters to train, got ReLU from build"):
        Meter(nn.ReLU, "build", "SGD").about()


def test_options_that_the_optimizer_does_not_take():
    with pytest.raises(UsageError, match=r"got 'SGD, nope=1': .*Correct the options"):
        Meter(build, "build", "SGD, nope=1").about()


def test_no_model_outlives_its_measurement():
    models = weakref.WeakSet()

    def noted():
        model, inputs = build()
        models.add(model)
        return model, inputs

    meter = Meter(noted, "build", "AdamW")
    for policy in ("float32", "mixed_bfloat16", "float32"):
        meter.layout(policy)
        assert len(models) <= 1
