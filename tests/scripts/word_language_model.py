"""Predicts the next byte with an LSTM: PyTorch's word language model on Python's own source."""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn

BPTT, CLIP = 32, 0.25


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, tie_weights):
        super().__init__()
        self.nhid, self.nlayers = nhid, nlayers
        self.drop, self.encoder = nn.Dropout(0.1), nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=0.1)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        if tie_weights:
            self.decoder.weight = self.encoder.weight

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        size = self.nlayers, bsz, self.nhid
        return weight.new_zeros(size), weight.new_zeros(size)


def repackage_hidden(hidden):
    return tuple(each.detach() for each in hidden)


def batchify(name, length, bsz):
    text = (Path(sysconfig.get_path("stdlib")) / name).read_bytes()[:length]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: len(data) // bsz * bsz].view(bsz, -1).t().contiguous()


def batches(source):
    for i in range(0, len(source) - BPTT - 1, BPTT):
        yield source[i : i + BPTT], source[i + 1 : i + 1 + BPTT].flatten()


def evaluate(model, source):
    model.eval()
    losses, hidden = [], model.init_hidden(source.shape[1])
    with torch.no_grad():
        for data, targets in batches(source):
            output, hidden = model(data, hidden)
            losses.append(nn.functional.cross_entropy(output, targets).item())
    return sum(losses) / len(losses)


def train(args, model, source, optimizer):
    model.train()
    criterion, hidden = nn.CrossEntropyLoss(), model.init_hidden(source.shape[1])
    for batch, (data, targets) in enumerate(batches(source)):
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if optimizer is None:
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-args.lr)
        else:
            optimizer.step()
        if batch % args.log_interval == 0:
            print(f"batch {batch}: loss {loss.item()} ppl {math.exp(loss.item()):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lr", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--length", type=int, default=65536, help="bytes of training text")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--by-hand", action="store_true", help="update without an optimizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-interval", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    train_data = batchify("argparse.py", args.length, 16)
    held_out = batchify("textwrap.py", args.length // 8, 8)
    model = RNNModel(256, 96, 96, 2, args.tied)
    optimizer = None if args.by_hand else torch.optim.SGD(model.parameters(), args.lr)
    for epoch in range(args.epochs):
        train(args, model, train_data, optimizer)
        held_out_loss = evaluate(model, held_out)
        print(f"epoch {epoch}: held-out perplexity {math.exp(held_out_loss):.2f}")


if __name__ == "__main__":
    main()
