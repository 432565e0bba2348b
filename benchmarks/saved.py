"""How many bytes autograd keeps for the backward of a GPT, by rule set.

Run `python benchmarks/saved.py`. A 4-block GPT of width 256 on 8 sequences of 256 bytes, with its
softmax written out and with fused attention, in bfloat16. Counts, the same on any machine.
"""

import contextlib
import math

import torch
from torch import nn
from torch.nn import functional

from halfstep.torch import autocast, saved_bytes

WIDTH, HEADS, BLOCKS, SYMBOLS, BATCH, LENGTH = 256, 4, 4, 256, 8, 256
RULES = ("torch-2.13", "torch-2.13-cpu", "halfstep-1")


def written_out(query, key, value):
    """Attention as a product, a mask, a softmax and a product."""
    length, width = query.shape[-2:]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(width)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ value


def fused(query, key, value):
    """Attention as one operation."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.before_attention, self.before_feed = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, tokens):
        mixed = self.mix(self.before_attention(tokens)).unflatten(-1, (3, HEADS, -1))
        seen = self.attention(*mixed.permute(2, 0, 3, 1, 4))
        tokens = tokens + self.out(seen.transpose(1, 2).flatten(2))
        return tokens + self.feed(self.before_feed(tokens))


def kept(attention, region):
    """Returns the mebibytes kept by one forward pass and its loss."""
    model = nn.Sequential(
        nn.Embedding(SYMBOLS, WIDTH),
        *(Block(attention) for _ in range(BLOCKS)),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, SYMBOLS),
    )
    symbols = torch.randint(SYMBOLS, (BATCH, LENGTH))
    with saved_bytes() as saved, region:
        loss = functional.cross_entropy(model(symbols).flatten(0, 1), symbols.flatten())
    del loss
    return saved.bytes / 2**20


def main():
    """Prints a table."""
    print("| | softmax written out | fused attention |\n|---|---|---|")
    for rules in (None, *RULES):
        cells = []
        for attention in (written_out, fused):
            region = contextlib.nullcontext()
            if rules:
                region = autocast("cpu", dtype=torch.bfloat16, rules=rules)
            cells.append(f"{kept(attention, region):.0f} MiB")
        print(f"| {rules or 'float32'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
