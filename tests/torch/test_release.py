"""Gradients that are applied within backward: bit for bit the same, block by block."""

import pytest
import torch
from torch import nn

from halfstep.torch import prepare
from halfstep.torch._masters._kept import true_value
from tests.torch.releasing import (
    BLOCKS,
    OPTIMIZERS,
    SCALED,
    Block,
    Model,
    all_changed,
    batches,
    equal,
    loss_of,
    made,
    state_of,
    train,
)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("policy", "whole"),
    [("mixed_bfloat16", True), ("mixed_bfloat16", False), (SCALED, False), (SCALED, True)],
)
def test_has_the_bits_of_a_step_after_backward(kind, policy, whole):
    ours, plain = (made(kind, policy, release, whole) for release in (True, False))
    for model, optimizer, _ in (ours, plain):
        train(model, optimizer)
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))
    assert [each.history.steps for each in ours[2]] == [each.history.steps for each in plain[2]]
    assert [each.scale for each in ours[2]] == [each.scale for each in plain[2]]


def test_has_them_with_float32_parameters_and_float16_masters():
    for settings in (
        {"masters": "cast"},
        {"masters": "cast", "policy": SCALED, "whole": False},
        {"policy": f"{SCALED}, param_dtype=float16", "whole": False},
    ):
        ours, plain = (made(release=release, **settings) for release in (True, False))
        for model, optimizer, _ in (ours, plain):
            train(model, optimizer)
        assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
def test_gradients_of_one_region_at_a_time_are_alive(policy, whole):
    model, optimizer, _ = made("adamw", policy, whole=whole)
    own, peaks = list(model.blocks.parameters()), []

    def look(_):
        peaks.append(sum(each.grad is not None for each in own))

    handles = [each.register_post_accumulate_grad_hook(look) for each in own]
    train(model, optimizer, 2)
    for each in handles:
        each.remove()
    assert max(peaks) <= 4
    assert len(peaks) == 2 * 4 * BLOCKS
    assert all(each.grad is None for each in own)
    assert model.head.weight.grad is not None


def test_removing_leaves_gradients_to_the_step_again():
    model, optimizer, regions = made()
    train(model, optimizer, 2)
    exact = {name: true_value(each).clone() for name, each in model.named_parameters()}
    for region in regions:
        region.remove()
    assert "step" not in vars(optimizer)
    for name, each in model.named_parameters():
        assert torch.equal(each, exact[name])
        assert each.dtype is torch.float32
    loss_of(model, batches()[0]).backward()
    assert all(each.grad is not None for each in model.parameters())
    optimizer.step()


def test_one_region_is_removed():
    ours, plain = made(), made(release=False)
    for model, optimizer, regions in (ours, plain):
        regions[1].remove()
        train(model, optimizer, 3)
        assert model.blocks[1].first.weight.grad is not None
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_schedules(kind, recwarn):
    ours, plain = made(kind), made(kind, release=False)
    for model, optimizer, _ in (ours, plain):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for values in batches(3):
            optimizer.zero_grad()
            loss_of(model, values).backward()
            optimizer.step()
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == optimizer.defaults["lr"] / 8
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))
    assert not [each for each in recwarn if "lr_scheduler" in str(each.message)]


def test_a_schedule_where_everything_is_released(recwarn):
    torch.manual_seed(0)
    first, second = Block(), nn.Linear(8, 2)
    model = nn.Sequential(first, second)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for each in (first, second):
        prepare(each, optimizer, "mixed_bfloat16", masters="split", release=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    before = state_of(model, optimizer)
    for values in batches(3):
        optimizer.zero_grad()
        loss_of(model, values).backward()
        assert all(each.grad is None for each in model.parameters())
        optimizer.step()
        schedule.step()
    assert all(state["step"] == 3 for state in optimizer.state.values())
    assert all_changed(model, before, optimizer)
    assert not [each for each in recwarn if "lr_scheduler" in str(each.message)]


def test_groups_keep_their_settings():
    def grouped(release):
        torch.manual_seed(0)
        model = Model()
        biases = [each for name, each in model.named_parameters() if name.endswith("bias")]
        weights = [each for name, each in model.named_parameters() if name.endswith("weight")]
        groups = [{"params": biases, "weight_decay": 0.0, "lr": 0.1}, {"params": weights}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.5)
        for block in model.blocks:
            prepare(block, optimizer, "mixed_bfloat16", masters="split", release=release)
        train(model, optimizer, 3)
        assert [len(each["params"]) for each in optimizer.param_groups] == [9, 9]
        return state_of(model, optimizer)

    assert equal(grouped(True), grouped(False))


def test_step_hooks_are_called_for_each_part():
    model, optimizer, _ = made()
    seen = []
    optimizer.register_step_pre_hook(
        lambda own, *_: seen.append(
            sum(each.grad is not None for group in own.param_groups for each in group["params"])
        )
    )
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, optimizer, 1)
    assert seen == [4, "after"] * BLOCKS + [2, "after"]


def test_two_optimizers_of_one_region():
    def trained(release):
        torch.manual_seed(0)
        model = Model()
        parts = [
            [each for name, each in model.named_parameters() if name.endswith(end)]
            for end in ("weight", "bias")
        ]
        optimizers = [torch.optim.AdamW(parts[0], lr=1e-2), torch.optim.SGD(parts[1], lr=0.1)]
        for block in model.blocks:
            prepare(block, optimizers, "mixed_bfloat16", masters="split", release=release)
        for values in batches(3):
            loss_of(model, values).backward()
            if release:
                assert all(each.grad is None for each in model.blocks.parameters())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [state_of(model, each) for each in optimizers]

    assert all(map(equal, trained(True), trained(False)))


def test_an_optimizer_that_is_gone_applies_nothing():
    model, optimizer, _ = made()
    del optimizer
    loss_of(model, batches()[0]).backward()
    assert all(each.grad is not None for each in model.parameters())
