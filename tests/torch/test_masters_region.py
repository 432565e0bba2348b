"""A region with masters="split" trains as with float32 parameters."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from halfstep.errors import UsageError
from halfstep.torch import float32_state_dict, prepare
from halfstep.torch._dtypes import HALF
from halfstep.torch._masters._kept import master_of, true_value
from tests.torch.split_models import (
    IN_FLOAT16,
    MODELS,
    POLICIES,
    Tied,
    assert_same,
    exact,
    losses,
    made,
    perceptron,
)


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


def test_a_pickle_is_the_plain_model_with_masters():
    model, optimizer, _ = made()
    losses(model, optimizer, 3)
    pickled = pickle.dumps(model)
    assert b"halfstep.torch" not in pickled
    loaded = pickle.loads(pickled)
    assert "forward" not in vars(loaded) or loaded.forward.__func__ is nn.Sequential.forward
    assert_same(exact(loaded), exact(model))
    for one, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert master_of(one) is not None


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


def test_the_state_dict_of_a_region_in_halves_is_exact():
    model, optimizer, _ = made()
    losses(model, optimizer, 3)
    assert all(each.dtype in HALF for each in model.state_dict().values())
    assert_same(float32_state_dict(model), exact(model))
