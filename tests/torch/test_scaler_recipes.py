"""Training loops as people write them, each equal to the same loop in float32."""

import pytest
import torch
from torch import nn

from halfstep.errors import NonFiniteError
from halfstep.torch._scaler import GradScaler


class Off:
    """A scaler that is not there."""

    def scale(self, loss):
        return loss

    def unscale_(self, optimizer):
        pass

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass

    def get_scale(self):
        return 1.0


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, generator=generator) for _ in range(count)]


def accumulation(scaler):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(batches()):
        scaler.scale(model(batch).square().mean() / 3).backward()
        if number % 3 == 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [model]


def adversaries(scaler, update_each=False):
    critic, generator = network(0), network(1)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (critic, generator)]
    for batch in batches():
        fake = torch.cat([generator(batch)] * 3, 1)
        optimizers[0].zero_grad()
        scaler.scale((critic(fake.detach()) - critic(batch)).mean()).backward()
        scaler.step(optimizers[0])
        if update_each:
            scaler.update()
        optimizers[1].zero_grad()
        scaler.scale(-critic(fake).mean()).backward()
        scaler.step(optimizers[1])
        scaler.update()
    return [critic, generator]


def adversaries_with_an_update_each(scaler):
    return adversaries(scaler, update_each=True)


def penalty(scaler):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
        inverse = 1.0 / scaler.get_scale()
        norm = sum((gradient * inverse).square().sum() for gradient in scaled).sqrt()
        scaler.scale(loss + norm).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return [model]


def several_losses(scaler):
    models = [network(0), network(1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for batch in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        outputs = [model(batch).mean() for model in models]
        scaler.scale(2 * outputs[0] + 3 * outputs[1]).backward(retain_graph=True)
        scaler.scale(3 * outputs[0] - 5 * outputs[1]).backward()
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return models


RECIPES = [accumulation, adversaries, adversaries_with_an_update_each, penalty, several_losses]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
def test_a_recipe_equals_its_float32_loop(recipe, scaler_class):
    expected = recipe(Off())
    got = recipe(scaler_class("cpu", init_scale=2.0**10, growth_interval=2))
    for one, other in zip(expected, got, strict=True):
        for wanted, parameter in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted)


def test_the_loop_of_the_readme():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, losses = GradScaler("cpu"), []
    for batch in batches(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert scaler.history.steps == 20


def test_a_rare_bad_batch_does_not_wear_the_scale_down():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1e-3), GradScaler("cpu")
    for step in range(60):
        optimizer.zero_grad()
        factor = torch.nan if step % 5 == 0 else 1.0
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 65536.0
    assert scaler.history.skipped == 12


def test_tiny_gradients_do_not_drive_the_scale_to_infinity():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0**120, growth_interval=1)
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * 1e-30).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**127


@pytest.mark.filterwarnings("ignore::halfstep.core.SkippedStepsWarning")
def test_a_run_can_be_ended_when_the_scale_sticks():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    scaler = GradScaler("cpu", max_consecutive_skips=10)

    def run():
        for _ in range(11):
            optimizer.zero_grad()
            scaler.scale((parameter * torch.inf).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(NonFiniteError):
        run()
    assert scaler.history.skipped == 10


def test_an_idle_head():
    heads = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.AdamW(head.parameters()) for head in heads]
    scaler = GradScaler("cpu")
    for _ in range(40):
        scaler.scale(heads[0](torch.ones(1, 2)).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert scaler.last_step_of(optimizers[1]).reason == "no gradients"
    assert not optimizers[1].state
    assert scaler._get_growth_tracker() == 40


def test_bfloat16_parameters():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.5, 0.5]
