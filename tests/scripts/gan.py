"""Draws digits: PyTorch's DCGAN example on scikit-learn's 8x8 images."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn, optim

NZ = 32


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(NZ, 64, 2, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(True),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(True),
        nn.ConvTranspose2d(32, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 64, 4, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(64, 1, 2, bias=False),
        nn.Flatten(0),
    )


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--niter", type=int, default=8, help="epochs")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-interval", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8.0 - 1.0
    netG, netD = generator().apply(weights_init), discriminator().apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = optim.Adam(netD.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=args.lr, betas=(0.5, 0.999))
    for epoch in range(args.niter):
        for i, batch in enumerate(torch.randperm(len(images)).split(args.batch_size)):
            netD.zero_grad()
            real = images[batch]
            ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
            errD_real = criterion(netD(real), ones)
            errD_real.backward()
            fake = netG(torch.randn(len(real), NZ, 1, 1))
            errD_fake = criterion(netD(fake.detach()), zeros)
            errD_fake.backward()
            optimizerD.step()

            netG.zero_grad()
            errG = criterion(netD(fake), ones)
            errG.backward()
            optimizerG.step()
            if i % args.log_interval == 0:
                print(f"[{epoch}/{args.niter}][{i}] real: loss {errD_real.item()}")
                print(f"fake: loss {errD_fake.item()}, generator: loss {errG.item()}")


if __name__ == "__main__":
    main()
