"""A region with masters="split": trains as with float32 parameters, refuses what it cannot do."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from halfstep.core import override_policy
from halfstep.errors import PolicyError, UsageError
from halfstep.torch import float32_state_dict, prepare
from halfstep.torch._masters._kept import HALF, master_of, true_value

POLICIES = {
    "mixed_bfloat16": torch.bfloat16,
    "mixed_float16": torch.bfloat16,
    "mixed_float16, param_dtype=float16": torch.float16,
}
IN_FLOAT16 = "mixed_float16, param_dtype=float16"


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, values):
        return self.head(self.inner(values.view(-1, 2, 8))[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(2, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.head.weight = self.embedding.weight

    def forward(self, values):
        found = self.embedding((values > 0.5).long())
        return self.head((self.mix(found).tanh() * values[..., None]).mean(dim=1))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, values):
        return self.head(self.inner(values.view(-1, 2, 8)).mean(dim=1))


def perceptron():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))


def convolution():
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 2),
    )


MODELS = {
    "mlp": perceptron,
    "convolution": convolution,
    "lstm": Recurrent,
    "transformer": Attending,
    "tied": Tied,
}


def made(make=perceptron, policy="mixed_bfloat16", optimizer=torch.optim.AdamW, **settings):
    torch.manual_seed(0)
    model = make()
    trainer = optimizer(model.parameters(), lr=1e-2)
    return model, trainer, prepare(model, trainer, policy, **{"masters": "split", **settings})


def losses(model, optimizer, steps=40, seed=1):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        values = torch.rand(64, 16, generator=generator)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(values), (values[:, :8].sum(1) > 4).long())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def exact(model):
    return {name: true_value(each).clone() for name, each in model.named_parameters()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", MODELS)
def test_trains_as_with_float32_parameters(kind, policy):
    model, optimizer, region = made(MODELS[kind], policy)
    found = losses(model, optimizer)
    cast, other, _ = made(MODELS[kind], policy.split(",")[0], masters="cast")
    expected = losses(cast, other)
    assert sum(expected[-5:]) < sum(expected[:5])
    for one, same in zip(found, expected, strict=True):
        assert one == pytest.approx(same, rel=0.03, abs=0.01)
    assert not region.last_step.skipped
    named = dict(model.named_parameters())
    beside = [name for name in named if kind == "convolution" and name.startswith("2.")]
    for name, each in named.items():
        assert each.dtype is (torch.float32 if name in beside else POLICIES[policy]), name
        assert optimizer.state[each]["exp_avg_sq"].dtype is torch.float32
    assert all(each.dtype in (torch.float32, torch.long) for each in model.buffers())


def test_a_tied_parameter_has_one_master():
    model, optimizer, _ = made(Tied)
    assert model.head.weight is model.embedding.weight
    losses(model, optimizer, 3)
    assert model.head.weight is model.embedding.weight
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize("policy", POLICIES)
def test_many_small_gradients_add_up_in_float32(policy):
    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    prepare(model, optimizer, policy, masters="split", grad_dtype="float32")
    for _ in range(512):
        model(torch.full((1, 1), 1.0)).mul(1 / 512).backward()
    assert model.weight.grad.dtype is torch.float32
    assert model.weight.grad.item() == 1.0


def test_small_gradients_stop_adding_up_in_bfloat16():
    model, _, _ = made(lambda: nn.Linear(1, 1, bias=False))
    for _ in range(512):
        model(torch.ones(1, 1)).mul(1 / 512).backward()
    assert model.weight.grad.dtype is torch.bfloat16
    assert model.weight.grad.item() == 0.5


@pytest.mark.parametrize("factor", [1e-9, 1e-6, 1e-3, 1.0, 1e3, 1e6])
def test_gradients_of_float16_parameters_have_their_true_value(factor):
    model, _, region = made(policy=IN_FLOAT16)
    values = torch.rand(64, 16)

    def gradients(factor):
        model.zero_grad()
        loss = functional.cross_entropy(model(values), (values[:, 0] > 0.5).long())
        (loss * factor).backward()
        return [each.grad for each in model.parameters()]

    for one, other in zip(gradients(1.0), gradients(factor), strict=True):
        assert one.dtype is other.dtype is torch.float32
        assert (other / factor - one).norm() < 2e-3 * one.norm()
    assert region.scale > 1


@pytest.mark.parametrize("policy", POLICIES)
def test_clipping_of_the_region_is_that_of_pytorch(policy):
    models = [made(policy=policy, optimizer=torch.optim.SGD) for _ in range(2)]
    values = torch.rand(64, 16)
    for model, _, _ in models:
        for part in values.split(32):
            model(part).square().sum().backward()
    norms = [
        nn.utils.clip_grad_norm_(models[0][0].parameters(), 0.1),
        models[1][2].clip_grad_norm_(0.1),
    ]
    assert norms[0] > 0.1
    torch.testing.assert_close(norms[0].float(), norms[1].float(), rtol=1e-2, atol=0)
    before = exact(models[0][0])
    for _, optimizer, _ in models:
        optimizer.step()
    one, other = exact(models[0][0]), exact(models[1][0])
    moved = torch.stack([(one[name] - before[name]).norm() for name in one]).norm()
    torch.testing.assert_close(moved, torch.tensor(1e-3), rtol=1e-2, atol=0)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trained", [0, 7])
def test_removing_gives_float32_back_exactly(policy, trained):
    model, optimizer, region = made(policy=policy)
    losses(model, optimizer, trained)
    before = exact(model)
    region.remove()
    assert all(each.dtype is torch.float32 for each in model.parameters())
    assert_same({name: each.detach() for name, each in model.named_parameters()}, before)
    assert "step" not in vars(optimizer)
    assert "forward" not in vars(model)
    assert not any(master_of(each) for each in model.parameters())
    losses(model, optimizer, 2)
    assert all(each.grad.dtype is torch.float32 for each in model.parameters())
    torch.manual_seed(0)
    if not trained:
        fresh = perceptron()
        assert_same(before, {name: each.detach() for name, each in fresh.named_parameters()})


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_trains_by_itself_from_the_same_masters(policy):
    model, optimizer, _ = made(policy=policy)
    losses(model, optimizer, 5)
    copied, before = copy.deepcopy(model), exact(model)
    assert_same(exact(copied), before)
    assert any((each != true_value(each)).any() for each in copied.parameters())
    region = copied.forward.region
    other = torch.optim.AdamW(copied.parameters(), lr=1e-2)
    with pytest.raises(UsageError, match="need an optimizer that knows of them"):
        losses(copied, other, 1)
    region.attach(other)
    losses(copied, other, 5)
    assert_same(exact(model), before)
    own, wanted = dict(copied.named_parameters()), dict(model.named_parameters())
    assert [(each.dtype, each.grad_dtype) for each in own.values()] == [
        (each.dtype, each.grad_dtype) for each in wanted.values()
    ]
    after = exact(copied)
    losses(model, optimizer, 1)
    assert_same(exact(copied), after)
    region.remove()
    assert_same({name: each.detach() for name, each in copied.named_parameters()}, after)
    assert not any(each.dtype is torch.float32 for each in model.parameters())


def test_a_pickle_is_the_plain_model_in_half_precision():
    model, optimizer, _ = made()
    losses(model, optimizer, 3)
    loaded = pickle.loads(pickle.dumps(model))
    assert "forward" not in vars(loaded) or loaded.forward.__func__ is nn.Sequential.forward
    for one, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert master_of(one) is None


def test_an_optimizer_is_attached_later():
    torch.manual_seed(0)
    model = perceptron()
    region = prepare(model, policy="mixed_bfloat16", masters="split")
    before = exact(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(UsageError, match=r"Call attach\(optimizer\) on what prepare returned"):
        losses(model, optimizer, 1)
    assert_same(exact(model), before)
    region.attach(optimizer)
    model.zero_grad()
    first, other, _ = made()
    assert losses(model, optimizer, 5) == losses(first, other, 5)
    assert_same(exact(model), exact(first))


def test_a_nested_island_stays_in_float32():
    torch.manual_seed(0)
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepare(model[2], optimizer, policy="float32")
    prepare(model, optimizer, policy="mixed_bfloat16", masters="split")
    losses(model, optimizer, 3)
    assert model[2].weight.dtype is model[2].bias.dtype is torch.float32
    assert model[2].weight.grad.dtype is torch.float32
    assert model[0].weight.dtype is torch.bfloat16


@pytest.mark.parametrize("policy", POLICIES)
def test_regions_within_regions(policy):
    torch.manual_seed(0)
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepare(model[2], optimizer, policy, masters="split")
    prepare(model, optimizer, policy, masters="split")
    found = losses(model, optimizer)
    alone, other, _ = made(policy=policy)
    assert found == pytest.approx(losses(alone, other), rel=0.03, abs=0.01)
    assert all(each.dtype is POLICIES[policy] for each in model.parameters())


@pytest.mark.parametrize("policy", POLICIES)
def test_halves_within_a_region_in_float32(policy):
    torch.manual_seed(0)
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepare(model[0], optimizer, policy, masters="split")
    prepare(model, optimizer, "mixed_float16")
    found = losses(model, optimizer)
    assert sum(found[-5:]) < sum(found[:5])
    assert model[0].weight.dtype is POLICIES[policy]
    assert model[2].weight.dtype is torch.float32


@pytest.mark.parametrize("policy", POLICIES)
def test_functional_transforms(policy):
    model, _, _ = made(policy=policy)
    values = torch.rand(4, 16)
    loss = lambda given: torch.func.functional_call(model, given, values).square().mean()  # noqa: E731
    own = dict(model.named_parameters())
    found = torch.func.grad(loss)({name: each.detach() for name, each in own.items()})
    model(values).square().mean().backward()
    for name, each in own.items():
        torch.testing.assert_close(found[name].float(), each.grad.float(), rtol=0.02, atol=1e-4)


POLICY_ERRORS = {
    "float32": (
        {"policy": "float32", "masters": "split"},
        "masters='split' needs a compute_dtype of 16 bits, got policy 'float32'. Write "
        "policy='mixed_bfloat16', or masters='cast'.",
    ),
    "param_dtype": (
        {"policy": "mixed_bfloat16, param_dtype=bfloat16"},
        "prepare needs param_dtype=float32, got 'bfloat16'. Leave it out: weights stay in float32 "
        "and are cast where they are used; or write masters='split', which keeps them in half "
        "precision, with exact float32 masters.",
    ),
}
USAGE_ERRORS = {
    "masters": (
        {"masters": "both"},
        "prepare needs masters to be 'cast' or 'split', got 'both'. 'cast' keeps parameters in "
        "float32, 'split' in half precision with the missing bits beside them.",
    ),
    "unhashable masters": (
        {"masters": ["split"]},
        "prepare needs masters to be 'cast' or 'split', got ['split']. 'cast' keeps parameters in "
        "float32, 'split' in half precision with the missing bits beside them.",
    ),
    "grad_dtype alone": (
        {"grad_dtype": "float32"},
        "prepare needs masters='split' for grad_dtype, got grad_dtype='float32' alone. Write "
        "masters='split', or leave grad_dtype out.",
    ),
    "bucket_bytes alone": (
        {"bucket_bytes": 1024},
        "prepare needs masters='split' for bucket_bytes, got bucket_bytes=1024 alone. Write "
        "masters='split', or leave bucket_bytes out.",
    ),
    "grad_dtype": (
        {"masters": "split", "grad_dtype": "float64"},
        "prepare needs grad_dtype to be float32 or bfloat16 or float16, got 'float64'. Leave it "
        "out for the default.",
    ),
    "grad_dtype of torch": (
        {"masters": "split", "grad_dtype": torch.float64},
        "prepare needs grad_dtype to be float32 or bfloat16 or float16, got 'float64'. Leave it "
        "out for the default.",
    ),
    "bucket_bytes": (
        {"masters": "split", "bucket_bytes": 4},
        "prepare needs bucket_bytes to be a whole number >= 8, got 4. Leave it out, or write "
        "2**28 for 256 MiB.",
    ),
    "bucket_bytes in words": (
        {"masters": "split", "bucket_bytes": "1 GiB"},
        "prepare needs bucket_bytes to be a whole number >= 8, got '1 GiB'. Leave it out, or write "
        "2**28 for 256 MiB.",
    ),
    "bucket_bytes as a switch": (
        {"masters": "split", "bucket_bytes": True},
        "prepare needs bucket_bytes to be a whole number >= 8, got True. Leave it out, or write "
        "2**28 for 256 MiB.",
    ),
    "release": (
        {"masters": "split", "release": True},
        "release=True needs a part of what the optimizer trains, got all 4 parameters of it in one "
        "region. They are stepped together or not at all, so no gradient would be freed before the "
        "last one is there. Prepare parts: for block in model.blocks: prepare(block, optimizer, "
        "..., release=True).",
    ),
}


def refused(error, settings, text):
    torch.manual_seed(0)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = exact(model)
    with pytest.raises(error) as caught:
        prepare(model, optimizer, **{"policy": "mixed_bfloat16", **settings})
    assert str(caught.value) == text
    assert all(each.dtype is torch.float32 for each in model.parameters())
    assert_same(exact(model), before)
    assert "forward" not in vars(model)
    assert "step" not in vars(optimizer)
    losses(model, optimizer, 1)


@pytest.mark.parametrize("case", POLICY_ERRORS)
def test_what_policies_cannot_is_refused(case):
    refused(PolicyError, *POLICY_ERRORS[case])


@pytest.mark.parametrize("case", USAGE_ERRORS)
def test_what_makes_no_sense_is_refused(case):
    refused(UsageError, *USAGE_ERRORS[case])


def test_lazy_parameters_are_refused():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with pytest.raises(UsageError) as caught:
        prepare(model, policy="mixed_bfloat16", masters="split")
    assert str(caught.value) == (
        "masters='split' needs parameters that have values, got a LazyLinear that waits for its "
        "first input. Call the model once before prepare."
    )
    assert "forward" not in vars(model)
    model(torch.rand(2, 3))
    prepare(model, policy="mixed_bfloat16", masters="split")


def test_half_precision_without_masters_is_refused():
    model = perceptron().bfloat16()
    with pytest.raises(UsageError) as caught:
        prepare(model, policy="mixed_bfloat16")
    assert str(caught.value) == (
        "A region needs trained parameters in float32, got bfloat16 for 0.weight. Write "
        'prepare(..., masters="split"), which keeps small updates beside the optimizer, or call '
        "model.float(): weights are cast where they are used."
    )
    prepare(model, policy="mixed_bfloat16", masters="split")


def test_the_reference_of_a_comparison_has_no_halves():
    with override_policy("float32"):
        model, optimizer, _ = made()
        assert all(each.dtype is torch.float32 for each in model.parameters())
        found = losses(model, optimizer, 3)
    torch.manual_seed(0)
    plain = perceptron()
    assert found == losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 3)


# PyTorch before 2.13 asks for it while it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_compiled(policy, first):
    torch.manual_seed(0)
    model = perceptron()
    called = torch.compile(model, backend="aot_eager") if first else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepare(called, optimizer, policy, masters="split")
    called = called if first else torch.compile(model, backend="aot_eager")
    found = losses(called, optimizer, 6)
    plain, other, _ = made(policy=policy)
    assert found == pytest.approx(losses(plain, other, 6), rel=0.02)
    assert all(each.dtype is POLICIES[policy] for each in model.parameters())
    for one, same in zip(exact(model).values(), exact(plain).values(), strict=True):
        torch.testing.assert_close(one, same, rtol=0.05, atol=0.02)


def zeroed(parameter):
    with torch.no_grad():
        parameter.zero_()


def masked(parameter):
    mask = torch.rand(parameter.shape) > 0.5
    parameter.data.mul_(mask)


def clamped(parameter):
    with torch.no_grad():
        parameter.clamp_(-0.01, 0.01)


def without_end(parameter):
    with torch.no_grad():
        parameter.view(-1)[0] = float("inf")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("change", [zeroed, masked, clamped, without_end])
def test_masters_follow_what_else_is_written(change, policy):
    model, optimizer, _ = made(policy=policy)
    losses(model, optimizer, 5)
    for each in model.parameters():
        change(each)
        assert not true_value(each).isnan().any()
        # A remainder is at most half of a unit in the last place, of what is on either side.
        gap = (true_value(each) - each.detach().float()).nan_to_num(0.0).abs()
        room = each.detach().float().abs() * torch.finfo(each.dtype).eps
        room += torch.finfo(each.dtype).smallest_normal
        assert (gap <= room).all()
        if change is zeroed:
            assert true_value(each).abs().max() < 1e-4
    if change is without_end:
        return
    found = losses(model, optimizer, 5)
    assert all(value == value for value in found)
    assert not any(each.isnan().any() for each in exact(model).values())


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_parameter_is_replaced_by_another_one(policy):
    model, optimizer, _ = made(policy=policy)
    losses(model, optimizer, 2)
    model[2].weight = nn.Parameter(torch.zeros(2, 32, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [model[2].weight]})
    losses(model, optimizer, 3)
    assert optimizer.state[model[2].weight]["exp_avg"].dtype is torch.float32
    assert master_of(model[2].weight) is not None
    assert (true_value(model[2].weight) != model[2].weight).any()


def test_a_parameter_is_replaced_before_an_optimizer_knows_it():
    model, _, region = made()
    model[2].weight = nn.Parameter(torch.zeros(2, 32, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-13)
    region.attach(optimizer)
    losses(model, optimizer, 3)
    assert (true_value(model[2].weight) != 0).any()


def test_frozen_parameters_stay_as_they_are():
    torch.manual_seed(0)
    model = perceptron()
    model[0].requires_grad_(False)
    model[0].bias.data = model[0].bias.data.half()
    before = [each.detach().clone() for each in model[0].parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    region = prepare(model, optimizer, "mixed_bfloat16", masters="split")
    losses(model, optimizer, 3)
    region.remove()
    for each, old in zip(model[0].parameters(), before, strict=True):
        assert each.dtype is old.dtype
        assert torch.equal(each, old)


@pytest.mark.parametrize(
    ("policy", "grad_dtype", "kept"),
    [
        ("mixed_bfloat16", None, torch.bfloat16),
        ("mixed_bfloat16", "float32", torch.float32),
        (IN_FLOAT16, None, torch.float32),
    ],
)
def test_gradients_that_are_there_stay(policy, grad_dtype, kept):
    torch.manual_seed(0)
    model = perceptron()
    gradients = [torch.randn_like(each) * 1e-9 for each in model.parameters()]
    for each, gradient in zip(model.parameters(), gradients, strict=True):
        each.grad = gradient.clone()
    region = prepare(model, policy=policy, masters="split", grad_dtype=grad_dtype)
    for each, gradient in zip(model.parameters(), gradients, strict=True):
        assert each.grad.dtype is kept
        assert torch.equal(each.grad, gradient.to(kept))
    region.remove()
    for each, gradient in zip(model.parameters(), gradients, strict=True):
        assert each.grad.dtype is torch.float32
        assert torch.equal(each.grad, gradient.to(kept).float())


def test_the_state_dict_of_a_region_in_halves_is_exact():
    model, optimizer, _ = made()
    losses(model, optimizer, 3)
    assert all(each.dtype in HALF for each in model.state_dict().values())
    assert_same(float32_state_dict(model), exact(model))
