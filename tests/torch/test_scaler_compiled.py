"""A scaler inside of a compiled function breaks its graph and works."""

import pytest
import torch
from torch import nn

from halfstep.torch._scaler import GradScaler


def train(compiler, clip, enabled, fused):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=enabled)
    losses, inputs = [], torch.randn(3, 5, 4)

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss

    step = compiler(step)
    for batch in inputs:
        losses.append(step(batch).item())
    return losses, scaler.get_scale(), scaler.history.steps


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_training_step(clip, enabled, fused):
    torch._dynamo.reset()
    compiled = train(lambda step: torch.compile(step, backend="eager"), clip, enabled, fused)
    assert compiled == train(lambda step: step, clip, enabled, fused)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_compiled_unscaling_alone():
    torch._dynamo.reset()
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(parameter.sum()).backward()

    @torch.compile(backend="eager")
    def unscale(numbers):
        scaler.unscale_(optimizer)
        return numbers + 1

    assert unscale(torch.ones(2)).tolist() == [2.0, 2.0]
    parameter.grad[0] = torch.nan
    scaler.step(optimizer)
    assert scaler.last_step.reason == "a gradient became non-finite after unscale_()"
    torch._dynamo.reset()
