"""Losses and distributions on half predictions."""

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn

from halfstep.torch import autocast
from tests.reports.agreement import distances, through_linear

ONES, CLASSES = torch.ones(6, 8), torch.tensor([0, 3, 7, 1, 2, 5])
LOSSES = {
    "cross_entropy": lambda h: F.cross_entropy(h, CLASSES),
    "cross_entropy of probabilities": lambda h: F.cross_entropy(h, ONES / 8),
    "cross_entropy, smoothed": lambda h: F.cross_entropy(
        h, CLASSES, label_smoothing=0.1, weight=torch.ones(8)
    ),
    "cross_entropy of half targets": lambda h: F.cross_entropy(h, (ONES / 8).to(h.dtype)),
    "nll_loss": lambda h: F.nll_loss(h.log_softmax(-1), CLASSES, weight=torch.ones(8)),
    "nll_loss of images": lambda h: F.nll_loss(
        h.log_softmax(-1).view(6, 8, 1, 1), CLASSES.view(6, 1, 1)
    ),
    "binary_cross_entropy": lambda h: F.binary_cross_entropy(h.sigmoid(), ONES),
    "binary_cross_entropy of half": lambda h: F.binary_cross_entropy(
        h.sigmoid(), ONES.to(h.dtype), weight=torch.ones(8)
    ),
    "BCELoss": lambda h: nn.BCELoss()(h.sigmoid(), ONES),
    "binary_cross_entropy_with_logits": lambda h: F.binary_cross_entropy_with_logits(
        h, ONES, pos_weight=torch.ones(8)
    ),
    "mse_loss": lambda h: F.mse_loss(h, ONES),
    "l1_loss": lambda h: F.l1_loss(h, ONES),
    "smooth_l1_loss": lambda h: F.smooth_l1_loss(h, ONES),
    "huber_loss": lambda h: F.huber_loss(h, ONES),
    "kl_div": lambda h: F.kl_div(h.log_softmax(-1), ONES / 8, reduction="batchmean"),
    "poisson_nll_loss": lambda h: F.poisson_nll_loss(h, ONES),
    "gaussian_nll_loss": lambda h: F.gaussian_nll_loss(h, ONES, ONES),
    "hinge_embedding_loss": lambda h: F.hinge_embedding_loss(h, ONES),
    "margin_ranking_loss": lambda h: F.margin_ranking_loss(h, ONES, ONES),
    "multilabel_margin_loss": lambda h: F.multilabel_margin_loss(h, torch.zeros_like(h).long()),
    "multilabel_soft_margin_loss": lambda h: F.multilabel_soft_margin_loss(h, ONES),
    "multi_margin_loss": lambda h: F.multi_margin_loss(h, CLASSES),
    "soft_margin_loss": lambda h: F.soft_margin_loss(h, ONES),
    "triplet_margin_loss": lambda h: F.triplet_margin_loss(h, ONES, ONES * 0, swap=True),
    "triplet_margin_with_distance_loss": lambda h: F.triplet_margin_with_distance_loss(
        h, ONES, ONES * 0
    ),
    "cosine_embedding_loss": lambda h: F.cosine_embedding_loss(h, ONES, torch.ones(6)),
    "ctc_loss": lambda h: F.ctc_loss(
        h.view(6, 1, 8).log_softmax(-1),
        torch.tensor([[1, 2]]),
        torch.tensor([6]),
        torch.tensor([2]),
    ),
    "focal loss": lambda h: -((1 - h.sigmoid()) ** 2 * F.logsigmoid(h)).mean(),
    "dice loss": lambda h: 1 - (2 * h.sigmoid().sum() + 1) / (h.sigmoid().sum() + 49),
    "contrastive loss": lambda h: F.cross_entropy(
        F.normalize(h) @ F.normalize(h).T / 0.07, torch.arange(6)
    ),
    "entropy": lambda h: -(h.softmax(-1) * h.log_softmax(-1)).sum(-1).mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_half_predictions_agrees_with_float32(loss, low):
    """binary_cross_entropy is unsafe to autocast; other losses overflow or refuse half."""
    assert max(distances(through_linear(LOSSES[loss]), low)) < 0.1


def test_a_loss_is_float32(low):
    """The loss came out in half, and the scale of 65536 made it inf."""
    predictions = torch.randn(6, 8).to(low)
    with autocast("cpu", dtype=low):
        losses = [F.cross_entropy(predictions, CLASSES), F.mse_loss(predictions, ONES.to(low))]
    assert {loss.dtype for loss in losses} == {torch.float32}


def test_a_sigmoid_at_its_end_has_a_finite_binary_cross_entropy():
    """A detector ends in a sigmoid, which is exactly 1 in half, and the loss is inf."""
    with autocast("cpu", dtype=torch.float16):
        half = torch.full((6, 8), 20.0).half().sigmoid()
        assert F.binary_cross_entropy(half, ONES * 0).isfinite()


DISTRIBUTIONS = {
    "Categorical of logits": lambda h: D.Categorical(logits=h).log_prob(CLASSES),
    "Categorical of probabilities": lambda h: D.Categorical(h.softmax(-1)).entropy(),
    "Categorical of many": lambda h: D.Categorical(h.repeat(1, 100).softmax(-1)).entropy(),
    "Categorical, normalised by hand": lambda h: D.Categorical(
        h.sigmoid() / h.sigmoid().sum(-1, keepdim=True)
    ).entropy(),
    "OneHotCategorical": lambda h: D.OneHotCategorical(h.softmax(-1)).log_prob(
        F.one_hot(CLASSES, 8).float()
    ),
    "Multinomial": lambda h: D.Multinomial(8, h.softmax(-1)).log_prob(ONES),
    "Bernoulli": lambda h: D.Bernoulli(h.sigmoid()).entropy(),
    "Normal": lambda h: D.Normal(h, h.exp()).log_prob(ONES),
    "Normal with a float32 scale": lambda h: D.Normal(h, ONES).log_prob(h * 2),
    "divergence": lambda h: D.kl_divergence(
        D.Normal(h, F.softplus(h) + 1e-5), D.Normal(ONES * 0, ONES)
    ),
    "MultivariateNormal": lambda h: D.MultivariateNormal(h, torch.eye(8)).log_prob(ONES),
    "MultivariateNormal of half": lambda h: D.MultivariateNormal(
        torch.zeros(8), h.T @ h + torch.eye(8) * 5
    ).log_prob(torch.ones(8)),
    "MultivariateNormal, Cholesky": lambda h: D.MultivariateNormal(
        torch.zeros(8), scale_tril=(h.T @ h + torch.eye(8) * 9).tril()
    ).entropy(),
    "Beta": lambda h: D.Beta(h.exp(), h.exp()).log_prob(ONES / 2),
    "Gamma": lambda h: D.Gamma(h.exp(), h.exp()).log_prob(ONES),
    "Dirichlet": lambda h: D.Dirichlet(h.exp()).log_prob(ONES / 8),
    "Laplace": lambda h: D.Laplace(h, h.exp()).log_prob(ONES),
    "StudentT": lambda h: D.StudentT(torch.tensor(3.0), h, h.exp()).log_prob(ONES),
    "a mixture": lambda h: D.MixtureSameFamily(
        D.Categorical(logits=h), D.Normal(h, h.exp())
    ).log_prob(torch.ones(6)),
    "squashed": lambda h: D.TransformedDistribution(
        D.Normal(h, h.exp()), [D.TanhTransform(cache_size=1)]
    ).log_prob(ONES / 2),
    "RelaxedOneHotCategorical": lambda h: D.RelaxedOneHotCategorical(
        torch.tensor(0.5), logits=h
    ).log_prob(ONES / 8),
    "Independent": lambda h: D.Independent(D.Normal(h, h.exp()), 1).log_prob(ONES),
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_distribution_takes_half_parameters(distribution, low):
    """Categorical refuses half probabilities: they do not add up to 1 within its tolerance."""
    assert max(distances(through_linear(DISTRIBUTIONS[distribution]), low)) < 0.15


SAMPLES = {
    "multinomial": lambda h: torch.multinomial(h.softmax(-1), 2),
    "bernoulli": lambda h: torch.bernoulli(h.sigmoid()),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h, hard=True),
    "Categorical": lambda h: D.Categorical(h.softmax(-1)).sample(),
    "Normal": lambda h: D.Normal(h, h.exp()).rsample(),
    "Beta": lambda h: D.Beta(h.exp(), h.exp()).rsample(),
    "Gamma": lambda h: D.Gamma(h.exp(), h.exp()).rsample(),
    "Dirichlet": lambda h: D.Dirichlet(h.exp()).rsample(),
    "Poisson": lambda h: D.Poisson(h.exp()).sample(),
    "MultivariateNormal": lambda h: D.MultivariateNormal(h, torch.eye(8)).rsample(),
    "VonMises": lambda h: D.VonMises(h, h.exp()).sample(),
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_samples_are_drawn_from_half_parameters(sample, low):
    """Sampling from half parameters in reinforcement learning is not implemented for Half."""
    with autocast("cpu", dtype=low):
        drawn = SAMPLES[sample](nn.Linear(8, 8)(torch.randn(6, 8)))
    assert drawn.isfinite().all()
