"""Weights that a hook computes before each forward, from parameters with other names."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from halfstep.torch import prepare

WAYS = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight_norm": lambda layer: nn.utils.weight_norm(layer),
    "spectral_norm": lambda layer: nn.utils.spectral_norm(layer),
    "weight_norm as a parametrization": parametrizations.weight_norm,
    "spectral_norm as a parametrization": parametrizations.spectral_norm,
}


def trained(model, optimizer, steps=4):
    """Returns the parameters after some steps, and the gradients of the last one."""
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.rand(4, 7)).square().sum().backward()
        optimizer.step()
    own = dict(model.named_parameters())
    return {name: each.detach() for name, each in own.items()}, [each.grad for each in own.values()]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("masters", ["cast", "split"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_a_region_trains_them_as_plain_training_does(way, policy, masters):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    WAYS[way](model[0])
    plain = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    WAYS[way](plain[0])
    plain.load_state_dict(model.state_dict())
    expected, gradients = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    region = prepare(model, optimizer, policy, masters=masters)
    found, others = trained(model, optimizer)
    assert region.history.skipped == 0
    for name, each in expected.items():
        torch.testing.assert_close(found[name].float(), each, rtol=0.03, atol=0.01)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other.float(), one, rtol=0.1, atol=0.05 * one.abs().max().item())
    assert copy.deepcopy(model[0].bias).shape == (9,)


def test_a_layer_that_is_pruned_in_the_middle_of_training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    region = prepare(model, optimizer, "mixed_float16")
    trained(model, optimizer)
    prune.l1_unstructured(model[0], "weight", 0.5)
    zeros = model[0].weight_mask == 0
    _, gradients = trained(model, optimizer)
    assert region.history.skipped == 0
    assert (model[0].weight_orig.grad[zeros] == 0).all()
    assert model[0].weight.abs().max() < 10
    prune.remove(model[0], "weight")
    trained(model, optimizer)
    assert all(each.abs().max() < 100 for each in gradients)
