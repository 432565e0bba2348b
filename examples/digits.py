"""Trains a small CNN on scikit-learn's 1,797 scanned digits and reports held-out accuracy.

By itself it runs as `autocast()` decides (bfloat16 on a CPU); halfstep runs it once per policy:

    python examples/digits.py
    halfstep compare examples/digits.py --seeds 3
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import halfstep
from halfstep.torch import GradScaler, autocast


def load_data():
    """Returns (train images, train labels, held-out images, held-out labels)."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target)
    # The split is the same for every seed, so that seeds differ only in how they train.
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held_out = order.split((1437, 360))
    return images[train], labels[train], images[held_out], labels[held_out]


def build_model():
    """Returns the network: two convolutions, then two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(model, images, labels, epochs):
    """Trains with the loop of the PyTorch documentation."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = GradScaler()
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            with autocast():
                loss = F.cross_entropy(model(images[batch]), labels[batch])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@torch.no_grad()
def accuracy(model, images, labels):
    """Returns the fraction of images whose most likely class is the right one."""
    model.eval()
    with autocast():
        predictions = model(images).argmax(dim=1)
    return (predictions == labels).float().mean().item()


def main():
    """Trains, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, help="without it, whatever seed the process has")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        torch.manual_seed(arguments.seed)
    train_images, train_labels, test_images, test_labels = load_data()
    model = build_model()
    train(model, train_images, train_labels, arguments.epochs)
    result = accuracy(model, test_images, test_labels)
    halfstep.metric("accuracy", result)
    print(f"held-out accuracy {result:.4f}")


if __name__ == "__main__":
    main()
