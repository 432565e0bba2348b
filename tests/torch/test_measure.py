import time

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from halfstep.torch import _auto, autocast, set_global_policy
from halfstep.torch._measure import Probe


def test_values_of_all_kinds_become_floats():
    values = [
        torch.tensor(1.5),
        2,
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor([3.0, 5.0]),
    ]
    assert Probe().floats(values) == [1.5, 2.0, 2.5, 4.0]
    assert Probe().floats([]) == []


def test_a_snapshot_is_not_reached_by_what_follows():
    loss = torch.tensor(1.0, requires_grad=True) * 2
    snapshot = Probe().snapshot(loss)
    with torch.no_grad():
        loss.zero_()
    assert Probe().floats([snapshot]) == [2.0]
    assert not snapshot.requires_grad
    assert Probe().snapshot("text") == "text"


def test_the_time_between_marks():
    probe = Probe()
    before = time.perf_counter()
    marks = [probe.tick() for _ in range(3)]
    seconds = probe.seconds(marks)
    assert len(seconds) == 2
    assert all(0 <= each <= time.perf_counter() - before for each in seconds)
    assert probe.seconds([]) == probe.seconds(marks[:1]) == []


def test_the_seed():
    numbers = []
    for _ in range(2):
        Probe().seed(3)
        numbers.append(torch.rand(()).item())
    assert numbers[0] == numbers[1]


def test_saved_bytes_are_counted():
    with Probe().saved_bytes() as saved:
        torch.ones(8, requires_grad=True).exp()
    assert saved.bytes == 32


def test_without_cuda_the_processor_is_measured():
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process")
    assert Probe().peak_memory() is None
    assert Probe().device() == ""
    assert Probe().versions() == {"torch": torch.__version__}


@pytest.mark.gpu
def test_on_cuda():
    probe = Probe()
    data = torch.ones(2**20, device="cuda")
    marks = [probe.tick() for _ in range(4) if data.add_(1) is not None]
    assert len(probe.seconds(marks)) == 3
    assert all(seconds >= 0 for seconds in probe.seconds(marks))
    peak, kind = probe.peak_memory()
    assert peak >= 2**22
    assert kind == "allocated on CUDA"
    assert probe.device()
    assert probe.floats([data[0], 1.0, torch.tensor(2.0)]) == [5.0, 1.0, 2.0]


def test_counting_makes_way_for_what_cannot_run_beside_it():
    weight = torch.ones(8, requires_grad=True)
    with Probe().saved_bytes() as saved:
        weight.exp()
        assert torch.func.grad(torch.sum)(torch.ones(2)).tolist() == [1.0, 1.0]
        weight.exp()
    assert saved.bytes is None
    with Probe().saved_bytes() as saved:
        weight.exp()
    assert saved.bytes == 32


def test_counting_gets_out_of_the_way_of_an_error():
    with pytest.raises(ValueError, match="of the script"), Probe().saved_bytes():
        raise ValueError("of the script")
    with Probe().saved_bytes() as saved:
        torch.ones(8, requires_grad=True).exp()
    assert saved.bytes == 32


def test_counting_neither_begins_nor_ends_within_a_backward_pass():
    probe, weight, told = Probe(), torch.ones(8, requires_grad=True), []
    assert probe.may_count()
    with probe.saved_bytes() as saved:
        weight.register_post_accumulate_grad_hook(
            lambda _: told.append((probe.may_count(), saved.may_end()))
        )
        weight.exp().sum().backward()
        assert saved.may_end()
    assert told == [(False, False)]
    assert saved.bytes == 32


def test_counting_neither_begins_nor_ends_within_hooks_of_the_script():
    probe, weight = Probe(), torch.ones(8, requires_grad=True)
    hooks = saved_tensors_hooks(lambda each: each, lambda each: each)
    with hooks:
        assert not probe.may_count()
    with probe.saved_bytes() as saved:
        with hooks:
            weight.exp()
            assert not saved.may_end()
        weight.exp()
        assert saved.may_end()
    assert saved.bytes is None
    assert probe.may_count()


def test_a_checkpoint_saves_what_goes_in():
    weight = torch.ones(8, requires_grad=True)
    with Probe().saved_bytes() as saved:
        checkpoint(lambda it: it.exp().exp().exp(), weight, use_reentrant=False)
    assert saved.bytes == 32


def test_nothing_saved_is_no_count():
    with Probe().saved_bytes() as saved:
        pass
    assert saved.bytes is None


class InBackward(torch.autograd.Function):
    """Needs torch.func within a backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.func.grad(lambda it: it.sin().sum())(x.detach())


def test_counting_makes_way_within_a_backward_pass():
    weight = torch.ones(8, requires_grad=True)
    for _ in range(2):
        with Probe().saved_bytes() as saved:
            InBackward.apply(weight).sum().backward()
            torch.ones(8, requires_grad=True).exp()
            assert saved.may_end()
        assert saved.bytes is None
        assert Probe().may_count()
    assert torch.func.grad(torch.sum)(torch.ones(2)).tolist() == [1.0, 1.0]


def test_what_is_to_run_in_low_precision_is_known():
    settings = {"dtype": torch.bfloat16, "rules": "halfstep-1 + softmax=lower"}
    with autocast("cpu", enabled=False):
        pass
    before = Probe().has_lowered()
    with autocast("cpu", **settings):
        pass
    assert isinstance(before, bool)
    assert Probe().has_lowered() is True


def test_auto_is_left_open_until_a_model_is_called(monkeypatch):
    started = []
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: started.append("CUDA"))
    monkeypatch.setattr(_auto, "_measured", lambda device: started.append(device) or ())
    Probe().set_policy("auto")
    set_global_policy("float32")
    assert started == []
