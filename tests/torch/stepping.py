"""Small models of several kinds, each with a batch and a loss whose gradients float16 loses."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, tokens):
        batch, length, width = tokens.shape
        mixed = self.mix(self.norm(tokens)).view(batch, length, 3, self.heads, -1)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value)
        tokens = tokens + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return tokens + self.feed(self.norm_feed(tokens))


def mlp():
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    )


def transformer():
    return nn.Sequential(
        nn.Embedding(64, 32), Block(32, 4), Block(32, 4), nn.LayerNorm(32), nn.Linear(32, 64)
    )


@dataclass(frozen=True)
class Case:
    """A model, a batch, and a factor of the loss."""

    build: Any
    shape: tuple[int, ...]
    classes: int
    factor: float

    def model(self):
        torch.manual_seed(0)
        return self.build()

    def batch(self):
        generator = torch.Generator().manual_seed(1)
        if self.build is transformer:
            inputs = torch.randint(self.classes, self.shape, generator=generator)
            return inputs, inputs.roll(1)
        targets = torch.randint(self.classes, self.shape[:1], generator=generator)
        return torch.randn(self.shape, generator=generator), targets

    def loss(self, model, batch):
        outputs = model(batch[0])
        entropy = functional.cross_entropy(outputs.flatten(0, -2).float(), batch[1].flatten())
        return entropy * self.factor


CASES = {
    "mlp": Case(mlp, (64, 32), 10, 2.0**-9),
    "conv": Case(conv_net, (16, 3, 16, 16), 10, 2.0**-6),
    "transformer": Case(transformer, (8, 24), 64, 2.0**-5),
}
