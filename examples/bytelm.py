"""Trains a small byte-level GPT on the standard library's source text and reports held-out loss.

By itself it runs as `autocast()` decides (bfloat16 on a CPU); halfstep runs it once per policy:

    python examples/bytelm.py
    halfstep compare examples/bytelm.py --seeds 3
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.torch import GradScaler, autocast

CONTEXT = 64
WIDTH = 64
HEADS = 4
BLOCKS = 2
BATCH = 8


def load_data():
    """Returns (training bytes, held-out bytes): every tenth module is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [
        [path.read_bytes() for i, path in enumerate(files) if (i % 10 == 0) is held_out]
        for held_out in (False, True)
    ]
    return [torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts]


class Block(nn.Module):
    """One transformer block: attention, then a two-layer perceptron, each with a residual."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next byte of each position."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def windows(text, starts):
    """Returns the inputs at `starts` and the same text one byte later."""
    chunk = torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()]).long()
    return chunk[:, :-1], chunk[:, 1:]


def loss_on(model, text, starts):
    """Returns the mean cross-entropy per byte."""
    inputs, targets = windows(text, starts)
    with autocast():
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(model, text, steps):
    """Trains with the loop of the PyTorch documentation, gradients clipped."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    scaler = GradScaler()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_on(model, text, torch.randint(len(text) - CONTEXT - 1, (BATCH,)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if not scaler.last_step.skipped:
            schedule.step()


@torch.no_grad()
def bits_per_byte(model, text):
    """Returns the held-out loss on 256 windows spread evenly over the text."""
    starts = torch.linspace(0, len(text) - CONTEXT - 1, 256).long().split(32)
    losses = [loss_on(model, text, part).item() for part in starts]
    return sum(losses) / len(losses) / math.log(2)


def main():
    """Trains, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, help="without it, whatever seed the process has")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        torch.manual_seed(arguments.seed)
    train_text, test_text = load_data()
    model = GPT()
    train(model, train_text, arguments.steps)
    result = bits_per_byte(model, test_text)
    halfstep.metric("held-out loss", result)
    print(f"held-out loss {result:.4f} bits per byte")


if __name__ == "__main__":
    main()
