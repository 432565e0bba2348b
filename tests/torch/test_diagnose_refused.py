"""What is said of a loss that is none, and of arguments that do not go together."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from halfstep.errors import UsageError
from halfstep.torch import diagnose, observe, ranges

MODEL = nn.Linear(4, 2)
BATCH = torch.randn(3, 4), torch.tensor([0, 1, 1])
CALLS = {each.__name__: each for each in (diagnose, observe, ranges)}


def entropy(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def backwards(model, batch):
    loss = entropy(model, batch)
    loss.backward()
    return loss


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (nn.CrossEntropyLoss(), "which calls the model, got CrossEntropyLoss, which raises TypeEr"),
        (functional.cross_entropy, "got cross_entropy, which raises TypeError: "),
        (lambda model: model, "got <lambda>, which raises TypeError: "),
        (lambda outputs, targets: outputs.sum(), "got <lambda>, which raises AttributeError: "),
        (None, "got NoneType, which raises TypeError: 'NoneType' object is not callable. Write "),
        (backwards, "leaves the backward pass to it, got one whose graph is gone. Call the model"),
        (lambda model, batch: (entropy(model, batch), 1), "a loss of one number, got tuple. Ret"),
        (lambda model, batch: {"loss": 1}, "a loss of one number, got dict. Return what the tra"),
        (lambda model, batch: entropy(model, batch).item(), "a loss of one number, got float."),
        (lambda model, batch: model(batch[0]), "got a tensor of shape (3, 2) in torch.float32"),
        (lambda model, batch: batch[1].sum(), "got a tensor of shape () in torch.int64"),
    ],
)
def test_a_loss_that_is_none(name, loss_fn, text):
    with pytest.raises(UsageError) as caught:
        CALLS[name](MODEL, BATCH, loss_fn)
    assert str(caught.value).startswith(f"{name} needs ")
    assert text in str(caught.value)


@pytest.mark.parametrize("call", [diagnose, ranges])
def test_a_loss_without_a_gradient(call):
    with pytest.raises(UsageError, match="a loss with a gradient, got one without"):
        call(MODEL, BATCH, lambda model, batch: entropy(model, batch).detach())


def test_an_error_of_the_model_is_its_own():
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        diagnose(MODEL, BATCH, lambda model, batch: model(batch[0]).missing)


@pytest.mark.parametrize("call", [diagnose, observe])
def test_two_scales(call):
    with pytest.raises(UsageError) as caught:
        call(MODEL, BATCH, entropy, policy="mixed_float16", loss_scale=1024)
    assert "write policy='mixed_float16, scale=static(1024.0)'" in str(caught.value)
    assert call(MODEL, BATCH, entropy, policy="mixed_bfloat16", loss_scale=1024.0) is not None


def test_a_loss_that_is_written_as_nan_is_no_clean_step():
    fault = diagnose(MODEL, BATCH, lambda model, batch: model(batch[0]).sum() * torch.nan).first
    assert (fault.operation, fault.phase, fault.kind) == ("multiply", "forward", "nan")


def test_ranges_without_a_finite_gradient_send_to_diagnose():
    found = ranges(MODEL, BATCH, lambda model, batch: model(batch[0]).sum() * torch.nan)
    assert (
        str(found) == "no gradient is finite, in float32 either: diagnose tells where that begins"
    )


@pytest.mark.parametrize("call", [diagnose, observe])
def test_a_policy_for_a_model_of_which_only_a_part_is_called(call):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch):
            return self.layer(batch[0]).sum()

    with pytest.raises(
        UsageError, match="needs a loss_fn that calls the model, so that it runs by"
    ):
        call(
            Steps(), BATCH, lambda model, batch: model.training_step(batch), policy="mixed_float16"
        )
