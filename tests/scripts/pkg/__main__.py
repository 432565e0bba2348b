"""Fits a perceptron to scanned digits with L-BFGS: run as `python -m pkg`."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn, optim

from .model import Perceptron


def main():
    parser = argparse.ArgumentParser(prog="pkg", description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    images, targets = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32) / 16.0
    targets = torch.tensor(targets)
    model, criterion = Perceptron(), nn.CrossEntropyLoss()
    optimizer = optim.LBFGS(model.parameters(), lr=0.8, max_iter=5, history_size=10)
    for step in range(args.steps):
        print("STEP:", step)

        def closure():
            optimizer.zero_grad()
            weights = sum(p.square().sum() for p in model.parameters())
            loss = criterion(model(images), targets) + args.weight_decay * weights
            print(f"loss {loss.item()}")
            loss.backward()
            return loss

        optimizer.step(closure)
    with torch.no_grad():
        right = (model(images).argmax(1) == targets).float().mean().item()
    print(f"right {right:.3f}")


if __name__ == "__main__":
    main()
