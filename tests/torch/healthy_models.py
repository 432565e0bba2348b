"""Models in which there is inf, or memory that nobody has written to, and nothing is wrong."""

import torch
from torch import nn
from torch.nn import functional

from tests.torch.faulty_models import mean

LOWEST = float("-inf")


def finfo_min(scores):
    return torch.finfo(scores.dtype).min


def causal(scores):
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


def full(scores, value, diagonal):
    return torch.full(scores.shape[-2:], value, dtype=scores.dtype).triu(diagonal)


def buffer(scores):
    """A mask in memory that was not written to before."""
    mask = torch.empty(scores.shape[-2:], dtype=scores.dtype)
    return torch.triu(mask.fill_(LOWEST), 1)


# How people keep attention from looking at what comes later.
MASKS = {
    "masked_fill": lambda scores: scores.masked_fill(causal(scores), LOWEST),
    "masked_fill with a finite number": lambda scores: scores.masked_fill(
        causal(scores), finfo_min(scores)
    ),
    "where": lambda scores: torch.where(
        causal(scores), torch.tensor(LOWEST, dtype=scores.dtype), scores
    ),
    "a sum": lambda scores: scores + full(scores, LOWEST, 1),
    "a sum in float32": lambda scores: scores + torch.zeros(1).masked_fill(causal(scores), LOWEST),
    "a sum of three": lambda scores: (
        scores + (full(scores, finfo_min(scores), 1) + full(scores, finfo_min(scores), 2))
    ),
    "a number that does not fit": lambda scores: scores + causal(scores).to(scores.dtype) * -1e9,
    "a cast that does not fit": lambda scores: scores + (causal(scores) * -1e9).to(scores.dtype),
    "memory that is new": lambda scores: scores + buffer(scores),
    "in place": lambda scores: scores.masked_fill_(causal(scores), LOWEST),
}


class Attention(nn.Module):
    """A language model of one layer of attention.

    Args:
        mask: Masks the scores.
    """

    def __init__(self, mask):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.queries, self.keys, self.values = (nn.Linear(8, 8) for _ in range(3))
        self.mask = mask

    def forward(self, tokens):
        x = self.embed(tokens)
        scores = self.queries(x) @ self.keys(x).transpose(-1, -2)
        return self.head(self.mask(scores).softmax(-1) @ self.values(x))


class Fused(Attention):
    """The same with PyTorch's own attention."""

    def forward(self, tokens):
        x = self.embed(tokens)[:, None]
        given = self.queries(x), self.keys(x), self.values(x)
        mask = self.mask(torch.zeros(x.shape[-2], x.shape[-2], dtype=given[0].dtype))
        return self.head(functional.scaled_dot_product_attention(*given, attn_mask=mask))


class Multihead(nn.MultiheadAttention):
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return super().forward(x, x, x, attn_mask=mask)[0]


class First(nn.Module):
    """The first result of a module that has several."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Computed(nn.Module):
    """A linear layer and what a function makes of it."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.layer(x))


def safe_log(h):
    safe = torch.where(h > 0, h, 1.0)
    return torch.where(h > 0, safe.log(), 0.0)


def masked_log(h):
    share = torch.eye(8, dtype=torch.float32)[: h.shape[0]]
    return h + share.log().masked_fill(share == 0, 0.0) + torch.xlogy(share, share)


def pieces(h):
    out = h.new_empty(2 * len(h), 8)
    out[: len(h)] = h
    out[len(h) :] = 0
    return out + torch.empty_like(out).copy_(out)


def running_maximum(h):
    most = h.amax(-1, keepdim=True)
    return (h - torch.maximum(torch.full_like(most, LOWEST), most)).exp()


def nearest(h):
    most = torch.full((len(h), 8), LOWEST, dtype=h.dtype)
    return most.scatter_reduce(0, torch.zeros(len(h), 8, dtype=torch.long), h, "amax")[:1]


def sampled(h):
    return torch.distributions.Normal(h, 1.0).rsample() + functional.gumbel_softmax(h)


FUNCTIONS = (safe_log, masked_log, pieces, running_maximum, nearest, sampled)
CONV = (
    *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2)),
    *(nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
)


def entropy(model, batch):
    logits = model(batch)
    return functional.cross_entropy(logits.flatten(0, -2), batch.flatten() % logits.shape[-1])


def classes(model, batch):
    targets = torch.tensor([0, 1, -100, 2])[: len(batch)]
    return functional.cross_entropy(model(batch), targets, label_smoothing=0.1)


def alignment(model, batch):
    odds = model(batch).float().log_softmax(-1)
    targets = torch.tensor([[1, 2, 2], [3, 1, 4]])
    return functional.ctc_loss(odds, targets, torch.tensor([9, 9]), torch.tensor([3, 2]))


def square(model, batch):
    return model(batch).float().square().mean()


def normed(layer):
    return nn.utils.parametrizations.spectral_norm(nn.utils.parametrizations.weight_norm(layer))


TOKENS = torch.arange(12).view(2, 6)
VECTORS, ROWS = torch.linspace(-1, 1, 32).view(4, 8), torch.linspace(-1, 1, 80).view(2, 5, 8)


# A function that makes the model, a batch and the loss.
class Root(nn.Module):
    """Has an infinite derivative, which the one of relu takes back."""

    def forward(self, x):
        return torch.sqrt(torch.relu(x))


HEALTHY = {
    "root": (lambda: nn.Sequential(nn.Linear(8, 8), Root(), nn.Linear(8, 8)), VECTORS, square),
    **{each: (lambda each=each: Attention(MASKS[each]), TOKENS, entropy) for each in MASKS},
    "fused": (lambda: Fused(MASKS["masked_fill"]), TOKENS, entropy),
    "multihead": (lambda: Multihead(8, 2, batch_first=True), ROWS, square),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), ROWS, square),
    "lstm": (lambda: First(nn.LSTM(8, 8, 2, batch_first=True, dropout=0.1)), ROWS, square),
    "gru": (lambda: First(nn.GRU(8, 8, batch_first=True)), ROWS, square),
    "convolutions": (
        lambda: nn.Sequential(*CONV),
        torch.ones(4, 3, 16, 16).cumsum(-1) / 16,
        classes,
    ),
    "classes": (lambda: nn.Linear(8, 5), VECTORS, classes),
    "ctc": (lambda: nn.Linear(8, 6), torch.linspace(-1, 1, 144).view(9, 2, 8), alignment),
    "sparse": (lambda: nn.Embedding(20, 8, sparse=True), TOKENS, mean),
    "normed weights": (lambda: normed(nn.Linear(8, 8)), VECTORS, square),
    **{each.__name__: (lambda each=each: Computed(each), VECTORS, square) for each in FUNCTIONS},
}
