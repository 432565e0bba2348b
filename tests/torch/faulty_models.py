"""Small models, each of which goes wrong in a way that people report, and is mended by a remedy."""

import torch
from torch import nn

from halfstep.torch import autocast


def mean(model, batch):
    return model(batch).float().mean()


def inside(context, loss=mean, dtype=torch.float16):
    """Returns a loss within an autocast."""

    def loss_fn(model, batch):
        with context("cpu", dtype=dtype):
            return loss(model, batch)

    return loss_fn


def square(width, value, bias=0.0):
    layer = nn.Linear(width, width)
    nn.init.constant_(layer.weight, value)
    nn.init.constant_(layer.bias, bias)
    return layer


class Written(nn.Module):
    """A module of which somebody may rewrite a line, by a text."""

    text = ""

    def rewritten(self, name, value):
        """Returns what a text makes of a variable, the variable as it is without a text."""
        names = {name: value}
        if self.text:
            exec(self.text, names)  # the remedy, which is to be pasted
        return names[name]


class Feed(nn.Module):
    """Sums to more than float16 can hold, and hides it."""

    def __init__(self):
        super().__init__()
        self.grow, self.sum = square(8, 100.0), square(8, 100.0)

    def forward(self, x):
        return torch.tanh(self.sum(torch.relu(self.grow(x))) * 1e-6)


class Norm(nn.Module):
    """Norms by squares of half precision."""

    def __init__(self):
        super().__init__()
        self.layer = square(8, 100.0)

    def forward(self, x):
        hidden = self.layer(x).half()
        return hidden * torch.rsqrt((hidden * hidden).mean(-1, keepdim=True))


class Adds(nn.Module):
    """Doubles a sum until it leaves the range."""

    def __init__(self):
        super().__init__()
        self.layer = square(4, 1.0)

    def forward(self, x):
        x = self.layer(x)
        for _ in range(14):
            x = x + x
        return x * 1e-5


class Focal(Written):
    """Takes the logarithm of a difference from 1."""

    epsilon = 1e-4

    def __init__(self):
        super().__init__()
        self.layer = square(4, 0.1, bias=15.0)

    def forward(self, x):
        sure = torch.sigmoid(self.layer(x)).half().clamp(self.epsilon, 1 - self.epsilon)
        return -torch.log(1 - sure) * sure


class Hidden(nn.Module):
    """Takes a logarithm of which the next operation hides the result, but not the gradient."""

    def __init__(self):
        super().__init__()
        self.layer = square(4, 0.1, bias=14.0)

    def forward(self, x):
        sure = torch.sigmoid(self.layer(x))
        return 1 - torch.exp(torch.log1p(-sure.clamp(max=1 - 1e-6)).sum(-1))


class Divides(Written):
    """Divides by a sum with an epsilon that float16 does not have."""

    epsilon = 1e-8

    def __init__(self):
        super().__init__()
        self.layer = square(4, 0.1, bias=-1.0)

    def forward(self, x):
        hidden = torch.relu(self.layer(x))
        shares = hidden / (hidden.sum(-1, keepdim=True).to(hidden.dtype) + self.epsilon)
        return shares * torch.arange(4.0)


class TwoMasks(Written):
    """Adds two masks, which leave no number in a row."""

    def __init__(self):
        super().__init__()
        self.layer = square(4, 0.1)

    def forward(self, x):
        scores = self.layer(x) @ x.transpose(-1, -2).to(self.layer(x).dtype)
        lowest = torch.finfo(scores.dtype).min
        mask = torch.zeros(3, 3, dtype=scores.dtype)
        mask[0] = lowest
        mask = self.rewritten("mask", mask)
        both = mask + mask
        return (scores + both).softmax(-1) @ x.to(scores.dtype)


class EmptyRow(Written):
    """Leaves no number in a row of what goes into softmax."""

    def __init__(self):
        super().__init__()
        self.layer = square(4, 0.1)

    def forward(self, x):
        scores = self.layer(x) @ x.transpose(-1, -2).to(self.layer(x).dtype)
        scores = scores.masked_fill(torch.tensor([[True], [False], [False]]), float("-inf"))
        return self.rewritten("scores", scores).softmax(-1) @ x.to(scores.dtype)


class Constant(Written):
    """Makes a mask of a number that float16 does not have."""

    low = -1e9

    def __init__(self):
        super().__init__()
        self.layer = square(4, 0.1)

    def forward(self, x):
        scores = self.layer(x) @ x.transpose(-1, -2).to(self.layer(x).dtype)
        mask = torch.tensor([[1.0], [0.0], [0.0]], dtype=scores.dtype) * self.low
        return (scores + mask).softmax(-1) @ x.to(scores.dtype)


class Selected(Written):
    """Takes the root of what it leaves out afterwards."""

    def __init__(self):
        super().__init__()
        self.layer = square(4, 0.1)

    def forward(self, x):
        h = self.layer(x).float() * torch.tensor([0.0, 1.0, 1.0, 1.0])
        if not self.text:
            return torch.where(h > 0, torch.sqrt(h), 0)
        *before, last = self.text.splitlines()
        names = {"h": h}
        exec("\n".join(before), names)
        return eval(last, names)


class Steep(nn.Module):
    """Has gradients that grow from layer to layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
        for layer in self.layers:
            nn.init.constant_(layer.weight, 60.0)

    def forward(self, x):
        return self.layers(x * 1e-4) * 1e-3


class Shallow(nn.Module):
    """Has gradients that fade from layer to layer."""

    def __init__(self):
        super().__init__()
        layers = {"stem": square(8, 0.5), "body": square(8, 1e-7), "head": square(8, 1e-2)}
        self.layers = nn.ModuleDict(layers)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


autocasts = {"ours": autocast, "native": torch.autocast}
