"""Operands of different dtypes: one passed through a half operation, the other did not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.torch import autocast

WIDE = torch.full((6, 8), 0.5)
PAIRS = {
    "a @ b": lambda h: h @ WIDE.T,
    "b @ a": lambda h: WIDE @ h.T,
    "bmm": lambda h: torch.bmm(h[None], WIDE.T[None]),
    "baddbmm": lambda h: torch.baddbmm(torch.zeros(1, 6, 6), h[None], WIDE.T[None]),
    "addmm": lambda h: torch.addmm(torch.zeros(6), h, WIDE.T),
    "addmv": lambda h: torch.addmv(torch.zeros(6), h, WIDE[0]),
    "addr": lambda h: torch.addr(torch.zeros(6, 8), h[:, 0], WIDE[0]),
    "mv": lambda h: torch.mv(h, WIDE[0]),
    "dot": lambda h: torch.dot(h[0], WIDE[0]),
    "vdot": lambda h: torch.vdot(h[0], WIDE[0]),
    "inner": lambda h: torch.inner(h, WIDE),
    "outer": lambda h: torch.outer(h[0], WIDE[0]),
    "einsum": lambda h: torch.einsum("ij,kj->ik", h, WIDE),
    "einsum of three": lambda h: torch.einsum("ij,kj,kl->il", h, WIDE, WIDE.double().float()),
    "einsum of lists": lambda h: torch.einsum(h, [0, 1], WIDE, [2, 1], [0, 2]),
    "tensordot": lambda h: torch.tensordot(h, WIDE.T, 1),
    "chain_matmul": lambda h: torch.linalg.multi_dot([h, WIDE.T, h]),
    "vecdot": lambda h: torch.linalg.vecdot(h, WIDE),
    "bilinear": lambda h: F.bilinear(h, WIDE, torch.ones(2, 8, 8)),
    "kron": lambda h: torch.kron(h, WIDE),
    "cross": lambda h: torch.linalg.cross(h[:, :3], WIDE[:, :3]),
    "lerp": lambda h: torch.lerp(h, WIDE, 0.5),
    "lerp by a tensor": lambda h: torch.lerp(WIDE, h, WIDE),
    "addcmul": lambda h: torch.addcmul(WIDE, h, WIDE),
    "addcdiv": lambda h: torch.addcdiv(WIDE, h, WIDE),
    "cdist": lambda h: torch.cdist(h, WIDE),
    "pairwise_distance": lambda h: F.pairwise_distance(h, WIDE),
    "cosine_similarity": lambda h: F.cosine_similarity(h, WIDE),
    "grid_sample of half": lambda h: F.grid_sample(
        h.view(1, 1, 6, 8), torch.zeros(1, 2, 2, 2), align_corners=False
    ),
    "grid_sample by half": lambda h: F.grid_sample(
        torch.ones(1, 1, 6, 8), h[:4, :2].reshape(1, 2, 2, 2), align_corners=False
    ),
    "searchsorted": lambda h: torch.searchsorted(torch.linspace(-1, 1, 5), h),
    "bucketize": lambda h: torch.bucketize(h, torch.linspace(-1, 1, 5)),
    "quantile": lambda h: torch.quantile(h, torch.tensor([0.1, 0.9])),
    "isclose": lambda h: torch.isclose(h, WIDE),
    "allclose": lambda h: torch.allclose(h, WIDE),
    "heaviside": lambda h: torch.heaviside(h, WIDE),
    "trapezoid": lambda h: torch.trapezoid(h, torch.arange(8.0)),
    "prelu": lambda h: F.prelu(h, torch.tensor([0.1])),
    "layer_norm": lambda h: F.layer_norm(h, (8,), torch.ones(8), torch.zeros(8)),
    "rms_norm": lambda h: F.rms_norm(h, (8,), torch.ones(8)),
    "group_norm": lambda h: F.group_norm(h, 2, torch.ones(8), torch.zeros(8)),
    "conv1d": lambda h: F.conv1d(h[None], torch.ones(2, 6, 3), torch.ones(2)),
    "conv_transpose1d": lambda h: F.conv_transpose1d(h[None], torch.ones(6, 2, 3), torch.ones(2)),
    "attention": lambda h: F.scaled_dot_product_attention(WIDE[None], h[None], h[None]),
    "attention with a mask": lambda h: F.scaled_dot_product_attention(
        h[None], WIDE[None], h[None], attn_mask=torch.zeros(6, 6)
    ),
    "meshgrid": lambda h: torch.meshgrid(h[0], WIDE[0], indexing="ij"),
    "cartesian_prod": lambda h: torch.cartesian_prod(h[0], WIDE[0]),
    "linear with half weights": lambda h: F.linear(WIDE, h),
    "normal": lambda h: torch.normal(h, WIDE),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_half_and_a_float32_operand_work_together(pair, low):
    """expected scalar type Half but found Float, where only one operand came from a half layer."""
    layer = nn.Linear(8, 8)
    with autocast("cpu", dtype=low):
        PAIRS[pair](layer(torch.randn(6, 8)))


SUMS = {
    "weights of a bag": lambda h: F.embedding_bag(
        torch.arange(6).view(2, 3), WIDE, per_sample_weights=h[:2, :3], mode="sum"
    ),
    "a bag of half": lambda h: F.embedding_bag(
        torch.arange(6).view(2, 3), h, per_sample_weights=torch.ones(2, 3), mode="sum"
    ),
}


@pytest.mark.parametrize("bag", SUMS)
def test_embedding_bag_takes_weights_of_another_dtype(bag, low):
    """A recommender fails: expected weight to have the same type as per_sample_weights."""
    with autocast("cpu", dtype=low):
        SUMS[bag](nn.Linear(8, 8)(torch.randn(6, 8))).sum().backward()


MODULES = {
    "linear": (lambda: nn.Linear(8, 8), (3, 8)),
    "conv": (lambda: nn.Conv2d(8, 8, 1), (3, 8, 2, 2)),
    "layer norm": (lambda: nn.LayerNorm(8), (3, 8)),
    "group norm": (lambda: nn.GroupNorm(2, 8), (3, 8)),
    "rms norm": (lambda: nn.RMSNorm(8), (3, 8)),
    "instance norm": (lambda: nn.InstanceNorm1d(8, affine=True), (3, 8, 4)),
    "recurrent cell": (lambda: nn.GRUCell(8, 8), (3, 8)),
    "recurrent layer": (lambda: nn.GRU(8, 8), (3, 8)),
    "prelu": (lambda: nn.PReLU(), (3, 8)),
    "bilinear": (lambda: _Twice(), (3, 8)),
}


class _Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.product = nn.Bilinear(8, 8, 8)

    def forward(self, x):
        return self.product(x, x)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("module", MODULES)
def test_a_module_stored_in_half_takes_inputs_of_every_dtype(module, given, stored, low):
    """A model loaded with torch_dtype=float16 fails in a norm that gets a float32 activation."""
    make, shape = MODULES[module]
    with autocast("cpu", dtype=low):
        outputs = make().to(stored)(torch.randn(shape).to(given).requires_grad_())
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    outputs.float().sum().backward()


def test_half_adapters_on_a_float32_model_train(low):
    """LoRA: float32 adapters on half weights, or the other way round."""
    base, down, up = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
    for half, wide in (((base,), (down, up)), ((down, up), (base,))):
        modules = [copy.deepcopy(m).to(low) for m in half] + [copy.deepcopy(m) for m in wide]
        with autocast("cpu", dtype=low):
            result = torch.randn(3, 8)
            for module in sorted(modules, key=lambda m: -m.in_features):
                result = module(result) if module.in_features == result.shape[-1] else result
        result.float().sum().backward()


SPARSE = {
    "sparse.mm": lambda h: torch.sparse.mm(torch.eye(6).to_sparse(), h),
    "coo @ half": lambda h: torch.eye(6).to_sparse() @ h,
    "coo @ half vector": lambda h: torch.eye(6).to_sparse() @ h[:, 0],
    "sparse.addmm": lambda h: torch.sparse.addmm(WIDE, torch.eye(6).to_sparse(), h),
    "half values": lambda h: torch.sparse_coo_tensor(
        torch.arange(6).repeat(2, 1), h[:, 0], (6, 6)
    ).to_dense(),
}


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("product", SPARSE)
def test_a_sparse_matrix_times_half_features_works(product, low):
    """A graph net multiplies by a sparse adjacency matrix: not implemented for Half."""
    layer = nn.Linear(8, 8)
    with autocast("cpu", dtype=low):
        SPARSE[product](layer(torch.randn(6, 8))).float().sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_float64_is_left_alone(low):
    """A geometry module in float64 inside a half model keeps its precision."""
    module = nn.Linear(8, 8).double()
    with autocast("cpu", dtype=low):
        outputs = module(torch.randn(6, 8).double())
        summed = outputs.exp().sum()
    assert outputs.dtype == summed.dtype == torch.float64


@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16], ids=str)
def test_a_third_dtype_is_taken_in(other, low):
    """Unexpected floating ScalarType in prioritize: a bfloat16 tensor in a float16 region."""
    layer, stray = nn.Linear(8, 8), torch.randn(6, 8).to(other)
    with autocast("cpu", dtype=low):
        half = layer(stray)
        torch.cat([half, stray, torch.ones(6, 8)])
        torch.stack([half, stray])
        torch.addcmul(half, stray, stray)
        torch.dot(half[0], stray[0])
        torch.zeros(6, 8).index_add_(0, torch.arange(6), stray)
        half.clone().index_put_((torch.arange(6),), stray)
        F.scaled_dot_product_attention(half[None], stray[None], stray[None])
