"""Counts of updates that round to nothing, against a plain count."""

import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch import keep_masters, lost_updates, prepare


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


def refused(*arguments):
    with pytest.raises(UsageError) as caught, lost_updates(*arguments):
        pass
    return str(caught.value)


def optimizer_of(parameters):
    return torch.optim.SGD(parameters, lr=1e-6)


class Wrapper:
    """What steps an optimizer without being one."""

    def __init__(self, optimizer):
        self.step, self.param_groups = optimizer.step, optimizer.param_groups


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (nn.Sequential(nn.Linear(2, 2)), "Sequential"),
        (nn.Linear(2, 2).weight, "Tensor"),
        ("AdamW", "str"),
        (3, "int"),
        ([optimizer_of(nn.Linear(2, 2).parameters()), 3], "int"),
        (Wrapper(optimizer_of(nn.Linear(2, 2).parameters())), "Wrapper"),
    ],
)
def test_what_is_no_optimizer_is_refused(given, shown):
    assert refused(given) == (
        f"lost_updates() needs a torch.optim.Optimizer, or a list of them, got {shown}. Pass the "
        "optimizer that trains the model."
    )


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (3, "3"),
        ("weight", "'weight'"),
        (dict(nn.Linear(2, 2).named_parameters()), "a dict"),
        (nn.Linear(2, 2).weight, "a Parameter"),
        (nn.Linear(2, 2).parameters(), "a Parameter"),
        ([3], "3"),
    ],
)
def test_what_has_no_names_is_refused(given, shown):
    assert refused(optimizer_of(nn.Linear(2, 2).parameters()), given) == (
        f"named_parameters needs a module or pairs of name and parameter, got {shown}. Pass "
        "model.named_parameters()."
    )


def test_a_block_without_a_step_says_so():
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model.parameters())
    with lost_updates(optimizer) as lost:
        pass
    assert str(lost) == repr(lost) == "no step with gradients was seen"
    assert lost.fraction == 0.0
    with lost_updates(optimizer) as lost:
        optimizer.step()
    assert str(lost) == "no step with gradients was seen"
    with prepare(model).lost_updates() as lost:
        pass
    assert str(lost) == "no step with gradients was seen"


def test_several_optimizers_are_counted_together():
    models = nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).bfloat16()
    optimizers = [optimizer_of(each.named_parameters()) for each in models]
    with lost_updates([*optimizers, optimizers[0]]) as lost:
        for rate, model, optimizer in zip((1e-9, 100.0), models, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = rate
            model(torch.ones(1, 2).bfloat16()).sum().backward()
            optimizer.step()
            optimizer.step()
    wanted = {"weight": 1.0, "bias": 1.0, "weight (2)": 0.0, "bias (2)": 0.0}
    assert lost.fractions == wanted
    assert lost.fraction == 0.5


def test_a_parameter_of_several_optimizers_is_one():
    weight = nn.Parameter(torch.ones(3).bfloat16())
    optimizers = [torch.optim.SGD([("weight", weight)], lr=rate) for rate in (1e-9, 1.0)]
    weight.grad = torch.ones_like(weight)
    with lost_updates(optimizers) as lost:
        for each in optimizers:
            each.step()
    assert lost.fractions == {"weight": 0.5}
