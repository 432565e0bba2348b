"""Models in training with split masters, for tests."""

import torch
from torch import nn
from torch.nn import functional

from halfstep.torch import prepare
from halfstep.torch._masters._kept import true_value

POLICIES = {
    "mixed_bfloat16": torch.bfloat16,
    "mixed_float16": torch.bfloat16,
    "mixed_float16, param_dtype=float16": torch.float16,
}
IN_FLOAT16 = "mixed_float16, param_dtype=float16"


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, values):
        return self.head(self.inner(values.view(-1, 2, 8))[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(2, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.head.weight = self.embedding.weight

    def forward(self, values):
        found = self.embedding((values > 0.5).long())
        return self.head((self.mix(found).tanh() * values[..., None]).mean(dim=1))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, values):
        return self.head(self.inner(values.view(-1, 2, 8)).mean(dim=1))


def perceptron():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))


def convolution():
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 2),
    )


MODELS = {
    "mlp": perceptron,
    "convolution": convolution,
    "lstm": Recurrent,
    "transformer": Attending,
    "tied": Tied,
}


def made(make=perceptron, policy="mixed_bfloat16", optimizer=torch.optim.AdamW, **settings):
    torch.manual_seed(0)
    model = make()
    trainer = optimizer(model.parameters(), lr=1e-2)
    return model, trainer, prepare(model, trainer, policy, **{"masters": "split", **settings})


def losses(model, optimizer, steps=40, seed=1):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        values = torch.rand(64, 16, generator=generator)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(values), (values[:, :8].sum(1) > 4).long())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def exact(model):
    return {name: true_value(each).clone() for name, each in model.named_parameters()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
