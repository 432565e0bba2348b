from collections import namedtuple

import pytest
import torch

from halfstep.errors import UsageError
from halfstep.torch._scaler import GradScaler
from halfstep.torch._scaling._outputs import LossWatch

Pair = namedtuple("Pair", "first second")


def test_nested_outputs_keep_their_shape():
    scaler = GradScaler("cpu", init_scale=4.0)
    one = torch.ones(())
    scaled = scaler.scale([one, (one, [one]), Pair(one, one)])
    assert scaled == [4.0, (4.0, [4.0]), Pair(4.0, 4.0)]
    assert isinstance(scaled[2], Pair)


def test_other_iterables_stay_lazy():
    scaler, seen = GradScaler("cpu", init_scale=4.0), []

    def losses():
        for value in (1.0, 2.0):
            seen.append(value)
            yield torch.tensor(value)

    scaled = scaler.scale(losses())
    assert seen == []
    assert [each.item() for each in scaled] == [4.0, 8.0]


@pytest.mark.parametrize("outputs", [3.0, "loss", {"loss": torch.ones(())}, None, [1.0]])
def test_what_is_no_tensor(outputs):
    with pytest.raises(UsageError, match="outputs must be a Tensor or an iterable of Tensors, got"):
        GradScaler("cpu").scale(outputs)


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_outputs_are_scaled_in_float32(shape, dtype):
    scaled = GradScaler("cpu").scale(torch.full(shape, 60000.0, dtype=dtype))
    assert scaled.dtype is torch.float32
    assert scaled.isfinite().all()


def test_double_outputs_stay_double():
    assert GradScaler("cpu").scale(torch.ones(3, dtype=torch.float64)).dtype is torch.float64


def test_the_gradient_of_a_half_output_can_hold_the_scale():
    scaler = GradScaler("cpu")
    loss = torch.ones((), dtype=torch.float16, requires_grad=True)
    scaler.scale(loss).backward()
    assert loss.grad.item() == 32768.0
    change = scaler.history.scale_changes[0]
    assert (change.before, change.after) == (65536.0, 32768.0)
    assert "float16 outputs" in change.reason


def test_one_half_output_among_others_gives_all_the_same_scale():
    scaler = GradScaler("cpu")
    outputs = [torch.ones(()), (torch.ones((), dtype=torch.float16),)]
    scaled = scaler.scale(outputs)
    assert (scaled[0].item(), scaled[1][0].item()) == (32768.0, 32768.0)


def test_the_scale_does_not_change_within_an_iteration():
    scaler = GradScaler("cpu")
    assert scaler.scale(torch.ones(())).item() == 65536.0
    assert scaler.scale(torch.ones((), dtype=torch.float16)).item() == 65536.0


def test_a_watch_sees_every_kind_of_output():
    for value in (torch.inf, -torch.inf, torch.nan):
        for outputs in (
            torch.tensor(value),
            torch.tensor([1.0, value]),
            torch.tensor([1.0, value], dtype=torch.float16),
            torch.tensor([1.0, value], dtype=torch.complex64),
        ):
            watch = LossWatch()
            watch.note(torch.ones(3))
            assert not watch.nonfinite()
            watch.note(outputs)
            assert watch.lazily()()
            assert watch.nonfinite()
            assert watch.renewed() is not watch


def test_a_watch_answers_on_the_device():
    watch, device = LossWatch(), torch.device("cpu")
    assert watch.on_device(device) is None
    watch.note(torch.tensor([1.0, 2.0]))
    assert not watch.on_device(device)
    watch.note(torch.tensor([1.0, torch.nan]))
    assert watch.on_device(device)
    watch.nonfinite()
    assert watch.on_device(device)


def test_a_shared_watch_blames_only_losses_that_were_all_bad():
    device = torch.device("cpu")
    for bad in (torch.tensor(torch.nan), torch.tensor([1.0, torch.inf])):
        watch = LossWatch()
        watch.shared = True
        watch.note(bad)
        assert watch.on_device(device)
        assert watch.nonfinite()
        for good in (torch.ones(3), torch.ones(())):
            watch.note(good)
            answer = watch.on_device(device)
            assert answer is None or not answer
        assert not watch.nonfinite()
        watch.shared = False
        assert watch.nonfinite()


def test_a_watch_that_a_record_may_still_ask_is_left_alone():
    watch = LossWatch()
    assert watch.lazily() is False
    assert watch.renewed() is watch
    watch.note(torch.ones(2))
    ask = watch.lazily()
    assert not watch.nonfinite()
    watch.renewed().note(torch.tensor(torch.nan))
    assert not ask()


def test_integers_and_large_finite_values_are_finite():
    watch = LossWatch()
    for outputs in (torch.tensor(3), torch.tensor([3, 4]), torch.full((9,), 3e38)):
        watch.note(outputs)
    assert not watch.nonfinite()


def test_scaling_inside_a_transform():
    scaler = GradScaler("cpu", init_scale=4.0)

    def loss(weight, value):
        return scaler.scale((weight * value).sum())

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
    gradients = per_sample(torch.ones(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert gradients.tolist() == [[4.0, 8.0], [12.0, 16.0]]
