"""Operations that overflow in half: the same safety on a CPU as on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.torch import autocast

BIG, TWELVE = torch.full((400,), 300.0), torch.tensor([12.0])
TINY = torch.tensor([6e-8])
OVERFLOWING = {
    "exp": lambda: TWELVE.half().exp(),
    "torch.exp": lambda: torch.exp(TWELVE.half()),
    "exp2": lambda: torch.exp2(TWELVE.half() * 1.5),
    "expm1": lambda: TWELVE.half().expm1(),
    "sinh": lambda: TWELVE.half().sinh(),
    "cosh": lambda: TWELVE.half().cosh(),
    "pow": lambda: BIG.half().pow(2),
    "**": lambda: BIG.half() ** 2,
    "number ** tensor": lambda: 2 ** (TWELVE.half() * 1.5),
    "float_power": lambda: BIG.half().float_power(2),
    "square": lambda: BIG.half().square(),
    "sum": lambda: BIG.half().sum(),
    "sum over a dimension": lambda: BIG.half()[None].sum(-1),
    "sum over all dimensions by name": lambda: torch.sum(BIG.half()[None], dim=(0, 1)),
    "nansum": lambda: BIG.half().nansum(),
    "mean": lambda: (BIG.half() * 200).mean(),
    "cumsum": lambda: BIG.half().cumsum(0),
    "prod": lambda: BIG.half()[:3].prod(),
    "cumprod": lambda: BIG.half()[:3].cumprod(0),
    "var": lambda: (torch.arange(100) * 20.0).half().var(),
    "std": lambda: (torch.arange(100) * 600.0).half().std(),
    "var_mean": lambda: torch.var_mean((torch.arange(100) * 20.0).half())[0],
    "norm": lambda: BIG.half().norm(),
    "norm over a dimension": lambda: BIG.half()[None].norm(dim=-1),
    "norm of order 1": lambda: BIG.half().norm(1),
    "vector_norm": lambda: torch.linalg.vector_norm(BIG.half() * 100),
    "matrix_norm": lambda: torch.linalg.matrix_norm(BIG.half()[None] * 100),
    "linalg.norm": lambda: torch.linalg.norm(BIG.half() * 100, ord=1),
    "logsumexp": lambda: BIG.half().logsumexp(0),
    "softplus": lambda: F.softplus(BIG.half()),
    "rsqrt": lambda: TINY.half().rsqrt(),
    "reciprocal": lambda: TINY.half().reciprocal(),
    "log": lambda: TINY.half().log(),
    "tan": lambda: torch.tensor([1.5703]).half().tan(),
    "lgamma": lambda: torch.tensor([20000.0]).half().lgamma(),
    "dist": lambda: torch.dist(BIG.half() * 100, BIG.half()),
    "cdist": lambda: torch.cdist(BIG.half()[None] * 100, BIG.half()[None]),
    "pairwise_distance": lambda: F.pairwise_distance(BIG.half()[None] * 100, BIG.half()[None]),
    "cosine_similarity": lambda: F.cosine_similarity(BIG.half()[None], BIG.half()[None]),
    "normalize": lambda: F.normalize(BIG.half()[None] * 100),
    "renorm": lambda: torch.renorm(BIG.half()[None] * 100, 2, 0, 1.0),
    "trapezoid": lambda: torch.trapezoid(BIG.half() * 10),
    "mse_loss": lambda: F.mse_loss(BIG.half(), torch.zeros(400).half()),
    "mse_loss, summed": lambda: F.mse_loss(BIG.half(), torch.zeros(400), reduction="sum"),
    "l1_loss, summed": lambda: F.l1_loss(BIG.half(), torch.zeros(400).half(), reduction="sum"),
    "huber_loss": lambda: F.huber_loss(BIG.half(), torch.zeros(400).half(), reduction="sum"),
    "kl_div": lambda: F.kl_div(-BIG.half(), BIG.half(), reduction="batchmean"),
    "poisson_nll_loss": lambda: F.poisson_nll_loss(TWELVE.half(), TWELVE.half()),
    "cross_entropy, summed": lambda: F.cross_entropy(
        -200 * torch.eye(400).half(), torch.arange(400), reduction="sum"
    ),
    "cov": lambda: torch.cov(torch.randn(2, 400).half() * 1000),
}


@pytest.mark.parametrize("operation", OVERFLOWING)
def test_an_operation_is_finite_where_float32_is(operation):
    """A metric is inf on a CPU in half, while the same code is fine on a GPU."""
    with autocast("cpu", dtype=torch.float16):
        result = OVERFLOWING[operation]()
    assert torch.isfinite(result).all()


@pytest.mark.parametrize("rules", ["halfstep-1", "torch-2.13"])
def test_the_lists_of_a_gpu_hold_on_a_cpu(rules, low):
    """A test on a CPU says nothing about a GPU, whose autocast has another list."""
    with autocast("cpu", dtype=low, rules=rules):
        half = nn.Linear(8, 8)(torch.randn(6, 8))
        wide = [half.exp(), half.sum(), half.pow(2), half.cumsum(0), half.norm(), half.log1p()]
    assert half.dtype == low
    assert {tensor.dtype for tensor in wide} == {torch.float32}


def test_a_dtype_that_is_asked_for_wins(low):
    """sum(dtype=torch.float64) is what it says, inside a region too."""
    with autocast("cpu", dtype=low):
        half = nn.Linear(8, 8)(torch.randn(6, 8))
        asked = [half.sum(dtype=torch.float64), half.cumsum(0, dtype=torch.float64)]
        assert half.softmax(-1, dtype=torch.float32).dtype == torch.float32
        assert half.sum(dtype=low).dtype == low
    assert {tensor.dtype for tensor in asked} == {torch.float64}


def test_integers_are_summed_as_integers(low):
    """Counting with sum, prod and cumsum of integers and booleans stays exact."""
    numbers = torch.arange(3000)
    with autocast("cpu", dtype=low):
        assert numbers.sum().item() == 4498500
        assert (numbers > 5).sum().dtype == torch.int64
        assert numbers.cumsum(0)[-1].item() == 4498500


def test_a_hand_written_norm_is_finite():
    """RMSNorm written by hand: the square of 300 is infinite in half."""
    inputs = torch.full((2, 16), 300.0).half()
    with autocast("cpu", dtype=torch.float16):
        mean = inputs.pow(2).mean(-1, keepdim=True)
        result = inputs * torch.rsqrt(mean + 1e-6)
    assert torch.allclose(result.float(), torch.ones(2, 16), atol=1e-2)
