"""Clipping where gradients are applied within backward: refused where it would miss some."""

import gc
import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_

from halfstep.errors import ScalerStateError, UsageError
from halfstep.torch import GradScaler, prepare
from tests.torch.releasing import batches, loss_of, made

NAMES = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
# As in a script that imports them before anything is released.
CLIPS = {
    "clip_grad_norm_": lambda own: clip_grad_norm_(own, 1.0),
    "clip_grad_value_": lambda own: clip_grad_value_(own, 1.0),
    "clip_grads_with_norm_": lambda own: clip_grads_with_norm_(own, 1.0, torch.tensor(1e6)),
    "clip_grad_norm_ of PyTorch": lambda own: nn.utils.clip_grad_norm_(parameters=own, max_norm=1),
    "clip_grad_value_ of PyTorch": lambda own: nn.utils.clip_grad.clip_grad_value_(own, 1.0),
    "clip_grads_with_norm_ of PyTorch": lambda own: nn.utils.clip_grads_with_norm_(
        own, 1.0, nn.utils.get_total_norm([each.grad for each in own if each.grad is not None])
    ),
}


def test_clipping_is_refused():
    model, _optimizer, regions = made()
    loss_of(model, batches()[0]).backward()
    for region in regions:
        with pytest.raises(UsageError) as caught:
            region.clip_grad_norm_(1.0)
        assert str(caught.value) == (
            "Region.clip_grad_norm_() needs all gradients at once, got an optimizer of regions "
            "with release=True, which free theirs within backward. Clip without release, or leave "
            "clipping out."
        )


@pytest.mark.parametrize("kind", CLIPS)
def test_pytorchs_clipping_is_refused(kind):
    model, _optimizer, _ = made()
    loss_of(model, batches()[0]).backward()
    before = model.head.weight.grad.clone()
    with pytest.raises(UsageError) as caught:
        CLIPS[kind]([*model.parameters()])
    assert str(caught.value) == (
        f"{kind.split()[0]}() needs all gradients at once, got parameters of regions with "
        "release=True, which free theirs within backward. Clip without release, or leave clipping "
        "out."
    )
    assert torch.equal(model.head.weight.grad, before)


@pytest.mark.parametrize("kind", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize(
    "given", [lambda model: model.parameters(), lambda model: model.blocks[0].first.weight]
)
def test_a_generator_and_a_single_parameter_are_refused_too(kind, given):
    model, _optimizer, _ = made()
    with pytest.raises(UsageError, match="needs all gradients at once"):
        CLIPS[kind](given(model))


@pytest.mark.parametrize("kind", CLIPS)
def test_other_parameters_are_clipped(kind):
    model, _optimizer, _ = made()
    loss_of(model, batches()[0]).backward()
    (model.head.weight * 3e4).sum().backward()
    CLIPS[kind](list(model.head.parameters()))
    assert 0.0 < model.head.weight.grad.abs().max() <= 1.0


# A scaler does not notice the third one under a name from before it.
@pytest.mark.parametrize("kind", [each for each in CLIPS if each != "clip_grads_with_norm_"])
def test_a_scaler_of_others_still_notices_that_they_are_clipped_too_early(kind):
    _model, _optimizer, _ = made()
    other, scaler = nn.Parameter(torch.ones(3)), GradScaler()
    optimizer = torch.optim.SGD([other], lr=0.1)
    scaler.scale(other.sum()).backward()
    CLIPS[kind]([other])
    with pytest.raises(ScalerStateError, match="needs unscaled gradients for clipping"):
        scaler.step(optimizer)


def test_an_empty_generator_is_warned_of():
    model, _optimizer, _ = made()
    with pytest.warns(UserWarning, match="is an empty generator"):
        clip_grad_norm_((each for each in ()), 1.0)
    assert model.head.weight.grad is None


def test_a_region_whose_parts_another_optimizer_releases_is_not_clipped():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    first = torch.optim.SGD(model[:2].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    prepare(model[0], first, "mixed_bfloat16", release=True)
    region = prepare(model, second, "mixed_bfloat16")
    model(torch.rand(3, 4)).sum().backward()
    with pytest.raises(UsageError, match="got parameters of regions with release=True"):
        region.clip_grad_norm_(1.0)


@pytest.mark.parametrize("kind", ["clip_grad_norm_", "clip_grad_value_"])
def test_compiled_clipping_of_others_is_in_one_graph(kind):
    model, _optimizer, _ = made()
    (model.head.weight * 3e4).sum().backward()
    torch._dynamo.reset()
    torch.compile(CLIPS[kind], backend="eager", fullgraph=True)([model.head.weight])
    assert model.head.weight.grad.abs().max() <= 1.0


def called():
    """Returns the clipping functions that are called in the end."""
    functions = [inspect.unwrap(getattr(nn.utils, name), stop=closes) for name in NAMES]
    return [each.__closure__[0].cell_contents for each in functions]


def closes(function):
    return function.__code__.co_freevars == ("func",)


def test_clipping_is_left_alone_when_nothing_is_released():
    gc.collect()
    own = called()
    model, optimizer, regions = made()
    assert set(called()).isdisjoint(own)
    for region in regions:
        region.remove()
    assert called() == own
    model, optimizer, regions = made()
    del model, optimizer, regions, region
    gc.collect()
    assert called() == own


@pytest.mark.parametrize("gone", ["region", "optimizer"])
def test_what_is_no_longer_released_is_clipped(gone):
    model, optimizer, regions = made()
    kept, _other, _ = made()
    if gone == "optimizer":
        del optimizer
    for each in regions if gone == "region" else ():
        each.remove()
    loss_of(model, batches()[0]).backward()
    for kind in CLIPS:
        CLIPS[kind]([*model.parameters()])
        with pytest.raises(UsageError):
            CLIPS[kind]([*kept.parameters()])


@pytest.mark.parametrize("name", NAMES)
def test_a_pytorch_that_is_built_in_another_way(monkeypatch, name):
    gc.collect()
    plain = inspect.unwrap(getattr(nn.utils, name))
    monkeypatch.setattr(nn.utils, name, plain)
    model, _optimizer, regions = made()
    with pytest.raises(UsageError, match="needs all gradients at once"):
        getattr(nn.utils, name)(model.parameters(), 1.0, 2.0)
    for region in regions:
        region.remove()
    assert getattr(nn.utils, name) is plain
