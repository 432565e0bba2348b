import functools
import gc
import inspect
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_

from halfstep.errors import ScalerStateError
from halfstep.torch._scaler import GradScaler
from halfstep.torch._scaling import _clipping

CLIPS = {
    "clip_grad_norm_": lambda parameters: clip_grad_norm_(parameters, 1.0),
    "clip_grad_value_": lambda parameters: clip_grad_value_(parameters, 1.0),
}


def start(scale=8.0, optimizer=torch.optim.SGD):
    parameter = nn.Parameter(torch.zeros(2))
    scaler = GradScaler("cpu", init_scale=scale)
    scaler.scale((parameter * torch.tensor([3.0, 4.0])).sum()).backward()
    return parameter, optimizer([parameter], lr=1.0), scaler


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_clipping_scaled_gradients_is_refused(name, call):
    parameter, optimizer, scaler = start()
    CLIPS[name]([parameter])
    with pytest.raises(ScalerStateError) as error:
        getattr(scaler, call)(optimizer)
    assert f"got {name}() on gradients that are still multiplied" in str(error.value)
    assert f"Call scaler.unscale_(optimizer) before {name}()" in str(error.value)
    assert parameter.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("clip", CLIPS.values())
def test_a_fused_step_is_refused_too(clip):
    parameter, optimizer, scaler = start(optimizer=functools.partial(torch.optim.SGD, fused=True))
    clip([parameter])
    with pytest.raises(ScalerStateError):
        scaler.step(optimizer)


def test_the_variants_of_newer_torch():
    parameter, optimizer, scaler = start()
    norm = nn.utils.get_total_norm([parameter.grad])
    nn.utils.clip_grads_with_norm_(parameter, 1.0, norm)
    with pytest.raises(ScalerStateError):
        scaler.step(optimizer)


@pytest.mark.parametrize("clip", CLIPS.values())
def test_clipping_unscaled_gradients_is_right(clip):
    parameter, optimizer, scaler = start()
    scaler.unscale_(optimizer)
    clip([parameter])
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last_step.skipped
    assert parameter.abs().max().item() <= 1.0


def test_no_false_alarms():
    parameter, optimizer, scaler = start()
    other = nn.Parameter(torch.ones(1))
    other.sum().backward()
    clip_grad_norm_([other], 0.5)
    clip_grad_norm_([parameter], torch.inf)
    nn.utils.get_total_norm([parameter.grad])
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    parameter.sum().backward()
    clip_grad_norm_([parameter], 0.5)
    optimizer.step()
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)


def test_clipping_by_hand_with_the_scale_in_mind():
    parameter, optimizer, scaler = start()
    clip_grad_norm_([parameter], 1.0 * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
    assert parameter.norm().item() == pytest.approx(1.0, rel=1e-4)


def test_one_optimizer_may_clip_while_another_is_scaled():
    scaler = GradScaler("cpu", init_scale=8.0)
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in parameters]
    scaler.scale(sum(parameter.sum() for parameter in parameters)).backward()
    scaler.unscale_(optimizers[0])
    clip_grad_norm_(parameters[0], 0.5)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [parameter.item() for parameter in parameters] == pytest.approx([0.5, 0.0], abs=1e-4)


def test_gradients_that_are_gone_are_forgotten():
    parameter, optimizer, scaler = start()
    clip_grad_norm_([parameter], 1.0)
    optimizer.zero_grad()
    gc.collect()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last_step.skipped


def test_nothing_is_kept_alive():
    parameter, optimizer, scaler = start()
    clip_grad_norm_([parameter], 1.0)
    gone = weakref.ref(parameter), weakref.ref(scaler)
    del parameter, optimizer, scaler
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert not _clipping._latest.__dict__.get("norm")


def test_the_functions_are_wrapped_once_and_keep_their_names():
    before = clip_grad._clip_grads_with_norm_
    GradScaler("cpu")
    assert clip_grad._clip_grads_with_norm_ is before
    assert nn.utils.clip_grads_with_norm_ is before
    assert before.__name__ == "_clip_grads_with_norm_"


def test_other_threads():
    _, optimizer, scaler = start()
    scaler.unscale_(optimizer)
    errors = []

    def clip():
        other = nn.Parameter(torch.ones(3))
        try:
            for _ in range(50):
                other.grad = torch.ones(3)
                clip_grad_norm_(other, 1.0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=clip) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    scaler.step(optimizer)
    assert not scaler.last_step.skipped


@pytest.mark.parametrize("clip", CLIPS.values())
def test_compiled_clipping_in_one_graph(clip):
    parameter, _, _ = start()
    expected = parameter.grad.clone()
    parameter.grad, reference = expected.clone(), nn.Parameter(torch.zeros(2))
    reference.grad = expected.clone()
    torch.compile(clip, backend="eager", fullgraph=True)([parameter])
    clip([reference])
    assert torch.equal(parameter.grad, reference.grad)


def test_an_older_torch_without_the_seam(monkeypatch):
    monkeypatch.delattr(clip_grad, "_clip_grads_with_norm_")
    monkeypatch.delattr(clip_grad, "_get_total_norm")
    monkeypatch.delattr(clip_grad, "_group_tensors_by_device_and_dtype")
    _clipping.install.__wrapped__()
    _, optimizer, scaler = start()
    scaler.step(optimizer)
    assert not scaler.last_step.skipped


FORMS = {
    "tensor": lambda parameter: parameter,
    "list": lambda parameter: [parameter],
    "tuple": lambda parameter: (parameter,),
    "generator": lambda parameter: (each for each in [parameter]),
    "nothing": lambda parameter: [],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("value", [[3.0, 4.0], 5.0])
@pytest.mark.parametrize("limit", [1.0, "1.0", torch.tensor(1.0), torch.inf])
@pytest.mark.parametrize("enabled", [None, False, True])
def test_every_form_that_torch_accepts(monkeypatch, form, value, limit, enabled):
    monkeypatch.setattr(_clipping, "_watching", weakref.WeakSet())
    parameter = nn.Parameter(torch.zeros(torch.tensor(value).shape))
    if enabled is not None:
        scaler = GradScaler("cpu", enabled=enabled)
        scaler.scale(parameter.sum()).backward()
    parameter.grad = torch.tensor(value)
    norm = nn.utils.get_total_norm(form(parameter.grad))
    expected = inspect.unwrap(clip_grad._get_total_norm)(form(parameter.grad))
    assert torch.equal(norm, expected)
    twin = nn.Parameter(torch.zeros_like(parameter))
    twin.grad = parameter.grad.clone()
    inspect.unwrap(clip_grad._clip_grads_with_norm_)([twin], limit, norm)
    assert nn.utils.clip_grads_with_norm_(form(parameter), limit, norm) is None
    if form is not FORMS["nothing"]:
        assert torch.equal(parameter.grad, twin.grad)


def test_errors_are_the_same():
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for function, args in (
        (nn.utils.get_total_norm, (3,)),
        (nn.utils.clip_grads_with_norm_, (3, 1.0, torch.ones(()))),
        (nn.utils.clip_grads_with_norm_, ([], "wide", torch.ones(()))),
    ):
        with pytest.raises((TypeError, ValueError)) as ours:
            function(*args)
        with pytest.raises((TypeError, ValueError)) as theirs:
            inspect.unwrap(function)(*args)
        assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("norm_type", [0.0, -torch.inf, 0.5, 1, 2.0, "inf"])
def test_no_norm_hides_what_is_not_finite(norm_type):
    for value in (torch.nan, torch.inf):
        parameter, optimizer, scaler = start()
        scaler.unscale_(optimizer)
        parameter.grad[0] = value
        clip_grad_norm_([parameter], 1.0, norm_type=norm_type)
        scaler.step(optimizer)
        assert scaler.last_step.skipped
        assert parameter.isfinite().all()


def test_a_norm_says_nothing_about_what_was_written_since():
    parameter, optimizer, scaler = start()
    scaler.unscale_(optimizer)
    norm = nn.utils.get_total_norm([parameter.grad])
    parameter.grad[0] = torch.nan
    nn.utils.clip_grads_with_norm_([parameter], 1.0, norm)
    scaler.step(optimizer)
    assert scaler.last_step.skipped


def test_a_norm_of_some_gradients_says_nothing_about_others():
    first, optimizer, scaler = start()
    second = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [second]})
    scaler.scale(second.sum()).backward()
    scaler.unscale_(optimizer)
    second.grad[0] = torch.nan
    nn.utils.clip_grads_with_norm_([first, second], 1.0, nn.utils.get_total_norm([first.grad]))
    scaler.step(optimizer)
    assert scaler.last_step.skipped


def test_a_norm_alone_keeps_no_gradient_alive():
    parameter, _, _ = start()
    nn.utils.get_total_norm([parameter.grad])
    gone = weakref.ref(parameter)
    del parameter, _
    gc.collect()
    assert gone() is None
