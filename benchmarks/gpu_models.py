"""The models that `gpu.py` trains."""

import torch
from overhead import Transformer
from torch import nn

# batch, length, width, heads, blocks; and for images batch, side, channels
TINY, MEDIUM = (4, 32, 64, 4, 2), (16, 512, 768, 12, 6)
IMAGES = (64, 64, 64)
# The same for a quick look.
SMALL = {TINY: (2, 16, 16, 2, 1), MEDIUM: (2, 32, 32, 4, 2), IMAGES: (4, 16, 8)}


def language_model(sizes, device):
    batch, length, width, heads, blocks = sizes
    model = Transformer(width, heads, blocks).to(device)
    symbols = torch.randint(256, (batch, length + 1), device=device)
    return model, symbols[:, :-1], symbols[:, 1:].flatten()


class Residual(nn.Module):
    """Two convolutions with batch normalisation, around which the input is added."""

    def __init__(self, channels):
        super().__init__()
        self.inner = nn.Sequential()
        for _ in range(2):
            self.inner += nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
            )
            self.inner.append(nn.ReLU())

    def forward(self, images):
        return images + self.inner(images)


def image_model(sizes, device):
    batch, side, channels = sizes
    stages = [nn.Conv2d(3, channels, 3, padding=1)]
    for wide in (channels, 2 * channels, 4 * channels):
        stages += [Residual(wide), nn.Conv2d(wide, 2 * wide, 2, stride=2)]
    stages += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * channels, 10)]
    model = nn.Sequential(*stages).to(device, memory_format=torch.channels_last)
    images = torch.rand(batch, 3, side, side, device=device)
    targets = torch.randint(10, (batch,), device=device)
    return model, images.to(memory_format=torch.channels_last), targets


MODELS = {
    "tiny transformer": (language_model, TINY),
    "medium transformer": (language_model, MEDIUM),
    "CNN": (image_model, IMAGES),
}


def built(name, options):
    """Returns a model, and inputs and targets for it, the same each time."""
    torch.manual_seed(0)
    build, sizes = MODELS[name]
    return build(SMALL[sizes] if options.quick else sizes, options.device)
