"""The two loops that people write, in both low dtypes, against float32."""

import contextlib

import pytest
import torch
from torch import nn

from halfstep.torch import GradScaler, autocast

LOW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 8)
    targets = inputs[:, :3].argmax(1)
    return model, optimizer, inputs, targets


def standard_loop(region):
    model, optimizer, inputs, targets = task()
    for _ in range(100):
        optimizer.zero_grad()
        with region():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


def scaled_loop(region):
    model, optimizer, inputs, targets = task()
    scaler = GradScaler()
    for _ in range(100):
        optimizer.zero_grad()
        with region():
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.history.skipped <= 2
    return loss.item()


@LOW
@pytest.mark.parametrize("loop", [standard_loop, scaled_loop])
def test_a_loop_trains_as_in_float32(loop, dtype):
    full = loop(contextlib.nullcontext)
    low = loop(lambda: autocast("cpu", dtype=dtype))
    assert full < 0.1
    assert low == pytest.approx(full, abs=0.03)


def test_the_old_names_work_with_only_the_import_changed():
    model, optimizer, inputs, targets = task()
    scaler = GradScaler(init_scale=1024.0)
    with autocast(True, torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024.0
