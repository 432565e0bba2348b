"""Whole models in half against the same model in float32."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.torch import autocast
from tests.reports.agreement import distances, trained

LAYERS = [nn.LSTM, nn.GRU, nn.RNN]
FORMS = [
    {},
    {"bidirectional": True},
    {"num_layers": 2, "batch_first": True},
    {"bias": False},
]


def _mlp():
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(inplace=True), nn.LayerNorm(16), nn.Linear(16, 3)
    )


class Residual(nn.Module):
    """A small residual network for images, with a decoder."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding="same")
        self.up, self.group = nn.ConvTranspose2d(8, 4, 2, 2), nn.GroupNorm(2, 4)
        self.slope, self.head = nn.PReLU(), nn.Linear(4, 2)

    def forward(self, x):
        x = F.silu(self.norm(self.stem(x)), inplace=True)
        x = F.avg_pool2d(x + self.conv(x), 2)
        x = self.slope(self.group(self.up(x)))
        x = F.interpolate(x, scale_factor=2, mode="bilinear") + F.interpolate(x, scale_factor=2)
        x = F.interpolate(x, size=(5, 5), mode="area")
        return self.head(F.adaptive_avg_pool2d(x, 1)[..., 0, 0])


class RMSNorm(nn.Module):
    """A root mean square norm written by hand."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Language(nn.Module):
    """Attention with rotary embeddings, cached keys and norms of both kinds."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(11, 16), RMSNorm(), nn.RMSNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        angles = torch.outer(torch.arange(5.0), 10000 ** (-torch.arange(8.0) / 8))
        self.register_buffer("angles", torch.cat([angles, angles], -1))

    def rotate(self, x):
        turned = torch.cat([-x[..., 8:], x[..., :8]], -1)
        return x * self.angles.cos() + turned * self.angles.sin()

    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.norm(x)
        q, k = self.rotate(self.q(y)), self.rotate(self.k(y))
        keys = torch.cat([torch.zeros(tokens.shape[0], 1, 16), k], 1)
        values = torch.cat([torch.zeros(tokens.shape[0], 1, 16), self.v(y)], 1)
        x = x + F.scaled_dot_product_attention(q, keys, values)
        return self.out(x) @ self.embed.weight.T


class Experts(nn.Module):
    """A mixture of experts that gathers and adds by index."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.arange(number, x.shape[0], 2)
            result.index_add_(0, rows, expert(x[rows]) * weights[rows, number, None])
        return result


class Graph(nn.Module):
    """Message passing with sums and maxima over edges."""

    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(8, 8), nn.Linear(16, 8)

    def forward(self, x, edges):
        sent = self.message(x[edges[0]])
        index = edges[1][:, None].expand_as(sent)
        summed = torch.zeros_like(x).scatter_add_(0, index, sent)
        mean = torch.zeros_like(x).scatter_reduce(0, index, sent, "mean")
        degree = torch.zeros(x.shape[0]).index_add_(0, edges[1], torch.ones(edges.shape[1]))
        return self.update(torch.cat([summed / degree[:, None].clamp(min=1), mean], -1))


MODELS = {
    "perceptron": lambda: trained(_mlp(), torch.randn(4, 8)),
    "residual network": lambda: trained(Residual(), torch.randn(4, 3, 8, 8)),
    "language model": lambda: trained(Language(), torch.randint(0, 11, (3, 5))),
    "mixture of experts": lambda: trained(Experts(), torch.randn(6, 8)),
    "graph net": lambda: trained(Graph(), torch.randn(6, 8), torch.randint(0, 6, (2, 20))),
    "bag of embeddings": lambda: trained(nn.EmbeddingBag(9, 8), torch.randint(0, 9, (4, 3))),
    "transformer": lambda: trained(
        nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True),
        torch.randn(4, 5, 16),
        torch.randn(4, 4, 16),
    ),
    "LSTM with a projection": lambda: trained(
        nn.LSTM(5, 6, proj_size=3, num_layers=2), torch.randn(7, 3, 5)
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_as_in_float32(model, low):
    """A model that trains in float32 fails or trains otherwise under autocast."""
    assert max(distances(MODELS[model], low)) < 0.25


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_recurrent_layer_trains_as_in_float32(layer, form, packed, low):
    """Input and hidden tensors are not at the same dtype, or packed sequences fail."""

    def make():
        model, inputs = layer(5, 6, **form), torch.randn(3, 3, 5)
        if packed:
            inputs = nn.utils.rnn.pack_padded_sequence(inputs, [3, 2, 1])
            return trained(_Unpacked(model), inputs)
        return trained(model, inputs)

    assert max(distances(make, low)) < 0.1


class _Unpacked(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, sequences):
        outputs, hidden = self.layer(sequences)
        return outputs.data, hidden


@pytest.mark.parametrize("layer", LAYERS)
def test_a_recurrent_layer_takes_a_float32_state_with_half_inputs(layer, low):
    """hx is not at the right dtype: the state was made with torch.zeros."""
    state = torch.zeros(1, 3, 6)
    before, model = nn.Linear(5, 5), layer(5, 6)
    with autocast("cpu", dtype=low):
        inputs = before(torch.randn(7, 3, 5))
        outputs, _ = model(inputs, (state, state) if layer is nn.LSTM else state)
    outputs.float().sum().backward()
    assert before.weight.grad is not None


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_loop_over_a_cell_trains_as_in_float32(cell, low):
    """A decoder that feeds its outputs back fails in the second step."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = cell(5, 6), nn.Linear(6, 5)

        def forward(self, x):
            state, steps = None, []
            for _ in range(4):
                state = self.cell(x, state)
                x = self.out(state[0] if isinstance(state, tuple) else state)
                steps.append(x)
            return torch.stack(steps)

    assert max(distances(lambda: trained(Decoder(), torch.randn(3, 5)), low)) < 0.1
