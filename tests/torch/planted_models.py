"""Models of random shape, in one module of which something may go wrong."""

import torch
from hypothesis import strategies as st
from torch import nn

from halfstep.torch import autocast


class Twice(nn.Module):
    """Adds its input to itself over and over."""

    def forward(self, x):
        x = torch.ones_like(x) * 9
        for _ in range(16):
            x = x + x
        return torch.tanh(x)


class Sums(nn.Linear):
    """Sums to more than float16 can hold."""

    def __init__(self, width):
        super().__init__(width, width, bias=False)
        nn.init.constant_(self.weight, 3e4)

    def forward(self, x):
        return torch.tanh(super().forward(x * 0 + 1))


class Squares(nn.Module):
    """Multiplies numbers of the hundreds with themselves."""

    def forward(self, x):
        large = (x * 0 + 300).half()
        return torch.rsqrt((large * large).float().mean(-1, keepdim=True)) * x


class Vanishing(nn.Module):
    """Divides by a number that is too small for float16."""

    def forward(self, x):
        low = torch.relu(x - 1e4).half()
        return (x + low / (low.sum(-1, keepdim=True).half() + 1e-8)).float()


class Rounded(nn.Module):
    """Takes the logarithm of a difference that float16 rounds to zero."""

    def forward(self, x):
        sure = (torch.sigmoid(x.float()) * 0 + 1 - 1e-4).half()
        return x + torch.exp(torch.log(1 - sure))


class Selected(nn.Module):
    """Takes the root of what it leaves out afterwards."""

    def forward(self, x):
        x = x.float()
        none = x - x.detach()
        return torch.where(none > 0, torch.sqrt(none), x)


class Steep(nn.Module):
    """Has a gradient so large that float16 cannot hold it."""

    def forward(self, x):
        x = x.half()
        small = x - x.detach()
        return (x + small * 6e4 * 6e4).float()


# What each does wrong: the word for it, and the pass.
FAULTS = {
    Twice: ("add", "forward"),
    Sums: ("matmul", "forward"),
    Squares: ("multiply", "forward"),
    Vanishing: ("divide", "forward"),
    Rounded: ("log", "forward"),
    Selected: ("sqrt", "backward"),
    Steep: ("multiply", "backward"),
}


class Residual(nn.Module):
    """Adds what modules make of a normalised input to the input."""

    def __init__(self, width, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.ModuleDict(inner)

    def forward(self, x):
        hidden = self.norm(x)
        for layer in self.inner.values():
            hidden = layer(hidden)
        return x + hidden


class Looks(nn.Module):
    """Attends to what came before."""

    def __init__(self, width):
        super().__init__()
        self.queries, self.values = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        scores = self.queries(x) @ x.transpose(-1, -2)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf")).softmax(-1) @ self.values(x)


HEALTHY = (
    lambda width: nn.Linear(width, width),
    lambda width: nn.Sequential(
        nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
    ),
    lambda width: nn.Dropout(0.1),
    lambda width: nn.LayerNorm(width),
    Looks,
)


@st.composite
def models(draw, planted):
    """Draws a model, and the path of the module in it that goes wrong, if one is to be planted."""
    width, path = draw(st.sampled_from([4, 8])), ""
    blocks = [_block(draw, width, draw(st.integers(1, 3))) for _ in range(draw(st.integers(1, 3)))]
    if planted is not None:
        place = draw(st.integers(0, len(blocks) - 1))
        path = f"1.{place}.{_plant(draw, blocks[place], planted, width)}"
    model = nn.Sequential(nn.Linear(3, width), nn.Sequential(*blocks), nn.Linear(width, 2))
    for each in model.modules():
        if type(each) is nn.Linear:
            nn.init.orthogonal_(each.weight)
    return model, path


def _block(draw, width, size):
    made = [draw(st.sampled_from(HEALTHY))(width) for _ in range(size)]
    return Residual(width, {f"part{number}": each for number, each in enumerate(made)})


def _plant(draw, block, kind, width):
    inner = block.inner
    name = draw(st.sampled_from(sorted(inner)))
    module = kind(width) if kind is Sums else kind()
    if draw(st.booleans()):
        inner[name] = nn.Sequential(inner[name], module)
        return f"inner.{name}.1"
    inner[name] = module
    return f"inner.{name}"


def loss_fn(model, batch):
    return model(batch).float().square().mean()


def inside(context):
    """Returns the loss within an autocast."""

    def loss(model, batch):
        with context("cpu", dtype=torch.float16):
            return loss_fn(model, batch)

    return loss


# How a step may compute in low precision, as arguments of `diagnose` after the batch.
WAYS = {
    "policy": (loss_fn, {"policy": "mixed_float16, scale=static(1024.0)"}),
    "autocast": (inside(autocast), {"loss_scale": 2.0**10}),
    "native": (inside(torch.autocast), {"loss_scale": 2.0**10}),
}


def batch():
    return torch.randn(2, 5, 3)
