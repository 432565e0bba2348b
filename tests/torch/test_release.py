"""Gradients that are applied within backward: bit for bit the same, region by region, as wholes."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from halfstep.errors import UsageError
from halfstep.torch import GradScaler, accumulate, prepare
from halfstep.torch._masters._kept import true_value

BLOCKS = 4
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
}
SCALED = "mixed_float16, scale=dynamic(init_scale=1024.0)"


class Spoil(torch.autograd.Function):
    """Lets values pass, and makes their gradient infinite."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.spoils = False

    def forward(self, values):
        inner = self.first(values).tanh()
        return values + self.second(Spoil.apply(inner) if self.spoils else inner)


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, 2)

    def forward(self, values):
        for block in self.blocks:
            values = block(values)
        return self.head(values)


def made(kind="adamw", policy="mixed_bfloat16", release=True, whole=True, masters="split"):
    """Returns a model with blocks that are regions, its optimizer and the regions."""
    torch.manual_seed(0)
    model = Model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    settings = {"policy": policy, "masters": masters}
    regions = [prepare(each, optimizer, release=release, **settings) for each in model.blocks]
    if whole:
        regions.append(prepare(model, optimizer, **settings))
    return model, optimizer, regions


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(16, 8, generator=generator) for _ in range(count)]


def loss_of(model, values):
    return functional.cross_entropy(model(values), (values.sum(dim=1) > 4).long())


def train(model, optimizer, steps=6):
    for values in batches(steps):
        optimizer.zero_grad()
        loss_of(model, values).backward()
        optimizer.step()


def state_of(module, optimizer):
    """Returns copies of all numbers of a module: values, remainders, and the optimizer's state."""
    found = {}
    for name, each in module.named_parameters():
        found[name] = each.detach().clone()
        found[f"{name} exactly"] = true_value(each).clone()
        for key, value in optimizer.state.get(each, {}).items():
            found[f"{name} {key}"] = torch.as_tensor(value).clone()
    return found


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def all_changed(module, before, optimizer):
    """Returns whether every parameter, with all of its state, was stepped."""
    after = state_of(module, optimizer)
    return all(
        key not in before or not torch.equal(after[key], before[key])
        for key in after
        if not key.endswith(("weight", "bias"))
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


@pytest.mark.parametrize("policy", ["mixed_bfloat16", SCALED])
def test_micro_batches_add_up(policy):
    ours, plain = (made("adamw", policy, release, whole=False) for release in (True, False))
    for values in batches(3):
        model, optimizer, _ = ours
        optimizer.zero_grad()
        with accumulate(optimizer):
            for part in values.split(4)[:-1]:
                loss_of(model, part).backward()
            assert all(each.grad is not None for each in model.parameters())
        loss_of(model, values.split(4)[-1]).backward()
        assert all(each.grad is None for each in model.blocks.parameters())
        optimizer.step()
        model, optimizer, _ = plain
        optimizer.zero_grad()
        for part in values.split(4):
            loss_of(model, part).backward()
        optimizer.step()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


def test_accumulating_is_nested_and_ends_with_an_error():
    model, optimizer, _ = made()

    def fails():
        with accumulate(optimizer):
            with accumulate(optimizer):
                pass
            loss_of(model, batches()[0]).backward()
            assert model.blocks[0].first.weight.grad is not None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    loss_of(model, batches()[0]).backward()
    assert model.blocks[0].first.weight.grad is None


def test_what_was_accumulated_can_be_stepped_without_another_backward():
    ours, plain = made(), made(release=False)
    for model, optimizer, _ in (ours, plain):
        with accumulate(optimizer):
            loss_of(model, batches()[0]).backward()
        optimizer.step()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))
    assert [each.history.steps for each in ours[2]] == [1] * 5


def test_accumulate_needs_an_optimizer():
    with pytest.raises(UsageError) as caught, accumulate(nn.Linear(1, 1)):
        pass
    assert str(caught.value) == (
        "accumulate() needs an optimizer, got Linear. Pass the torch.optim.Optimizer whose "
        "parameters were in backward()."
    )


def test_accumulate_leaves_an_optimizer_without_regions_as_it_was():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with accumulate(optimizer):
        pass
    assert "step" not in vars(optimizer)


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


@pytest.mark.parametrize("masters", ["split", "cast"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("spoiled", range(BLOCKS))
@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
def test_regions_are_stepped_as_wholes(kind, policy, whole, spoiled, masters):
    model, optimizer, regions = made(kind, policy, whole=whole, masters=masters)
    train(model, optimizer, 2)
    before = [state_of(each, optimizer) for each in model.blocks]
    steps = [each.history.steps for each in regions]
    model.blocks[spoiled].spoils = True
    optimizer.zero_grad()
    loss_of(model, batches()[2]).backward()
    for number, block in enumerate(model.blocks):
        record, history = regions[number].last_step, regions[number].history
        assert history.steps == steps[number] + 1
        if number <= spoiled:
            assert equal(state_of(block, optimizer), before[number])
            assert record.skipped
            assert history.skipped == 1
            assert "finite" in record.reason or "inf" in record.reason or "nan" in record.reason
        else:
            assert all_changed(block, before[number], optimizer)
            assert not record.skipped
            assert history.skipped == 0
    assert all(each.grad is None for each in model.blocks.parameters())
    model.blocks[spoiled].spoils = False
    optimizer.step()
    train(model, optimizer, 1)
    assert not any(each.last_step.skipped for each in regions)


@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
def test_what_backward_reaches_after_a_bad_gradient_is_left_although_it_is_finite(policy, whole):
    model, optimizer, regions = made(policy=policy, whole=whole)
    train(model, optimizer, 2)
    before = [state_of(each, optimizer) for each in model.blocks]
    bad = model.blocks[2].second.bias.register_hook(lambda gradient: gradient * float("nan"))
    optimizer.zero_grad()
    loss_of(model, batches()[2]).backward()
    bad.remove()
    for number, block in enumerate(model.blocks):
        if number <= 2:
            assert equal(state_of(block, optimizer), before[number]), number
            assert regions[number].last_step.skipped
            assert regions[number].last_step.reason
        else:
            assert all_changed(block, before[number], optimizer)
    assert regions[2].last_step.nonfinite == (("second.bias", "nan"),)
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, batches()[2]).backward()
    optimizer.step()
    assert not any(each.last_step.skipped for each in regions)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_leaves_all(kind, policy, whole, value):
    model, optimizer, regions = made(kind, policy, whole=whole)
    train(model, optimizer, 2)
    before = state_of(model, optimizer)
    optimizer.zero_grad()
    (loss_of(model, batches()[2]) * value).backward()
    optimizer.step()
    assert equal(state_of(model, optimizer), before)
    assert all(each.last_step.skipped for each in regions)
    assert all(each.history.steps == 3 for each in regions)
    if policy == SCALED:
        assert "reached the model was not finite" in regions[0].last_step.reason
        assert all(each.scale == 1024.0 for each in regions)


def test_an_overflow_inside_a_region_lowers_its_scale_only():
    model, _optimizer, regions = made(policy=SCALED, whole=False)
    model.blocks[1].spoils = True
    loss_of(model, batches()[0]).backward()
    assert regions[1].scale < 1024.0
    assert [each.scale for each in (regions[0], *regions[2:])] == [1024.0] * 3


def test_two_backwards_are_two_steps():
    model, optimizer, regions = made()
    for values in batches(2):
        loss_of(model, values).backward()
    assert [each.history.steps for each in regions[:-1]] == [2] * BLOCKS
    optimizer.step()
    assert [each.history.steps for each in regions] == [2] * BLOCKS + [1]


def test_retained_graphs():
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    region = prepare(first, optimizer, "mixed_bfloat16", masters="split", release=True)
    loss = second(first(batches()[0])).square().mean()
    loss.backward(retain_graph=True)
    before = true_value(first.weight).clone()
    loss.backward()
    assert not torch.equal(true_value(first.weight), before)
    assert region.history.steps == 2


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # it is cleared
@pytest.mark.parametrize("policy", ["mixed_bfloat16", SCALED])
def test_a_graph_of_gradients_leaves_them_for_the_step(policy):
    ours, plain = (made("adamw", policy, release, whole=False) for release in (True, False))
    for model, optimizer, regions in (ours, plain):
        for values in batches(2):
            optimizer.zero_grad()
            loss_of(model, values).backward(create_graph=True)
            assert all(each.grad is not None for each in model.parameters())
            optimizer.step()
            assert not any(each.last_step.skipped for each in regions)
            model.zero_grad()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))
    assert [each.history.steps for each in ours[2]] == [2] * BLOCKS


@pytest.mark.parametrize("policy", ["mixed_bfloat16", SCALED])
def test_gradient_penalties(policy):
    ours, plain = (made("sgd", policy, release, whole=False) for release in (True, False))
    for model, optimizer, _ in (ours, plain):
        for values in batches(2):
            optimizer.zero_grad()
            values.requires_grad_()
            (slope,) = torch.autograd.grad(model(values).sum(), values, create_graph=True)
            slope.square().mean().backward()
            optimizer.step()
    one, other = state_of(*ours[:2]), state_of(*plain[:2])
    assert equal(one, other)


def test_unused_parameters_do_not_hold_up_the_others():
    ours, plain = made(), made(release=False)
    for model, optimizer, _ in (ours, plain):
        torch.manual_seed(0)
        model.blocks[1].second.bias.requires_grad_(False)
        model.blocks[2].forward.region.remove()
        model.blocks[2].aside = nn.Linear(3, 3)
        optimizer.add_param_group({"params": model.blocks[2].aside.parameters()})
        release = optimizer is ours[1]
        prepare(model.blocks[2], optimizer, "mixed_bfloat16", masters="split", release=release)
        for values in batches(3):
            optimizer.zero_grad()
            loss_of(model, values).backward()
            if release:
                assert all(each.grad is None for each in model.blocks.parameters())
            optimizer.step()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
def test_a_module_that_is_called_twice(policy, whole):
    ours, plain = (made("adamw", policy, release, whole=whole) for release in (True, False))
    for model, optimizer, regions in (ours, plain):
        model.blocks.append(model.blocks[0])
        train(model, optimizer, 3)
        assert not any(each.last_step.skipped for each in regions)
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


def test_a_parameter_in_two_regions():
    ours, plain = made(), made(release=False)
    for release, (model, optimizer, _) in zip((True, False), (ours, plain), strict=True):
        for block in (model.blocks[0], model.blocks[3]):
            block.forward.region.remove()
        model.blocks[3].second.weight = model.blocks[0].second.weight
        for block in (model.blocks[0], model.blocks[3]):
            prepare(block, optimizer, "mixed_bfloat16", masters="split", release=release)
        train(model, optimizer, 3)
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


class Checkpointed(Model):
    reentrant = False

    def forward(self, values):
        for block in self.blocks:
            values = checkpoint(block, values, use_reentrant=self.reentrant)
        return self.head(values)


@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
@pytest.mark.parametrize("around", [False, True])
def test_checkpointing(policy, whole, around):
    def through(model, values):
        if not around:
            return loss_of(model, values)
        first = checkpoint(nn.Sequential(*model.blocks[:2]), values, use_reentrant=False)
        second = checkpoint(nn.Sequential(*model.blocks[2:]), first, use_reentrant=False)
        return functional.cross_entropy(model.head(second), (values.sum(dim=1) > 4).long())

    whole &= not around
    ours, plain = (made("adamw", policy, release, whole=whole) for release in (True, False))
    for model, optimizer, _ in (ours, plain):
        model.__class__ = Model if around else Checkpointed
        for values in batches(3):
            optimizer.zero_grad()
            through(model, values).backward()
            optimizer.step()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


def test_reentrant_checkpointing_of_each_block():
    ours, plain = made(whole=False), made(whole=False, release=False)
    for model, optimizer, _ in (ours, plain):
        model.__class__ = Checkpointed
        model.reentrant = True
        for values in batches(3):
            optimizer.zero_grad()
            loss_of(model, values.requires_grad_()).backward()
            optimizer.step()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


def test_reentrant_double_use_is_an_error():
    model, _optimizer, _ = made(whole=False)
    model.__class__ = Checkpointed
    model.reentrant = True
    model.blocks.append(model.blocks[0])
    values = batches()[0].requires_grad_()
    with pytest.raises(UsageError) as caught:
        loss_of(model, values).backward()
    assert str(caught.value) == (
        "A region with release=True needs one gradient per parameter in a backward pass, got "
        "another one after they were applied. Use torch.utils.checkpoint(use_reentrant=False), or "
        "release=False."
    )


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


def test_a_copy_releases_as_well():
    model, optimizer, _ = made()
    copied = copy.deepcopy(model)
    other = OPTIMIZERS["adamw"](copied.parameters())
    for each in (*copied.blocks, copied):
        each.forward.region.attach(other)
    before = state_of(model, optimizer)
    train(copied, other, 3)
    assert all(each.grad is None for each in copied.blocks.parameters())
    assert equal(state_of(model, optimizer), before)
    train(model, optimizer, 3)
    assert equal(state_of(model, optimizer), state_of(copied, other))


def test_all_that_an_optimizer_trains_is_refused():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError) as caught:
        prepare(model, optimizer, "mixed_bfloat16", release=True)
    assert str(caught.value) == (
        "release=True needs a part of what the optimizer trains, got all 2 parameters of it in one "
        "region. They are stepped together or not at all, so no gradient would be freed before the "
        "last one is there. Prepare parts: for block in model.blocks: prepare(block, optimizer, "
        "..., release=True)."
    )
    assert "forward" not in vars(model)
    assert "step" not in vars(optimizer)
    assert not model.weight._post_accumulate_grad_hooks


SCALERS = {
    "halfstep": lambda: GradScaler(init_scale=1024.0),
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0),
}


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("several", [False, True])
def test_a_scaler_is_refused_before_anything_is_applied(kind, several):
    model, optimizer, _ = made()
    train(model, optimizer, 1)
    before, scaler = state_of(model, optimizer), SCALERS[kind]()
    optimizer.zero_grad()
    loss = loss_of(model, batches()[0])
    loss = scaler.scale([loss, loss])[1] if several else scaler.scale(loss)
    with pytest.raises(UsageError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "GradScaler needs gradients that wait for step(), got a region with release=True: it would "
        "apply them while they are scaled, and before it is known that none overflows. Leave the "
        "scaler out, as a region scales by itself, or use release=False."
    )
    assert equal(state_of(model, optimizer), before)
    train(model, optimizer, 1)


@pytest.mark.parametrize("kind", SCALERS)
def test_a_scaler_of_another_model_works(kind):
    model, optimizer, regions = made()
    other, scaler = nn.Linear(8, 2), SCALERS[kind]()
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    for values in batches(3):
        before = other.weight.detach().clone()
        optimizer.zero_grad()
        second.zero_grad()
        scaler.scale(loss_of(other, values)).backward()
        scaler.step(second)
        scaler.update()
        loss_of(model, values).backward()
        optimizer.step()
        assert not torch.equal(other.weight, before)
    assert [each.history.steps for each in regions] == [3] * 5
    assert not any(each.last_step.skipped for each in regions)


def test_clipping_is_refused():
    model, _optimizer, regions = made()
    loss_of(model, batches()[0]).backward()
    for region in regions:
        with pytest.raises(UsageError) as caught:
            region.clip_grad_norm_(1.0)
        assert str(caught.value) == (
            "Region.clip_grad_norm_() needs all gradients at once, got an optimizer of regions "
            "with release=True, which free theirs within backward. Clip without release, or leave "
            "clipping out."
        )


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


def test_pytorchs_scaler_is_left_alone_when_nothing_is_released():
    gc.collect()
    own = torch.amp.GradScaler.scale
    model, optimizer, regions = made()
    assert torch.amp.GradScaler.scale is not own
    for region in regions:
        region.remove()
    assert torch.amp.GradScaler.scale is own
    model, optimizer, regions = made()
    del model, optimizer, regions, region
    gc.collect()
    assert torch.amp.GradScaler.scale is own


@pytest.mark.parametrize("kind", SCALERS)
def test_a_scaler_that_is_off_works(kind):
    model, optimizer, regions = made()
    scaler = GradScaler(enabled=False)
    if kind == "torch":
        scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(loss_of(model, batches()[0])).backward()
    scaler.step(optimizer)
    scaler.update()
    # The scaler tells of what it steps.
    assert [each.history.steps for each in regions[:-1]] == [1] * BLOCKS


def test_a_released_model_is_pickled():
    model, optimizer, _ = made()
    train(model, optimizer, 1)
    loaded = pickle.loads(pickle.dumps(model))
    for one, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert not one._post_accumulate_grad_hooks


# PyTorch before 2.13 asks for it while it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("policy", "whole"), [("mixed_bfloat16", True), (SCALED, False)])
def test_compiled(policy, whole):
    ours, plain = (made("adamw", policy, release, whole=whole) for release in (True, False))
    for model, optimizer, _ in (ours, plain):
        torch._dynamo.reset()
        called = torch.compile(model, backend="aot_eager")
        for values in batches(3):
            optimizer.zero_grad()
            loss_of(called, values).backward()
            if model is ours[0]:
                assert all(each.grad is None for each in model.blocks.parameters())
            optimizer.step()
    assert equal(state_of(*ours[:2]), state_of(*plain[:2]))


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


def test_autograd_grad_applies_nothing():
    model, optimizer, regions = made()
    before = state_of(model, optimizer)
    found = torch.autograd.grad(loss_of(model, batches()[0]), [*model.parameters()])
    assert all(each is not None for each in found)
    assert equal(state_of(model, optimizer), before)
    assert regions[0].history.steps == 0


def test_a_backward_that_fails_leaves_the_next_one_right():
    model, optimizer, _ = made()
    failing = model.blocks[1].first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batches()[0]).backward()
    failing.remove()
    before = [state_of(each, optimizer) for each in model.blocks]
    optimizer.zero_grad()
    loss_of(model, batches()[1]).backward()
    assert all(
        all_changed(each, old, optimizer) for each, old in zip(model.blocks, before, strict=True)
    )
    assert all(each.grad is None for each in model.blocks.parameters())


def test_the_rest_is_left_where_a_released_gradient_was_bad():
    torch.manual_seed(0)
    first, block = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(first, block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(block, optimizer, "mixed_bfloat16", masters="split", release=True)
    outer = prepare(model, optimizer, "mixed_bfloat16", masters="split")
    hook = block.weight.register_hook(lambda gradient: gradient * torch.inf)
    before = [each.detach().clone() for each in model.parameters()]
    model(torch.rand(2, 4)).sum().backward()
    assert first.weight.grad.isfinite().all()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert outer.last_step.skipped
    assert outer.last_step.reason == "a gradient that backward had reached before was not finite"
    hook.remove()
    optimizer.zero_grad()
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    assert not outer.last_step.skipped
    assert not torch.equal(first.weight, before[0])
