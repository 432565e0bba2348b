"""Queries, keys and values that arrive in different dtypes; norms before them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.torch import autocast, saved_bytes
from tests.reports.agreement import distances, trained

MASKS = {
    "none": {},
    "boolean": {"attn_mask": torch.ones(5, 5).triu(1).bool()},
    "-1e9": {"attn_mask": torch.full((5, 5), -1e9).triu(1)},
    "the least float32": {"attn_mask": torch.full((5, 5), torch.finfo().min).triu(1)},
    "-inf and padding": {
        "attn_mask": torch.full((5, 5), -torch.inf).triu(1),
        "key_padding_mask": torch.tensor([[0.0, 0, 0, -torch.inf, -torch.inf]] * 4),
    },
    "padding": {"key_padding_mask": torch.tensor([[False, False, False, True, True]] * 4)},
}


class First(nn.Module):
    """Self-attention, of which only the outputs count."""

    def __init__(self, **settings):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, **settings)

    def forward(self, x, **options):
        return self.attention(x, x, x, **options)[0]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("weights", [True, False])
def test_multi_head_attention_trains_with_every_mask(mask, weights, low):
    """A float32 mask with half queries is refused, or is infinite in half."""

    def make():
        return trained(First(), torch.randn(4, 5, 16), need_weights=weights, **MASKS[mask])

    assert max(distances(make, low)) < 0.1


def test_multi_head_attention_with_its_extras(low):
    """Learned biases of keys and values are float32 beside half projections."""
    for weights in (True, False):

        def make(weights=weights):
            model = First(add_bias_kv=True, add_zero_attn=True)
            return trained(model, torch.randn(4, 5, 16), need_weights=weights)

        assert max(distances(make, low)) < 0.1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_encoder_in_evaluation_takes_its_fast_path(padded, norm_first, mode, low):
    """expected scalar type Float but found Half, in evaluation only, with a padding mask."""
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, batch_first=True, dropout=0.0, norm_first=norm_first
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    inputs, mask = torch.randn(4, 5, 16), torch.zeros(4, 5, dtype=torch.bool)
    mask[0, 3:] = padded
    with mode():
        expected = model(inputs, src_key_padding_mask=mask)
        with autocast("cpu", dtype=low):
            outputs = model(inputs, src_key_padding_mask=mask)
    assert torch.allclose(outputs.float(), expected, atol=0.1)


ORDERS = [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]


@pytest.mark.parametrize("halves", ORDERS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_takes_queries_keys_and_values_of_any_dtypes(halves, causal, low):
    """Queries and keys are float32 after a norm or a rotary embedding, values are half."""
    q, k, v = (torch.randn(2, 3, 8).to(low if half else torch.float32) for half in halves)
    with autocast("cpu", dtype=low):
        outputs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert outputs.dtype == low
    wide = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)
    assert torch.allclose(outputs.float(), wide, atol=0.05)


@pytest.mark.parametrize("mask", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_attention_takes_a_mask_of_any_dtype(mask, low):
    """Expected attn_mask dtype to be bool or to match query dtype."""
    q = torch.randn(2, 3, 8)
    bias = torch.full((3, 3), -torch.inf).triu(1).to(mask)
    with autocast("cpu", dtype=low):
        outputs = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    wide = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.allclose(outputs.float(), wide, atol=0.05)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_queries_and_keys_go_with_values(norm, low):
    """Normalised queries and keys leave in float32, and a kernel for half refuses them."""
    project, normed = nn.Linear(8, 24), norm(8)
    with autocast("cpu", dtype=low):
        q, k, v = project(torch.randn(2, 3, 8)).chunk(3, -1)
        q, k = normed(q), normed(k)
    assert q.dtype == k.dtype == v.dtype == low


NORMS = {
    "layer norm": lambda: nn.LayerNorm(64),
    "RMS norm": lambda: nn.RMSNorm(64),
    "group norm": lambda: nn.GroupNorm(4, 64),
}


# On CPU PyTorch builds rms_norm from parts that save float32, whatever arrives.
@pytest.mark.parametrize("norm", [name for name in NORMS if name != "RMS norm"])
def test_a_norm_keeps_half_and_saves_half(norm, low):
    """Norms in float32 double what is kept for backward."""
    chain, inputs = nn.Sequential(nn.Linear(64, 64), NORMS[norm]()), torch.randn(256, 64)
    with autocast("cpu", dtype=low), saved_bytes() as halved:
        assert chain(inputs).dtype == low
    rules = "halfstep-1 + normalisation=full"
    with autocast("cpu", dtype=low, rules=rules), saved_bytes() as doubled:
        assert chain(inputs).dtype == torch.float32
    assert halved.bytes < doubled.bytes


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_half_has_wide_statistics(norm, low):
    """A mean of squares of 300 is infinite in half."""
    with autocast("cpu", dtype=low):
        outputs = NORMS[norm]()(torch.randn(4, 64).to(low) * 3000)
    assert outputs.isfinite().all()
    assert outputs.float().pow(2).mean().item() == pytest.approx(1.0, abs=0.1)


def test_running_statistics_stay_float32(low):
    """Running statistics overflow in half after some batches."""
    norm, conv = nn.BatchNorm2d(4), nn.Conv2d(1, 4, 1)
    with autocast("cpu", dtype=low):
        for _ in range(3):
            norm(conv(torch.randn(2, 1, 5, 5) * 1000))
    assert norm.running_var.dtype == torch.float32
    assert norm.running_var.isfinite().all()
    assert norm.num_batches_tracked == 3
