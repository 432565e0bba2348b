"""Small models of the kinds that people train, each with a batch, for `plan.py`."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional


def classify(model, batch):
    images, targets = batch
    return functional.cross_entropy(model(images), targets)


def predict(model, symbols):
    return functional.cross_entropy(model(symbols).flatten(0, 1), symbols.flatten())


def restore(model, images):
    return functional.mse_loss(model(images), images)


def images(count, side):
    return torch.randn(count, 3, side, side), torch.randint(10, (count,))


def mlp():
    """Dense layers."""
    sizes = (256, 1024, 1024)
    layers = [each for a, b in pairwise(sizes) for each in dense(a, b)]
    model = nn.Sequential(*layers, nn.Linear(sizes[-1], 10))
    return model, (torch.randn(256, 256), torch.randint(10, (256,))), classify


def dense(rows, columns):
    return nn.Linear(rows, columns), nn.ReLU()


def cnn():
    """Convolutions and pooling."""
    stages = [
        each
        for a, b in ((3, 32), (32, 64))
        for each in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*stages, nn.Flatten(), nn.Linear(64 * 64, 10)), images(32, 32), classify


class Around(nn.Module):
    """Adds what is inside to what comes in."""

    def __init__(self, *inside):
        super().__init__()
        self.inside = nn.Sequential(*inside)

    def forward(self, inputs):
        return functional.relu(inputs + self.inside(inputs))


def normed(wide, out, size=3, **options):
    convolution = nn.Conv2d(wide, out, size, padding=size // 2, bias=False, **options)
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU6())


def resnet():
    """Residual blocks with batch normalisation."""
    blocks = [Around(normed(32, 32), normed(32, 32)) for _ in range(2)]
    return head(normed(3, 32), *blocks, width=32), images(16, 32), classify


def depthwise():
    """Convolutions by channel, and between channels."""
    blocks = [normed(64, 64, groups=64), normed(64, 64, size=1)] * 2
    return head(normed(3, 64, stride=2), *blocks, width=64), images(16, 64), classify


def head(*stages, width):
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Attention(nn.Module):
    """Causal attention with its projections."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.mix, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, inputs):
        parts = self.mix(inputs).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and dense layers, normalised before."""

    def __init__(self, width, heads):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, inputs):
        inputs = inputs + self.attention(self.norms[0](inputs))
        return inputs + self.dense(self.norms[1](inputs))


def gpt():
    """Blocks with causal attention."""
    blocks = [Block(256, 4), Block(256, 4)]
    model = nn.Sequential(nn.Embedding(256, 256), *blocks, nn.LayerNorm(256), nn.Linear(256, 256))
    return model, torch.randint(256, (8, 128)), predict


def bert():
    """PyTorch's encoder, with dropout."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, activation="gelu", batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(1000, 256), encoder, nn.Linear(256, 1000))
    return model, torch.randint(1000, (8, 128)), predict


class Recurrent(nn.Module):
    """An LSTM over symbols."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 128), nn.Linear(256, 256)
        self.lstm = nn.LSTM(128, 256, batch_first=True)

    def forward(self, symbols):
        return self.head(self.lstm(self.embedding(symbols))[0])


def lstm():
    """A recurrent model."""
    return Recurrent(), torch.randint(256, (16, 64)), predict


def grouped(wide, out):
    return nn.Sequential(nn.Conv2d(wide, out, 3, padding=1), nn.GroupNorm(8, out), nn.SiLU())


class UNet(nn.Module):
    """One level down, one up, and the way around."""

    def __init__(self):
        super().__init__()
        self.above, self.down = grouped(3, 32), nn.Sequential(nn.MaxPool2d(2), grouped(32, 64))
        self.below, self.up = grouped(64, 64), nn.ConvTranspose2d(64, 32, 2, 2)
        self.joined, self.out = grouped(64, 32), nn.Conv2d(32, 3, 1)

    def forward(self, inputs):
        above = self.above(inputs)
        up = self.up(self.below(self.down(above)))
        return self.out(self.joined(torch.cat([up, above], 1)))


def unet():
    """Down, up, and around."""
    return UNet(), torch.randn(8, 3, 48, 48), restore


MODELS = {
    "MLP": mlp,
    "CNN": cnn,
    "ResNet": resnet,
    "depthwise CNN": depthwise,
    "GPT": gpt,
    "BERT": bert,
    "LSTM": lstm,
    "U-Net": unet,
}
