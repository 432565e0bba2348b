import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from halfstep.torch import autocast

FORMS = pytest.mark.parametrize("reentrant", [False, True])


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 8))


@FORMS
@pytest.mark.parametrize("rules", ["halfstep-1", "torch-2.13", "halfstep-1 + softmax=full"])
def test_what_is_computed_again_gives_the_same_gradients(reentrant, rules):
    inputs = torch.randn(4, 8, requires_grad=True)

    def gradients(run):
        layers = model()
        with autocast("cpu", dtype=torch.bfloat16, rules=rules):
            outputs = run(layers)
        outputs.float().square().sum().backward()
        return [parameter.grad for parameter in layers.parameters()]

    plain = gradients(lambda layers: layers(inputs))
    again = gradients(lambda layers: checkpoint(layers, inputs, use_reentrant=reentrant))
    assert all(torch.equal(left, right) for left, right in zip(plain, again, strict=True))


@FORMS
def test_the_second_pass_sees_the_dtypes_of_the_first(reentrant):
    seen = []

    def function(values):
        low = values @ values
        seen.append((low.dtype, low.exp().dtype, low.softmax(-1).dtype))
        return low

    values = torch.ones(2, 2, requires_grad=True)
    with autocast("cpu", dtype=torch.float16), set_checkpoint_early_stop(False):
        result = checkpoint(function, values, use_reentrant=reentrant)
    result.float().sum().backward()
    assert seen == [(torch.float16, torch.float32, torch.float16)] * 2


def test_segments():
    layers, inputs = model(), torch.randn(4, 8, requires_grad=True)
    with autocast("cpu"):
        outputs = checkpoint_sequential(layers, 2, inputs, use_reentrant=False)
    outputs.float().sum().backward()
    assert layers[0].weight.grad is not None


@FORMS
def test_outside_of_a_region_checkpointing_is_untouched(reentrant):
    seen = []

    def function(values):
        seen.append((values @ values).dtype)
        return values @ values

    values = torch.ones(2, 2, requires_grad=True)
    checkpoint(function, values, use_reentrant=reentrant).sum().backward()
    with torch.autocast("cpu", dtype=torch.float16):
        result = checkpoint(function, values, use_reentrant=reentrant)
    result.float().sum().backward()
    assert seen == [torch.float32] * 2 + [torch.float16] * 2
