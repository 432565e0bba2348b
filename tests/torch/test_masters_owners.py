"""Masters that meet other owners, other optimizers and other processes."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch import float32_state_dict, keep_masters, prepare
from halfstep.torch._masters._kept import master_of, true_value
from tests.torch.split_models import assert_same, exact, losses, made, perceptron

TAKEN = (
    " needs an optimizer without masters, got a AdamW that keep_masters or prepare has given some. "
    "Leave the second call out, or call remove() on what the first one returned."
)


def train_half(model, optimizer, steps=3):
    for number in range(steps):
        torch.manual_seed(number)
        optimizer.zero_grad()
        model(torch.rand(8, 16).bfloat16()).float().square().mean().backward()
        optimizer.step()


def half(make=torch.optim.AdamW, **settings):
    torch.manual_seed(0)
    model = perceptron().bfloat16()
    return model, make(model.parameters(), lr=1e-2, **settings)


def trained(way):
    """Returns a model that was trained a little, its optimizer, and what trains on."""
    if way == "prepare":
        model, optimizer, _ = made()
        train = losses
    else:
        model, optimizer = half()
        keep_masters(optimizer)
        train = train_half
    train(model, optimizer, 3)
    return model, optimizer, train


def test_masters_have_one_owner():
    model, optimizer, region = made()
    before = exact(model)
    with pytest.raises(UsageError) as caught:
        keep_masters(optimizer)
    assert str(caught.value) == "keep_masters" + TAKEN
    assert_same(exact(model), before)
    region.remove()
    assert all(each.dtype is torch.float32 for each in model.parameters())
    assert "step" not in vars(optimizer)


def test_a_region_does_not_take_masters_over():
    torch.manual_seed(0)
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    masters = keep_masters(optimizer, param_dtype="bfloat16")
    before = exact(model)
    with pytest.raises(UsageError) as caught:
        prepare(model, optimizer, "mixed_bfloat16", masters="split")
    assert str(caught.value) == "prepare" + TAKEN
    assert_same(exact(model), before)
    region = prepare(model, optimizer, "mixed_bfloat16")
    losses(model, optimizer, 2)
    region.remove()
    after = exact(model)
    masters.remove()
    assert_same({name: each.detach() for name, each in model.named_parameters()}, after)


def test_a_handle_undoes_only_once():
    model, optimizer = half()
    masters = keep_masters(optimizer)
    masters.remove()
    again = keep_masters(optimizer)
    train_half(model, optimizer)
    before = exact(model)
    masters.remove()
    assert_same(exact(model), before)
    assert len(again.tensors()) == 4


def test_regions_share_an_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(perceptron(), nn.Linear(2, 16), perceptron())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts = [prepare(model[at], optimizer, "mixed_bfloat16", masters="split") for at in (0, 2)]
    losses(model, optimizer, 3)
    before = exact(model)
    parts[0].remove()
    assert_same(exact(model), before)
    assert master_of(model[0][0].weight) is None
    assert master_of(model[2][0].weight) is not None
    losses(model, optimizer, 3)
    parts[1].remove()
    losses(model, optimizer, 3)
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("way", ["keep_masters", "prepare"])
@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("grad_dtype", [None, "float32"])
def test_removing_leaves_an_optimizer_of_a_half_model_that_steps(way, settings, grad_dtype):
    model, optimizer = half(**settings)
    if way == "prepare":
        policy = "mixed_bfloat16"
        kept = prepare(model, optimizer, policy, masters="split", grad_dtype=grad_dtype)
        losses(model, optimizer, 3)
    else:
        kept = keep_masters(optimizer, grad_dtype=grad_dtype)
        train_half(model, optimizer)
    before = [each.detach().clone() for each in model.parameters()]
    kept.remove()
    assert all(map(torch.equal, before, model.parameters()))
    assert "step" not in vars(optimizer)
    state = optimizer.state[model[0].weight]
    assert state["exp_avg_sq"].dtype is torch.bfloat16
    assert state["step"].dtype is torch.float32
    train_half(model, optimizer)
    assert not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("way", ["keep_masters", "prepare"])
def test_an_unpickled_pair_goes_on_exactly(way):
    model, optimizer, train = trained(way)
    copied, other = pickle.loads(pickle.dumps((model, optimizer)))
    assert_same(exact(copied), exact(model))
    with pytest.raises(UsageError, match=r"keep_masters\(optimizer\), also for a copy"):
        train_half(copied, other, 1)
    if way == "prepare":
        prepare(copied, other, "mixed_bfloat16", masters="split")
    else:
        keep_masters(other)
    train(model, optimizer, 3)
    train(copied, other, 3)
    assert_same(exact(copied), exact(model))


def test_a_pickle_needs_no_halfstep(tmp_path):
    model, optimizer, _ = made(lambda: nn.Linear(16, 2))
    losses(model, optimizer, 3)
    torch.save(model, tmp_path / "model.pt")
    script = (
        "import sys, torch\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "model(torch.ones(1, 16).bfloat16())\n"
        "assert not any(name.startswith('halfstep') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_parameter_that_is_saved_alone_loads_safely(tmp_path):
    model, optimizer, _ = made()
    losses(model, optimizer, 3)
    torch.save(model[0].weight, tmp_path / "weight.pt")
    weight = torch.load(tmp_path / "weight.pt", weights_only=True)
    assert torch.equal(true_value(weight), true_value(model[0].weight))


class Sharpness(torch.optim.Optimizer):
    """Looks for the gradient a step uphill, and hands it to an optimizer that it holds."""

    def __init__(self, params, base, **settings):
        super().__init__(params, dict(settings))
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        trained = [each for group in self.param_groups for each in group["params"]]
        for each in trained:
            self.state[each]["old"] = each.clone()
            each.add_(each.grad, alpha=0.05)
        loss = closure()
        for each in trained:
            each.copy_(self.state[each].pop("old"))
        self.base_optimizer.step()
        return loss


class Apart(Sharpness):
    """The same with groups of its own."""

    def __init__(self, params, base, **settings):
        params = list(params)
        torch.optim.Optimizer.__init__(self, params, dict(settings))
        self.base_optimizer = base(params, **settings)


@pytest.mark.parametrize("kind", [Sharpness, Apart])
@pytest.mark.parametrize("faulty", [False, True])
def test_a_wrapper_and_what_it_wraps_see_the_same(kind, faulty):
    weights = [nn.Parameter(torch.full((4,), 1.0)) for _ in range(2)]
    made = [kind([each], torch.optim.SGD, lr=1e-4, momentum=0.9) for each in weights]
    keep_masters(made[0], param_dtype="bfloat16", grad_dtype="float32")
    target = torch.tensor([0.0, 1.0, 2.0, 3.0])
    for number in range(6):
        for weight, optimizer in zip(weights, made, strict=True):
            weight.grad = torch.full((4,), 0.5)

            def evaluate(weight=weight, optimizer=optimizer, number=number):
                weight.grad = (0.1 + target) / (number + 1)
                if faulty and number == 3 and optimizer is made[0]:
                    weight.grad = weight.grad * torch.inf
                return 1.0

            if not (faulty and number == 3 and optimizer is made[1]):
                optimizer.step(evaluate)
    assert torch.equal(true_value(weights[0]), weights[1])
    for optimizer in (made[0], made[0].base_optimizer):
        assert [*optimizer.state] == [weights[0]]
    assert made[0].base_optimizer.param_groups[0]["params"][0] is weights[0]


class Listing(torch.optim.Optimizer):
    """Keeps a list, or a tuple, of its parameters from the beginning."""

    def __init__(self, params, kind, write=lambda each: each):
        params = kind(params)
        super().__init__(params, {})
        self.trained, self.write = params, write

    @torch.no_grad()
    def step(self):
        for each in self.trained:
            self.write(each).sub_(each.grad, alpha=2.0**-3)


def test_an_optimizer_with_a_list_of_its_own():
    weights = [nn.Parameter(torch.full((4,), 1.0)) for _ in range(2)]
    made = [Listing([each], list) for each in weights]
    keep_masters(made[0], param_dtype="bfloat16")
    for _ in range(5):
        for weight, optimizer in zip(weights, made, strict=True):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert torch.equal(true_value(weights[0]), weights[1])
    assert made[0].trained[0] is weights[0]


@pytest.mark.parametrize("write", [lambda each: each, lambda each: each.data])
def test_an_optimizer_that_passes_by_the_masters_is_refused(write):
    weight = nn.Parameter(torch.full((4,), 1.0))
    optimizer = Listing([weight], tuple, write)
    keep_masters(optimizer, param_dtype="bfloat16")
    weight.grad = torch.ones_like(weight)
    with pytest.raises(UsageError, match="steps the parameters in its param_groups"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == [weight]


def test_the_step_of_the_class_is_refused():
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    keep_masters(optimizer, param_dtype="bfloat16")
    weight.grad = torch.ones_like(weight)
    with pytest.raises(UsageError) as caught:
        torch.optim.SGD.step(optimizer)
    assert str(caught.value) == (
        "Parameters with masters need optimizer.step(), got a call of SGD.step, which passes by "
        "the masters: it would lose small updates. Call the step of the optimizer itself, not that "
        "of its class."
    )
    optimizer.step()


@pytest.mark.parametrize("way", ["keep_masters", "prepare"])
def test_a_copied_pair_goes_on_exactly(way):
    model, optimizer, train = trained(way)
    copied, other = copy.deepcopy((model, optimizer))
    assert_same(exact(copied), exact(model))
    with pytest.raises(UsageError, match=r"keep_masters\(optimizer\), also for a copy"):
        train_half(copied, other, 1)
    keep_masters(other)
    train(model, optimizer, 3)
    train(copied, other, 3)
    assert_same(exact(copied), exact(model))
    assert [each.grad_dtype for each in copied.parameters()] == [
        each.grad_dtype for each in model.parameters()
    ]


def test_a_removed_region_leaves_no_trace_in_a_state_dict():
    model, optimizer, region = made()
    losses(model, optimizer, 2)
    region.remove()
    state = optimizer.state_dict()
    assert "halfstep_masters" not in state["param_groups"][0]
    assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert float32_state_dict(model).keys() == model.state_dict().keys()
    assert not any(vars(each) for each in model.parameters())
