"""Constants outside of the range of float16: -1e9 in a mask of attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.torch import autocast
from tests.reports.agreement import distances, through_linear, trained

MASK = torch.tensor([[1] * 8, [0] * 8, [1, 0] * 4, [0] * 8, [0] * 8, [0] * 8]).bool()
FIRST = torch.tensor([0])


def _written(index, value):
    def write(scores):
        scores = scores.clone()
        scores[index] = value
        return scores

    return write


SCALAR_WAYS = {
    "masked_fill": lambda s: s.masked_fill(MASK, -1e9),
    "masked_fill by name": lambda s: s.masked_fill(mask=MASK, value=-1e9),
    "torch.masked_fill": lambda s: torch.masked_fill(s, MASK, -1e9),
    "masked_fill_": lambda s: s.clone().masked_fill_(MASK, -1e9),
    "masked_fill with a tensor": lambda s: s.masked_fill(MASK, torch.tensor(-1e9)),
    "masked_fill_ with a tensor": lambda s: s.clone().masked_fill_(MASK, torch.tensor(-1e9)),
    "s[mask] = tensor": _written(MASK, torch.tensor(-1e9)),
    "index_put": lambda s: s.index_put((MASK,), torch.tensor(-1e9)),
    "index_put_": lambda s: s.clone().index_put_((MASK,), torch.tensor(-1e9)),
    "index_fill": lambda s: s.index_fill(0, FIRST, -1e9),
    "index_fill with a tensor": lambda s: s.index_fill(0, FIRST, torch.tensor(-1e9)),
    "scatter": lambda s: s.scatter(0, torch.zeros(1, 8, dtype=torch.long), -1e9),
    "masked_scatter": lambda s: s.masked_scatter(MASK, torch.full((6, 8), -1e9)),
    "where": lambda s: torch.where(MASK, -1e9, s),
    "tensor.where": lambda s: s.where(~MASK, -1e9),
    "where with a 0-dim tensor": lambda s: torch.where(MASK, torch.tensor(-1e9), s),
    "where with full_like": lambda s: torch.where(MASK, torch.full_like(s, -1e9), s),
    "where with new_full": lambda s: torch.where(MASK, s.new_full((6, 8), -1e9), s),
    "where with full": lambda s: torch.where(MASK, torch.full((6, 8), -1e9, dtype=s.dtype), s),
    "fill_": lambda s: torch.where(MASK, torch.empty_like(s).fill_(-1e9), s),
    "zeros_like, masked_fill_": lambda s: s + torch.zeros_like(s).masked_fill_(MASK, -1e9),
    "a float32 mask": lambda s: s + MASK.float() * -1e9,
    "a boolean mask": lambda s: s + MASK * -1e9,
    "pad": lambda s: F.pad(s, (0, 2), value=-1e9),
    "threshold": lambda s: F.threshold(s, 100.0, -1e9),
    "fill_diagonal_": lambda s: (s.T @ s).fill_diagonal_(-1e9),
}


@pytest.mark.parametrize("way", SCALAR_WAYS)
def test_a_constant_of_minus_1e9_is_accepted_in_every_way_of_writing_it(way, low):
    """Filling scores with -1e9 fails: value cannot be converted to Half without overflow."""
    fill = SCALAR_WAYS[way]
    make = through_linear(lambda scores: fill(scores).softmax(-1))
    assert distances(make, low)[0] < 0.1


@pytest.mark.parametrize("way", ["masked_fill", "masked_fill_", "masked_fill with a tensor"])
def test_a_mask_of_minus_infinity_stays_minus_infinity(way):
    """A causal mask of -inf has to hide what it masks, as in float32."""
    with autocast("cpu", dtype=torch.float16):
        scores = torch.randn(6, 8).half()
        value = torch.tensor(-torch.inf) if "tensor" in way else -torch.inf
        filled = getattr(scores, way.split()[0])(MASK, value)
    assert (filled[MASK] == -torch.inf).all()


LIMITS = {
    "clamp": lambda x: x.clamp(-1e9, 1e9),
    "clamp_": lambda x: x.clone().clamp_(-1e9, 1e9),
    "clamp(max)": lambda x: x.clamp(max=1e9),
    "nan_to_num": lambda x: torch.nan_to_num(x, nan=0.0, posinf=1e9, neginf=-1e9),
    "comparison": lambda x: (x < 1e9) * x,
    "maximum": lambda x: torch.maximum(x, torch.tensor(-1e9)),
    "hardshrink": lambda x: F.hardshrink(x, 1e9),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_limits_beyond_half_limit_nothing(limit, low):
    """Clamping to a range that half does not have fails with an overflow in the conversion."""
    assert max(distances(through_linear(LIMITS[limit]), low)) < 0.05


class Attention(nn.Module):
    """Attention as people write it."""

    def __init__(self, value, fill):
        super().__init__()
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.value, self.fill = value, fill

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4
        mask = torch.ones(scores.shape[-2:]).triu(1).bool()
        return self.out(self.fill(scores, mask, self.value).softmax(-1) @ v)


FILLS = {
    "masked_fill": lambda s, m, c: s.masked_fill(m, c),
    "where": lambda s, m, c: torch.where(m, c, s),
    "added": lambda s, m, c: s + torch.zeros(s.shape[-2:]).masked_fill(m, c),
}


@pytest.mark.parametrize("value", [-1e9, -1e4, -65504.0 * 2, -torch.inf, torch.finfo().min])
@pytest.mark.parametrize("fill", FILLS)
def test_attention_with_a_hand_written_mask_trains(fill, value, low):
    """A language model written for float32 fails in its attention mask under autocast."""

    def make():
        return trained(Attention(value, FILLS[fill]), torch.randn(4, 5, 16))

    assert max(distances(make, low)) < 0.05
