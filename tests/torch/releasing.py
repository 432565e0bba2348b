"""Models whose blocks apply their gradients within backward, and their twins that do not."""

import torch
from torch import nn
from torch.nn import functional

from halfstep.torch import prepare
from halfstep.torch._masters._kept import true_value

BLOCKS = 4
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
}
SCALED = "mixed_float16, scale=dynamic(init_scale=1024.0)"


class Spoil(torch.autograd.Function):
    """Lets values pass, and makes their gradient infinite."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.spoils = False

    def forward(self, values):
        inner = self.first(values).tanh()
        return values + self.second(Spoil.apply(inner) if self.spoils else inner)


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, 2)

    def forward(self, values):
        for block in self.blocks:
            values = block(values)
        return self.head(values)


def made(kind="adamw", policy="mixed_bfloat16", release=True, whole=True, masters="split"):
    """Returns a model with blocks that are regions, its optimizer and the regions."""
    torch.manual_seed(0)
    model = Model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    settings = {"policy": policy, "masters": masters}
    regions = [prepare(each, optimizer, release=release, **settings) for each in model.blocks]
    if whole:
        regions.append(prepare(model, optimizer, **settings))
    return model, optimizer, regions


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(16, 8, generator=generator) for _ in range(count)]


def loss_of(model, values):
    return functional.cross_entropy(model(values), (values.sum(dim=1) > 4).long())


def train(model, optimizer, steps=6):
    for values in batches(steps):
        optimizer.zero_grad()
        loss_of(model, values).backward()
        optimizer.step()


def state_of(module, optimizer):
    """Returns copies of all numbers of a module: values, remainders, and the optimizer's state."""
    found = {}
    for name, each in module.named_parameters():
        found[name] = each.detach().clone()
        found[f"{name} exactly"] = true_value(each).clone()
        for key, value in optimizer.state.get(each, {}).items():
            found[f"{name} {key}"] = torch.as_tensor(value).clone()
    return found


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def all_changed(module, before, optimizer):
    """Returns whether every parameter, with all of its state, was stepped."""
    after = state_of(module, optimizer)
    return all(
        key not in before or not torch.equal(after[key], before[key])
        for key in after
        if not key.endswith(("weight", "bias"))
    )
