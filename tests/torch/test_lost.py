"""Counts of updates that round to nothing, against a plain count."""

import pytest
import torch
from torch import nn

from halfstep.torch import keep_masters, lost_updates


def plain_count(before, after, gradient):
    asked = gradient != 0
    return int(asked.sum()), int((asked & (before == after)).sum())


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_counts_of_several_steps(masters, dtype):
    parameters = {name: nn.Parameter(torch.randn(40).to(dtype)) for name in ("first", "second")}
    optimizer = torch.optim.SGD(parameters.items(), lr=1e-3)
    if masters:
        keep_masters(optimizer)
    counts = dict.fromkeys(parameters, (0, 0))
    with lost_updates(optimizer) as lost:
        for _ in range(5):
            before = {name: each.detach().clone() for name, each in parameters.items()}
            for each in parameters.values():
                each.grad = (torch.randn(40) * (torch.rand(40) > 0.3)).to(each.grad_dtype)
            optimizer.step()
            for name, each in parameters.items():
                news = plain_count(before[name], each.detach(), each.grad)
                counts[name] = tuple(map(sum, zip(counts[name], news, strict=True)))
    assert lost.fractions == {name: none / asked for name, (asked, none) in counts.items()}
    asked, none = map(sum, zip(*counts.values(), strict=True))
    assert lost.fraction == none / asked
    assert (lost.fraction > 0.5) == (dtype is torch.bfloat16)


def test_skipped_steps_and_later_ones_are_not_counted():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    keep_masters(optimizer)
    with lost_updates(optimizer) as lost:
        weight.grad = torch.full_like(weight, torch.inf)
        optimizer.step()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert lost.fractions == {}
    assert lost.fraction == 0.0


def test_steps_that_a_kernel_skips_are_not_counted():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    weight.grad = torch.ones(3)
    with lost_updates(optimizer, [("weight", weight)]) as lost:
        optimizer.found_inf = torch.ones(())
        optimizer.step()
        assert lost.fractions == {"weight": 0.0}
        del optimizer.found_inf
        optimizer.step()
    assert lost.fractions == {"weight": 0.0}


def test_names_come_from_the_model():
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with lost_updates(optimizer, model) as lost:
        model(torch.ones(1, 2).bfloat16()).sum().backward()
        optimizer.step()
    assert set(lost.fractions) == {"weight", "bias"}


def test_sparse_gradients_are_counted():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with lost_updates(optimizer, table) as lost:
        table(torch.tensor([1, 1])).sum().backward()
        optimizer.step()
    assert lost.fractions == {"weight": 0.0}


def test_what_is_shown_begins_with_the_worst():
    parameters = [(f"p{number}", nn.Parameter(torch.ones(2).bfloat16())) for number in range(12)]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    for number, (_, each) in enumerate(parameters):
        each.grad = torch.full_like(each, 100.0 if number else 1.0)
    with lost_updates(optimizer) as lost:
        optimizer.step()
    lines = repr(lost).splitlines()
    assert lines[1] == " 100.0%  p0"
    assert lines[-1] == "and 2 more"
