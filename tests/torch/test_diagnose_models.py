"""Modules are named whichever way a model runs: again for backward, compiled, or transformed."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep.torch import diagnose, prepare
from tests.torch import faulty_models as faulty
from tests.torch.faulty_models import autocasts, inside, mean
from tests.torch.test_diagnose import STATIC, named


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_for_backward(reentrant):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = faulty.Selected()

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=reentrant)

    model = nn.Sequential(nn.Linear(4, 4), Again())
    found = named(diagnose(model, torch.ones(2, 4), mean, policy=STATIC))
    assert found == ("1.part", "sqrt", "backward", "nan")


@pytest.mark.parametrize("within", [False, True])
def test_gradients_that_a_loss_is_made_of(within):
    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), faulty.Selected())

        def forward(self, x):
            return slope(self.inner, x) if within else self.inner(x)

    def slope(model, batch):
        batch = batch.detach().requires_grad_()
        (grad,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        return grad.float().square().mean()

    model, loss = Slope(), mean if within else slope
    found = named(diagnose(model, torch.ones(2, 4), loss, policy=STATIC))
    assert found[:2] == ("inner.1", "sqrt")


def test_a_function_with_a_backward_of_its_own():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.half() * 6e4

    class Own(nn.Module):
        def forward(self, x):
            return Function.apply(x)

    model = nn.Sequential(nn.Linear(4, 4), Own(), nn.Linear(4, 4))
    loss = lambda model, batch: model(batch).sum() * 1e3  # noqa: E731
    fault = diagnose(model, torch.ones(2, 4), loss).first
    assert (fault.module, fault.operation, fault.phase) == ("1", "multiply", "backward")
    assert "Function.backward" in fault.source


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind):
    model = nn.Sequential(nn.Linear(4, 4), kind(4, 4))
    nn.init.constant_(model[1].weight_ih_l0, 6e4)
    nn.init.constant_(model[0].bias, 10.0)
    loss = lambda model, batch: model(batch)[0].mean()  # noqa: E731
    fault = diagnose(model, torch.ones(2, 1, 4), loss, policy=STATIC).first
    assert (fault.module, fault.phase, fault.dtype) == ("1", "forward", "float16")


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    model = Tied()
    nn.init.constant_(model.embed.weight, 300.0)
    fault = diagnose(model, torch.tensor([1]), mean, policy=STATIC).first
    assert (fault.module, fault.operation) == ("head", "matmul")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_wrappers_do_not_change_paths(compiled, prepared):
    model = nn.Sequential(faulty.Feed())
    if prepared:
        prepare(model, policy=STATIC)
    wrapped = torch.compile(model, backend="eager") if compiled else model
    how = {} if prepared else {"policy": STATIC}
    assert named(diagnose(wrapped, torch.ones(2, 8), mean, **how))[0] == "0.sum"


def through_vmap(model, batch):
    return torch.func.vmap(model)(batch).float().mean()


def through_grad(model, batch):
    def of(weights):
        return torch.func.functional_call(model, weights, (batch,)).float().mean()

    found = torch.func.grad(of)(dict(model.named_parameters()))
    return sum(each.square().sum() for each in found.values())


def through_jvp(model, batch):
    return torch.func.jvp(model, (batch,), (torch.ones_like(batch),))[1].float().mean()


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # of PyTorch's own jvp
@pytest.mark.parametrize("way", ["policy", "ours", "native"])
@pytest.mark.parametrize("loss", [through_vmap, through_grad, through_jvp])
def test_transforms_of_functions(loss, way):
    model = nn.Sequential(faulty.Feed())
    loss_fn, how = (
        (loss, {"policy": STATIC}) if way == "policy" else (inside(autocasts[way], loss), {})
    )
    found = named(diagnose(model, torch.ones(4, 8), loss_fn, **how))
    assert found == ("0.sum", "matmul", "forward", "inf")
