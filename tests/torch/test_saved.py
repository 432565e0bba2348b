"""What autograd keeps for backward, counted exactly."""

import math

import pytest
import torch
from torch import nn

from halfstep.torch import autocast, saved_bytes


class Attention(nn.Module):
    """A transformer block whose softmax is written out."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.mix = nn.Linear(width, 3 * width)

    def forward(self, tokens):
        batch, length, width = tokens.shape
        mixed = self.mix(self.norm(tokens)).view(batch, length, 3, self.heads, -1)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width / self.heads)
        seen = scores.softmax(-1) @ value
        return tokens + self.out(seen.transpose(1, 2).reshape(batch, length, width))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(64, 32), nn.Sequential(Attention(), Attention())

    def forward(self, symbols):
        return self.blocks(self.embed(symbols))


def kept(region):
    model, symbols = Model(), torch.zeros(4, 64, dtype=torch.int64)
    with saved_bytes() as saved, region:
        model(symbols)
    return saved.bytes


def test_the_default_rules_keep_a_third_less_than_pytorchs_lists():
    ours = kept(autocast("cpu"))
    assert ours < 0.67 * kept(autocast("cpu", rules="torch-2.13"))
    assert ours < 0.56 * kept(autocast("cpu", enabled=False))


def test_a_storage_counts_once_and_a_parameter_never():
    weight, inputs = nn.Parameter(torch.ones(8)), torch.ones(8)
    with saved_bytes() as saved:
        first = weight * inputs
        second = weight * inputs
    assert saved.bytes == inputs.nbytes
    del first, second


def test_integer_tensors_are_not_counted():
    logits = torch.ones(4, 3, requires_grad=True)
    with saved_bytes() as saved:
        logits[torch.tensor([0, 1])]
    assert saved.bytes == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_low_product_keeps_low_operands(dtype):
    layer, inputs = nn.Linear(8, 8, bias=False), torch.ones(4, 8)
    with saved_bytes() as saved, autocast("cpu", dtype=dtype):
        layer(inputs)
    assert saved.bytes == 4 * 8 * 2


def test_complex_tensors_are_counted():
    signal = torch.rand(8, requires_grad=True)
    with saved_bytes() as saved:
        torch.fft.fft(signal).abs().sum()
    assert saved.bytes >= 8 * 8


def test_blocks_inside_of_blocks_count_for_both():
    values = torch.ones(8, requires_grad=True)
    with saved_bytes() as outer, saved_bytes() as inner:
        values.exp()
    assert inner.bytes == outer.bytes == 32
