"""Training loops as people write them: a region in float32 equals no region, others come close."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from halfstep.torch import prepare

FLOAT32 = "compute_dtype=float32"
# A scale at which nothing overflows, because a skipped step would make the loops differ.
FLOAT16 = "compute_dtype=float16,scale=static(256.0)"
HALF = [FLOAT16, "mixed_bfloat16"]


def network(seed=0, inputs=6, outputs=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def batches(count=8, features=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, features, generator=generator) for _ in range(count)]


def sgd(*models, lr=0.1):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=lr, momentum=0.9)


def off(model, optimizer=None):
    """No region."""


def on(policy):
    return lambda model, optimizer=None: prepare(model, optimizer, policy)


def accumulation(enclose):
    model = network()
    optimizer = sgd(model)
    enclose(model, optimizer)
    for number, batch in enumerate(batches()):
        (model(batch).square().mean() / 4).backward()
        if number % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def clipping(enclose):
    model = network()
    optimizer = sgd(model)
    enclose(model, optimizer)
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0.5
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
    return [model]


def gradient_penalty(enclose):
    model = network()
    optimizer = sgd(model, lr=0.05)
    enclose(model, optimizer)
    for batch in batches():
        optimizer.zero_grad()
        batch.requires_grad_()
        score = model(batch)
        (gradient,) = torch.autograd.grad(score.sum(), batch, create_graph=True)
        score.mean().backward(retain_graph=True)
        (gradient.norm(dim=1) - 1).square().mean().backward()
        optimizer.step()
    return [model]


def adversaries(enclose):
    critic, generator = network(0, outputs=1), network(1, outputs=6)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (critic, generator)]
    enclose(critic, optimizers[0])
    enclose(generator, optimizers[1])
    for batch in batches():
        fake = generator(batch)
        optimizers[0].zero_grad()
        functional.softplus(-critic(batch)).mean().backward()
        functional.softplus(critic(fake.detach())).mean().backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        functional.softplus(-critic(fake)).mean().backward()
        optimizers[1].step()
    return [critic, generator]


def moving_average(enclose):
    model = network()
    optimizer = sgd(model)
    enclose(model, optimizer)
    average = copy.deepcopy(model).requires_grad_(False)
    for batch in batches():
        optimizer.zero_grad()
        target = average(batch)
        assert not target.requires_grad
        (model(batch) - 0.5 * target).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.1)
    return [model, average]


def averaged_model(enclose):
    model = nn.Sequential(network(), nn.BatchNorm1d(4))
    optimizer = sgd(model)
    enclose(model, optimizer)
    average, schedule = AveragedModel(model, use_buffers=False), SWALR(optimizer, swa_lr=0.05)
    for batch in batches():
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
        schedule.step()
    update_bn(batches(), average)
    average(batches()[0]).sum().backward()
    return [model, average]


def frozen(enclose):
    model = network()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    enclose(model, optimizer)
    for number, batch in enumerate(batches()):
        optimizer.zero_grad()
        model[0].requires_grad_(number % 3 == 2)
        model(batch).square().mean().backward()
        assert (model[0].weight.grad is None) is (number % 3 != 2)
        optimizer.step()
    return [model]


def growing(enclose):
    model = network()
    optimizer = sgd(model)
    enclose(model, optimizer)
    for number, batch in enumerate(batches()):
        if number == 2:
            model.append(nn.Linear(4, 4))
            optimizer.add_param_group({"params": model[-1].parameters()})
        if number == 4:
            model[0] = nn.Linear(6, 8)
            optimizer.add_param_group({"params": model[0].parameters()})
        if number == 6:
            model[2].weight = nn.Parameter(torch.ones(4, 8))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    assert model[2].weight.grad is not None
    return [model]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, values):
        return self.second(self.first(values).tanh())


def tied(enclose):
    torch.manual_seed(0)
    model = Tied()
    optimizer = sgd(model)
    enclose(model, optimizer)
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    assert model.first.weight is model.second.weight
    return [model]


def without_gradient(enclose):
    model, unused = network(), network(1)
    model.aside = nn.Linear(2, 2)
    model.forward = lambda values: model[2](model[1](model[0](values)))
    optimizer = torch.optim.AdamW([*model.parameters(), *unused.parameters()], weight_decay=0.5)
    enclose(model, optimizer)
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    assert all(each.grad is None for each in [*model.aside.parameters(), *unused.parameters()])
    return [model, unused]


def several_losses(enclose):
    models = [network(0), network(1)]
    optimizer = sgd(*models)
    for model in models:
        enclose(model, optimizer)
    for batch in batches():
        optimizer.zero_grad()
        one, other = (model(batch) for model in models)
        (2 * one.mean() + 3 * other.square().mean()).backward(retain_graph=True)
        (1e-4 * (one * other).mean()).backward()
        optimizer.step()
    return models


def several_optimizers(enclose):
    model = network()
    optimizers = [sgd(model[0]), torch.optim.Adam(model[2].parameters(), lr=0.01)]
    enclose(model, optimizers)
    for batch in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [model]


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = network(), nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, values):
        trunk = self.trunk(values)
        return self.left(trunk), {"right": self.right(trunk)}


def several_outputs(enclose):
    torch.manual_seed(0)
    model = Heads()
    optimizer = sgd(model)
    enclose(model, optimizer)
    for number, batch in enumerate(batches()):
        optimizer.zero_grad()
        left, right = model(batch)
        losses = [left.square().mean(), 1e-5 * right["right"].abs().sum()]
        if number % 2:
            sum(losses).backward()
        else:
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        optimizer.step()
    return [model]


def siamese(enclose):
    model = network()
    optimizer = sgd(model)
    enclose(model, optimizer)
    for batch in batches():
        optimizer.zero_grad()
        near, far = model(batch), model(batch.flip(0))
        (near - 10 * far).square().mean().mul(0.01).backward()
        optimizer.step()
    return [model]


def second_call_first(enclose):
    model = network()
    optimizer = sgd(model)
    enclose(model, optimizer)
    for batch in batches():
        optimizer.zero_grad()
        first, second = model(batch), model(2 * batch)
        (1e-4 * second.square().mean()).backward()
        (3 * first.mean()).backward()
        optimizer.step()
    return [model]


def fed_back(enclose):
    """The output of one call is the input of the next."""
    model = network(outputs=6)
    optimizer = sgd(model, lr=0.05)
    enclose(model, optimizer)
    for batch in batches():
        optimizer.zero_grad()
        model(model(model(batch))).square().mean().backward()
        optimizer.step()
    return [model]


LOOPS = {
    loop.__name__: loop
    for loop in (
        accumulation,
        clipping,
        gradient_penalty,
        adversaries,
        moving_average,
        averaged_model,
        frozen,
        growing,
        tied,
        without_gradient,
        several_losses,
        several_optimizers,
        several_outputs,
        siamese,
        second_call_first,
        fed_back,
    )
}


def state(models):
    return [value for model in models for value in model.state_dict().values()]


@pytest.mark.parametrize("policy", [FLOAT32, f"{FLOAT32},scale=static(16777216.0)", *HALF])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_gives_what_it_gives_without_a_region(loop, policy):
    exact = policy not in HALF
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if exact else {"atol": 0.05, "rtol": 0.05}
    expected, got = state(LOOPS[loop](off)), state(LOOPS[loop](on(policy)))
    assert len(got) == len(expected)
    for wanted, value in zip(expected, got, strict=True):
        torch.testing.assert_close(value, wanted, **tolerance)
