"""What a region does depends on its settings alone, not on what ran before in the process."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys, warnings
import torch
import torch.nn.functional as F
from halfstep.torch import autocast

warnings.simplefilter("ignore")
half, low, wide = torch.ones(4, 8).half(), torch.ones(4, 8).bfloat16(), torch.ones(4, 8)
operations = {
    "mm": lambda: wide @ wide.T,
    "exp": lambda: half.exp(),
    "softmax": lambda: half.softmax(-1),
    "sum": lambda: low.sum(),
    "layer_norm": lambda: F.layer_norm(wide, (8,), half[0], half[0]),
    "group_norm": lambda: F.group_norm(wide, 2, half[0], half[0]),
    "layer_norm of half": lambda: F.layer_norm(half, (8,), wide[0], wide[0]),
    "cat": lambda: torch.cat([low, wide]),
    "cat of three": lambda: torch.cat([low, half, wide]),
    "stack": lambda: torch.stack([low, wide]),
    "index_copy": lambda: wide.index_copy(0, torch.tensor([0]), half[:1]),
    "index_put": lambda: wide.index_put((torch.tensor([0]),), half[:1]),
    "attention": lambda: F.scaled_dot_product_attention(wide[None], half[None], low[None]),
    "masked_fill": lambda: half.masked_fill(half > 0, -1e9),
    "conv1d": lambda: F.conv1d(wide[None], torch.ones(2, 4, 3)),
    "mse_loss": lambda: F.mse_loss(half, low),
    "interpolate": lambda: F.interpolate(half[None], scale_factor=2, mode="linear"),
    "cell": lambda: torch.lstm_cell(wide, (wide, wide), torch.ones(32, 8), torch.ones(32, 8)),
}

def outcome(operation):
    try:
        result = operation()
    except RuntimeError as error:
        return f"{type(error).__name__}"
    return str([t.dtype for t in (result if isinstance(result, tuple) else (result,))])

def outcomes(region):
    found = {}
    for dtype in (torch.float16, torch.bfloat16):
        for name, operation in operations.items():
            with region("cpu", dtype=dtype):
                found[f"{name} in {dtype}"] = outcome(operation)
    return found

def others():
    for dtype in (torch.float16, torch.bfloat16):
        for rules in ("none", "torch-2.13", "torch-2.13-cpu", "halfstep-1 + matmul=full"):
            with autocast("cpu", dtype=dtype, rules=rules, cache_enabled=True):
                wide @ wide.T
        with autocast("cpu", dtype=dtype).explain():
            wide @ wide.T

region = {"ours": autocast, "plain": torch.autocast}[sys.argv[1]]
before = outcomes(region)
others()
after = outcomes(region)
print(json.dumps({k: [before[k], after[k]] for k in before if before[k] != after[k]}))
"""


@pytest.mark.parametrize("region", ["ours", "plain"])
def test_other_regions_before_change_nothing(region):
    """The same code fails or works, depending on which other regions the process had entered."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, region], capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == {}
