"""Masters and what optimizers do beyond a plain step."""

import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch import GradScaler, keep_masters, prepare
from halfstep.torch._masters._bits import split
from halfstep.torch._masters._kept import true_value
from halfstep.torch._masters._swap import Scratches

SHAPES = ((7, 5), (5,), (3, 2, 2))


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def pair(make, **settings):
    """Returns half-precision parameters with masters, the same in float32, and optimizers."""
    half, wide = parameters(), parameters()
    optimizer = make(half)
    keep_masters(optimizer, param_dtype="bfloat16", **settings)
    return half, optimizer, wide, make(wide)


def set_gradients(half, wide):
    for one, other in zip(half, wide, strict=True):
        one.grad = torch.randn_like(one).detach()
        other.grad = one.grad.float()


def assert_same(half, wide):
    for one, other in zip(half, wide, strict=True):
        assert torch.equal(true_value(one), other.detach())


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as schedule-free optimizers do."""

    def __init__(self, params):
        super().__init__(params, {"k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1 / group["k"])


class Together(torch.optim.Optimizer):
    """Divides by the norm of all gradients, and holds on to its list of parameters."""

    def __init__(self, params):
        super().__init__(params, {})
        self.kept = self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self):
        norm = torch.stack([each.grad.norm() for each in self.kept]).norm()
        for each in self.kept:
            each.sub_(each.grad / norm)


class Replacing(torch.optim.Optimizer):
    """Makes new data for its parameters, and new state."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for each in self.param_groups[0]["params"]:
            state = self.state[each]
            state["sum"] = state.get("sum", 0) + each.grad
            each.data = each.data - 0.1 * state["sum"]


class Failing(torch.optim.SGD):
    """Fails on request."""

    fails = False

    @torch.no_grad()
    def step(self):
        if self.fails:
            raise ZeroDivisionError("on request")
        super().step()


@pytest.mark.parametrize("kind", [Counting, Together, Replacing])
def test_optimizers_of_others_have_the_bits_of_float32(kind):
    half, optimizer, wide, other = pair(kind)
    for _ in range(5):
        set_gradients(half, wide)
        optimizer.step()
        other.step()
    assert_same(half, wide)


@pytest.mark.parametrize("bucket_bytes", [128, 800, 8000])
@pytest.mark.parametrize("kind", [Counting, Replacing])
def test_buckets_are_parts_of_one_step(kind, bucket_bytes):
    half, optimizer, wide, other = pair(kind, bucket_bytes=bucket_bytes)
    for _ in range(5):
        set_gradients(half, wide)
        optimizer.step()
        other.step()
    assert_same(half, wide)
    assert optimizer.param_groups[0].get("k") == other.param_groups[0].get("k")


def test_a_closure_sees_the_parameters_and_lbfgs_the_masters():
    torch.manual_seed(1)
    half, wide = nn.Parameter(torch.randn(6)), nn.Parameter(torch.empty(6))
    wide.data = half.detach().clone()
    target = torch.randn(6)
    make = {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    optimizer, other = torch.optim.LBFGS([half], **make), torch.optim.LBFGS([wide], **make)
    keep_masters(optimizer, param_dtype="bfloat16")

    def closure():
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["params"][0] is half
        loss = (half.float() - target).square().sum()
        loss.backward()
        return loss

    def rounded_closure():
        low, rest = torch.empty(6, dtype=torch.bfloat16), torch.empty(6, dtype=torch.int16)
        split(wide.detach(), low, rest)
        leaf = low.requires_grad_()
        loss = (leaf.float() - target).square().sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        wide.grad = gradient.float()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        other.step(rounded_closure)
    assert_same([half], [wide])


def test_a_closure_of_another_optimizer_is_evaluated_once():
    half, optimizer, wide, other = pair(lambda p: torch.optim.Adam(p, lr=0.01))
    calls = []

    def closure():
        calls.append(1)
        set_gradients(half, wide)
        return 3.0

    assert optimizer.step(closure) == 3.0
    other.step()
    assert calls == [1]
    assert_same(half, wide)


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_run_once_and_see_the_parameters(fused):
    half, optimizer, wide, _ = pair(
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused), bucket_bytes=128
    )
    seen = []

    def hook(current, _args, _kwargs):
        seen.append([*map(id, current.param_groups[0]["params"])])

    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_post_hook(hook)
    set_gradients(half, wide)
    optimizer.step()
    assert seen == [[*map(id, half)]] * 2


@pytest.mark.parametrize("first", [True, False])
def test_schedulers_work_made_before_or_after(first):
    half, wide = parameters(), parameters()
    optimizer, other = torch.optim.SGD(half, lr=1.0), torch.optim.SGD(wide, lr=1.0)
    schedulers = []
    for each in (optimizer, other):
        if not first and each is optimizer:
            keep_masters(optimizer, param_dtype="bfloat16")
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(each, 0.5))
    if first:
        keep_masters(optimizer, param_dtype="bfloat16")
    for _ in range(4):
        set_gradients(half, wide)
        optimizer.step()
        other.step()
        for each in schedulers:
            each.step()
    assert_same(half, wide)


def test_a_group_that_is_added_later_gets_masters():
    half, optimizer, wide, other = pair(lambda p: torch.optim.Adam(p[:1], lr=0.01))
    rest = [nn.Parameter(each.detach().bfloat16()) for each in half[1:]]
    optimizer.add_param_group({"params": rest})
    for one, two in zip(rest, wide[1:], strict=True):
        two.data = one.detach().float()
    other.add_param_group({"params": wide[1:]})
    for _ in range(5):
        set_gradients([half[0], *rest], wide)
        optimizer.step()
        other.step()
    assert_same([half[0], *rest], wide)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_sparse_gradients(kind):
    torch.manual_seed(0)
    half, wide = nn.Embedding(6, 3, sparse=True), nn.Embedding(6, 3, sparse=True)
    wide.load_state_dict(half.state_dict())
    optimizer, other = kind(half.parameters(), lr=0.1), kind(wide.parameters(), lr=0.1)
    keep_masters(optimizer, param_dtype="bfloat16")
    for _ in range(3):
        for model, each in ((half, optimizer), (wide, other)):
            each.zero_grad()
            model(torch.tensor([1, 4, 1])).sum().backward()
            each.step()
    assert_same(half.parameters(), wide.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_float32_and_half_in_one_optimizer(fused):
    half, wide = parameters(), parameters()
    half[0].data = half[0].data.bfloat16()
    wide[0].data = half[0].data.float()
    made = [torch.optim.AdamW(each, lr=0.01, fused=fused) for each in (half, wide)]
    keep_masters(made[0])
    for _ in range(5):
        set_gradients(half, wide)
        for each in made:
            each.step()
    assert [each.dtype for each in half] == [torch.bfloat16, torch.float32, torch.float32]
    assert_same(half, wide)


def test_an_error_in_a_step_leaves_all_in_place():
    half, optimizer, wide, _ = pair(lambda p: Failing(p, lr=0.1, momentum=0.9))
    set_gradients(half, wide)
    optimizer.step()
    before = [true_value(each) for each in half]
    state = [optimizer.state[each]["momentum_buffer"].clone() for each in half]
    optimizer.fails = True
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, half)]
    for each, value, buffer in zip(half, before, state, strict=True):
        assert torch.equal(true_value(each), value)
        assert torch.equal(optimizer.state[each]["momentum_buffer"], buffer)
    assert len(optimizer.state) == len(half)


@pytest.mark.parametrize("fused", [False, True])
def test_a_bad_gradient_changes_nothing(fused):
    half, optimizer, wide, _ = pair(lambda p: torch.optim.AdamW(p, lr=0.1, fused=fused))
    set_gradients(half, wide)
    optimizer.step()
    before = [true_value(each) for each in half]
    half[1].grad[2] = torch.nan
    optimizer.step()
    assert all(torch.equal(true_value(a), b) for a, b in zip(half, before, strict=True))
    assert {optimizer.state[each]["step"].item() for each in half} == {1.0}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_scaler_steps_masters(dtype, fused, max_norm):
    half, wide = parameters(), parameters()
    made = [torch.optim.AdamW(each, lr=0.01, fused=fused) for each in (half, wide)]
    keep_masters(made[0], param_dtype=dtype, grad_dtype="float32")
    scalers = [GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in made]
    for number in range(6):
        factors = [torch.randn(shape) for shape in SHAPES]
        if number == 3:
            factors[1][0] = torch.inf
        for each, optimizer, scaler in zip((half, wide), made, scalers, strict=True):
            optimizer.zero_grad()
            loss = sum((p.float() * f).sum() for p, f in zip(each, factors, strict=True))
            scaler.scale(loss * 1.0).backward()
            for parameter, other in zip(each, half, strict=True):
                # The same rounding of gradients on both sides.
                parameter.grad = parameter.grad.to(other.dtype).float()
            limit = {} if max_norm is None else {"max_norm": max_norm}
            scaler.step(optimizer, **limit)
            scaler.update()
    assert_same(half, wide)
    assert scalers[0].history.skipped == 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("limit", [0.1, 100.0])
def test_a_region_clips_in_one_pass(fused, limit):
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    region = prepare(model, optimizer, "mixed_bfloat16", masters="split")
    model(torch.randn(3, 6)).square().sum().backward()
    wide = [nn.Parameter(true_value(each)) for each in model.parameters()]
    for one, other in zip(wide, model.parameters(), strict=True):
        one.grad = other.grad.float()
    plain = torch.optim.AdamW(wide, lr=0.1, fused=fused)
    norm = nn.utils.clip_grad_norm_(wide, limit)
    torch.testing.assert_close(region.clip_grad_norm_(limit), norm, rtol=1e-6, atol=0)
    optimizer.step()
    plain.step()
    for one, other in zip(wide, model.parameters(), strict=True):
        torch.testing.assert_close(true_value(other), one.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
def test_float32_memory_stays_within_the_limit(fused, monkeypatch):
    sizes = []
    like = Scratches.like

    def measured(self, piece):
        part = like(self, piece)
        sizes.append(4 * self._used)
        return part

    monkeypatch.setattr(Scratches, "like", measured)
    weight = nn.Parameter(torch.randn(1000))
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=fused)
    keep_masters(optimizer, param_dtype="bfloat16", bucket_bytes=800)
    for _ in range(2):
        sizes.clear()
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    # Whole vectors of 16 numbers and their gradients.
    assert max(sizes) == 800 // 128 * 128


def test_a_step_past_the_masters_is_refused():
    half, _, wide, _ = pair(lambda p: torch.optim.SGD(p, lr=0.1))
    set_gradients(half, wide)
    with pytest.raises(UsageError) as error:
        torch.optim.SGD(half, lr=0.1).step()
    assert str(error.value) == (
        "Parameters with masters need an optimizer that knows of them, got a step of a SGD that "
        "does not: it would lose small updates. Call attach(optimizer) on what prepare returned, "
        "or keep_masters(optimizer), also for a copy of a model or an unpickled one."
    )


def test_removing_gives_float32_back():
    first = nn.Parameter(torch.full((3,), 1 + 2.0**-20))
    single = torch.optim.SGD([first], lr=0.1)
    keep_masters(single, param_dtype="bfloat16").remove()
    assert first.dtype is torch.float32
    assert first[0].item() == 1 + 2.0**-20
    assert "step" not in vars(single)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_lie_in_memory_in_another_way(fused):
    weights = [nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    weights[1].data.copy_(weights[0])
    made = [torch.optim.AdamW([each], lr=0.1, fused=fused) for each in weights]
    keep_masters(made[0], param_dtype="bfloat16", grad_dtype="float32")
    for gradient in (torch.randn(4, 6).t(), torch.randn(6, 1).expand(6, 4)):
        weights[0].grad, weights[1].grad = gradient, gradient.contiguous()
        for optimizer in made:
            optimizer.step()
        assert torch.equal(true_value(weights[0]), weights[1])


@pytest.mark.parametrize("fused", [False, True])
def test_empty_parameters_and_ones_with_gaps(fused):
    empty, gaps = nn.Parameter(torch.randn(0)), nn.Parameter(torch.randn(6, 6).bfloat16()[:, ::2])
    wide = [nn.Parameter(torch.empty(0)), nn.Parameter(gaps.detach().float().contiguous())]
    made = [torch.optim.AdamW(each, lr=0.1, fused=fused) for each in ([empty, gaps], wide)]
    keep_masters(made[0], param_dtype="bfloat16")
    for _ in range(3):
        set_gradients([empty, gaps], wide)
        for each in made:
            each.step()
    assert_same([empty, gaps], wide)


def test_gradients_follow_a_model_that_is_made_float32_by_hand():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer, "mixed_bfloat16", masters="split")
    model.float()
    model(torch.rand(2, 3)).sum().backward()
    assert model.weight.grad.dtype is torch.float32
    optimizer.step()
