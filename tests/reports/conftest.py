"""What every report is tried with: both low dtypes, and nothing left behind."""

import pytest
import torch


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def low(request):
    """The low dtype of the region."""
    return request.param


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Checks that no region is left open, and closes it for the next test."""
    yield
    left = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    assert not left, "autocast was left on"
