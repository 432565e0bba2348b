"""Processes that share gradients must take the same steps at the same scale."""

import os

import pytest
import torch
from torch import distributed, nn

from halfstep.torch._scaler import GradScaler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed"),
]


def train(rank, store, dtype, folder):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1).to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    inputs = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(rank)).to(dtype)
    records, scales = [], []
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = model(inputs[step]).float().square().mean()
        scaler.scale(loss * torch.nan if (step, rank) == (1, 1) else loss).backward()
        if step % 3 == 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        records.append((scaler.last_step.skipped, scaler.last_step.loss_nonfinite))
        scales.append(scaler.get_scale())
    distributed.destroy_process_group()
    values = [parameter.detach() for parameter in model.parameters()]
    torch.save((values, records, scales), f"{folder}/{rank}.pt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_bad_loss_of_one_process(dtype, tmp_path):
    store = f"file://{tmp_path}/store"
    torch.multiprocessing.spawn(train, (store, dtype, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(map(torch.equal, first[0], second[0]))
    assert first[2] == second[2] == [1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]
    assert [skipped for skipped, _ in first[1]] == [False, True, False, False, False, False]
    assert (first[1][1], second[1][1]) == ((True, False), (True, True))
