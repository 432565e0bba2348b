"""What a region with masters="split" refuses, and says."""

import pytest
import torch
from torch import nn

from halfstep.core import override_policy
from halfstep.errors import PolicyError, UsageError
from halfstep.torch import prepare
from tests.torch.split_models import IN_FLOAT16, assert_same, exact, losses, made, perceptron

POLICY_ERRORS = {
    "float32": (
        {"policy": "float32", "masters": "split"},
        "masters='split' needs a compute_dtype of 16 bits, got policy 'float32'. Write "
        "policy='mixed_bfloat16', or masters='cast'.",
    ),
    "param_dtype": (
        {"policy": "mixed_bfloat16, param_dtype=bfloat16"},
        "prepare needs param_dtype=float32, got 'bfloat16'. Leave it out: weights stay in float32 "
        "and are cast where they are used; or write masters='split', which keeps them in half "
        "precision, with exact float32 masters.",
    ),
}
NARROW_GRADIENTS = (
    "prepare needs grad_dtype to be float32 or bfloat16, got 'float16', in which gradients of "
    "their true size overflow, so that steps are skipped, or round to 0. Write "
    "grad_dtype='float32'."
)
USAGE_ERRORS = {
    "masters": (
        {"masters": "both"},
        "prepare needs masters to be 'cast' or 'split', got 'both'. 'cast' keeps parameters in "
        "float32, 'split' in half precision with the missing bits beside them.",
    ),
    "unhashable masters": (
        {"masters": ["split"]},
        "prepare needs masters to be 'cast' or 'split', got ['split']. 'cast' keeps parameters in "
        "float32, 'split' in half precision with the missing bits beside them.",
    ),
    "grad_dtype alone": (
        {"grad_dtype": "float32"},
        "prepare needs masters='split' for grad_dtype, got grad_dtype='float32' alone. Write "
        "masters='split', or leave grad_dtype out.",
    ),
    "bucket_bytes alone": (
        {"bucket_bytes": 1024},
        "prepare needs masters='split' for bucket_bytes, got bucket_bytes=1024 alone. Write "
        "masters='split', or leave bucket_bytes out.",
    ),
    "grad_dtype": (
        {"masters": "split", "grad_dtype": "float64"},
        "prepare needs grad_dtype to be float32 or bfloat16, got 'float64'. Leave it out for the "
        "default.",
    ),
    "grad_dtype of torch": (
        {"masters": "split", "grad_dtype": torch.float64},
        "prepare needs grad_dtype to be float32 or bfloat16, got 'float64'. Leave it out for the "
        "default.",
    ),
    "narrow grad_dtype": ({"masters": "split", "grad_dtype": "float16"}, NARROW_GRADIENTS),
    "narrow grad_dtype of torch": (
        {"policy": IN_FLOAT16, "masters": "split", "grad_dtype": torch.float16},
        NARROW_GRADIENTS,
    ),
    "bucket_bytes": (
        {"masters": "split", "bucket_bytes": 127},
        "prepare needs bucket_bytes to be a whole number >= 128, got 127. Leave it out, or write "
        "2**28 for 256 MiB.",
    ),
    "bucket_bytes in words": (
        {"masters": "split", "bucket_bytes": "1 GiB"},
        "prepare needs bucket_bytes to be a whole number >= 128, got '1 GiB'. Leave it out, or "
        "write 2**28 for 256 MiB.",
    ),
    "bucket_bytes as a switch": (
        {"masters": "split", "bucket_bytes": True},
        "prepare needs bucket_bytes to be a whole number >= 128, got True. Leave it out, or write "
        "2**28 for 256 MiB.",
    ),
    "release": (
        {"masters": "split", "release": True},
        "release=True needs a part of what the optimizer trains, got all 4 parameters of it in one "
        "region. They are stepped together or not at all, so no gradient would be freed before the "
        "last one is there. Prepare parts: for block in model.blocks: prepare(block, optimizer, "
        "..., release=True).",
    ),
}


def refused(error, settings, text):
    torch.manual_seed(0)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = exact(model)
    with pytest.raises(error) as caught:
        prepare(model, optimizer, **{"policy": "mixed_bfloat16", **settings})
    assert str(caught.value) == text
    assert all(each.dtype is torch.float32 for each in model.parameters())
    assert_same(exact(model), before)
    assert "forward" not in vars(model)
    assert "step" not in vars(optimizer)
    losses(model, optimizer, 1)


@pytest.mark.parametrize("case", POLICY_ERRORS)
def test_what_policies_cannot_is_refused(case):
    refused(PolicyError, *POLICY_ERRORS[case])


@pytest.mark.parametrize("case", USAGE_ERRORS)
def test_what_makes_no_sense_is_refused(case):
    refused(UsageError, *USAGE_ERRORS[case])


def test_lazy_parameters_are_refused():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with pytest.raises(UsageError) as caught:
        prepare(model, policy="mixed_bfloat16", masters="split")
    assert str(caught.value) == (
        "masters='split' needs parameters that have values, got a LazyLinear that waits for its "
        "first input. Call the model once before prepare."
    )
    assert "forward" not in vars(model)
    model(torch.rand(2, 3))
    prepare(model, policy="mixed_bfloat16", masters="split")


def test_half_precision_without_masters_is_refused():
    model = perceptron().bfloat16()
    with pytest.raises(UsageError) as caught:
        prepare(model, policy="mixed_bfloat16")
    assert str(caught.value) == (
        "A region needs trained parameters in float32, got bfloat16 for 0.weight. Write "
        'prepare(..., masters="split"), which keeps small updates beside the optimizer, or call '
        "model.float(): weights are cast where they are used."
    )
    prepare(model, policy="mixed_bfloat16", masters="split")


def test_the_reference_of_a_comparison_has_no_halves():
    with override_policy("float32"):
        model, optimizer, _ = made()
        assert all(each.dtype is torch.float32 for each in model.parameters())
        found = losses(model, optimizer, 3)
    torch.manual_seed(0)
    plain = perceptron()
    assert found == losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 3)
