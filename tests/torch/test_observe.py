"""What `observe` counts, against hooks, casts that are written out, and a run in float32."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import Exponents
from halfstep.errors import UsageError
from halfstep.torch import autocast, observe, prepare
from halfstep.torch._observing import _counting
from halfstep.torch._observing._collecting import Histograms
from tests.torch import faulty_models as faulty
from tests.torch.faulty_models import autocasts, inside, mean
from tests.torch.stepping import CASES
from tests.torch.test_diagnose_untouched import assert_same, state_of
from tests.torch.test_diagnose_untouched import case as remembering

RULES = "rules=halfstep-1 + convolution=lower"
UNSCALED = f"mixed_float16, scale=none, {RULES}"
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
WIDTHS = {"float16": torch.float16, "float32": torch.float32}


class Written(nn.Module):
    """A linear layer whose casts are written out, and whose tensors are kept."""

    def __init__(self, layer, dtype):
        super().__init__()
        self.layer, self.dtype, self.held = layer, dtype, {}

    def forward(self, x):
        self.held["input"], self.held["weight"] = (
            each.to(self.dtype) for each in (x, self.layer.weight)
        )
        inputs = self.held["input"], self.held["weight"], self.layer.bias.to(self.dtype)
        self.held["output"] = functional.linear(*inputs)
        for each in self.held.values():
            if each.requires_grad:
                each.retain_grad()
        return self.held["output"]

    @property
    def numbers(self):
        """What was kept, by role."""
        output, weight, input = (self.held[name] for name in ("output", "weight", "input"))
        found = {**self.held, "grad_output": output.grad, "grad_weight": weight.grad}
        return found | ({} if input.grad is None else {"grad_input": input.grad})


def measured(case, policy, **options):
    model = case.model()
    torch.manual_seed(7)
    return observe(model, case.batch(), case.loss, policy=policy, **options)


def run(case, model):
    torch.manual_seed(7)
    case.loss(model, case.batch()).backward()
    return model


def rows(seen, role, phase="backward"):
    return seen.of(operation="matmul", phase=phase, role=role).rows


def of_shape(seen, role, shape):
    """Returns the rows of the products: those of a bias have one dimension."""
    phase = "backward" if role.startswith("grad") else "forward"
    return [row for row in rows(seen, role, phase) if sorted(row.shape) == sorted(shape)]


@pytest.mark.parametrize("form", WIDTHS)
def test_counts_are_those_of_casts_that_are_written_out(form):
    case, names = CASES["mlp"], ("0", "2", "4")
    by_hand = case.model()
    for name in names:
        by_hand[int(name)] = Written(by_hand[int(name)], WIDTHS[form])
    run(case, by_hand)
    seen = measured(case, UNSCALED if form == "float16" else "float32")
    for name in names:
        for role, numbers in by_hand[int(name)].numbers.items():
            found = of_shape(seen.of(module=name), role, numbers.shape)
            assert found
            for row in found:
                assert (row.form, row.run) == (form, Exponents.of(numbers.detach().float()))


def linears(model):
    return {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}


def hooked(model):
    """Returns where outputs and their gradients will be, by module and role."""
    held = {}

    def keep(name):
        def hook(_module, _inputs, output):
            held[name, "output"] = output.detach().clone()
            output.register_hook(lambda gradient: held.update({(name, "grad_output"): gradient}))

        return hook

    for name, each in linears(model).items():
        each.register_forward_hook(keep(name))
    return held


@EVERY
@pytest.mark.parametrize("way", ["float32", *autocasts])
def test_counts_are_those_that_hooks_see(case, way):
    loss_fn = inside(autocasts[way], case.loss) if way in autocasts else case.loss
    model, other = case.model(), case.model()
    held = hooked(model)
    torch.manual_seed(7)
    loss_fn(model, case.batch()).backward()
    held |= {(name, "grad_weight"): each.weight.grad for name, each in linears(model).items()}
    torch.manual_seed(7)
    seen = observe(other, case.batch(), loss_fn)
    for (name, role), numbers in held.items():
        phase = "backward" if role.startswith("grad") else "forward"
        found = rows(seen.of(module=name), role, phase)
        assert Exponents.of(numbers.float()) in [row.run for row in found]
        assert {row.form for row in found} == {"float16" if way in autocasts else "float32"}
        assert numbers.abs().max() in [row.largest for row in found]
    assert len(held) == 3 * len(linears(model))


@EVERY
def test_in_float32_it_is_its_own_reference(case):
    seen = measured(case, "float32")
    assert all(row.reference == row.run for row in seen if row.operation != "cast")
    assert {row.form for row in seen} == {"float32"}
    assert len(seen) > 30


@EVERY
def test_what_is_lost_is_what_casts_of_a_run_in_float32_lose(case):
    seen, model = measured(case, UNSCALED), case.model()
    held = hooked(model)
    run(case, model)
    for name in linears(model):
        gradient = held[name, "grad_output"]
        exact = ((gradient != 0) & (gradient.half() == 0)).sum() / (gradient != 0).sum()
        found = rows(seen.of(module=name), "grad_output")
        assert found
        for row in found:
            assert row.lost == pytest.approx(exact.item(), abs=0.01)
            assert row.form == "float16"
    assert max(row.lost or 0.0 for row in seen) > 0.005


def test_what_does_not_fit_is_counted():
    class Grows(nn.Module):
        def forward(self, x):
            return (x * 2).half() * 2

    batch = torch.tensor([1e-8, 4e-6, 1.0, 1e4, 3e4, -torch.inf, torch.nan])
    seen = observe(nn.Sequential(Grows(), nn.Tanh()), batch, mean)
    cast, product = (seen.of(module="0", operation=word).rows[-1] for word in ("cast", "multiply"))
    assert (cast.zeros, cast.subnormals, cast.saturated, cast.infs, cast.nans) == (1, 1, 1, 1, 1)
    assert (cast.flushed, cast.lost, cast.largest) == (1, 1 / 7, 6e4)
    assert (product.infs, product.nans) == (2, 1)
    # What is cast by hand is so in float32, too.
    assert (product.reference, product.flushed) == (None, None)


def test_a_dynamic_scale_backs_off_before():
    for policy, overflows in (("static(65536.0)", True), ("dynamic()", False)):
        model, policy = nn.Sequential(faulty.Steep()), f"mixed_float16, scale={policy}"
        steep = observe(model, torch.ones(2, 8), mean, policy=policy)
        assert any(row.infs or row.nans for row in steep) == overflows
    seen = measured(CASES["mlp"], f"mixed_float16, {RULES}")
    assert max(row.lost or 0.0 for row in seen.of(role="grad_output")) < 1e-3


def test_a_scale_of_the_loss():
    plain, scaled = (
        measured(CASES["mlp"], UNSCALED, loss_scale=scale).of(role="grad_output")
        for scale in (1.0, 2.0**16)
    )
    assert max(row.lost or 0.0 for row in scaled) < 1e-3 < max(row.lost or 0.0 for row in plain)


class Names(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self):
        super().__init__()
        self.ran = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_as_on_another_device_nothing_waits_and_counts_are_the_same(monkeypatch):
    counted = []

    def both(numbers, row):
        anywhere = row.clone()
        _counting._count_anywhere(numbers, anywhere)
        _counting._count_here(numbers, row)
        counted.append(torch.equal(row, anywhere))

    monkeypatch.setitem(_counting._COUNT, "cpu", both)
    measured(CASES["mlp"], UNSCALED)
    assert counted
    assert all(counted)
    histograms, names = Histograms(), Names()
    with names:
        places = [histograms.add(torch.randn(8).to(dtype)) for dtype in WIDTHS.values()]
    assert places == [0, 1]
    assert "aten::scatter_add_" in names.ran
    assert "aten::_local_scalar_dense" not in names.ran


def test_a_selection_and_its_text():
    seen = measured(CASES["transformer"], UNSCALED)
    block = seen.of(phase="backward", role="grad_input", operation="attention")
    assert {row.module for row in block} == {"1", "2"}
    lines = str(seen).splitlines()
    assert lines[0].split()[:4] == ["module", "pass", "operation", "role"]
    assert len(lines) == 42
    assert lines[-1].endswith("more lines")
    worst = max(seen, key=lambda row: row.lost or 0.0)
    assert lines[1].split()[:3] == [worst.module, worst.phase, worst.operation]
    data = json.loads(json.dumps(block.to_dict()))["rows"]
    assert [each["flushed"] for each in data] == [row.flushed for row in block]


@pytest.mark.parametrize("policy", [UNSCALED, "mixed_float16", "mixed_bfloat16", None])
def test_nothing_changes(policy):
    model, batch = remembering()
    before = state_of(model, batch)
    assert len(observe(model, batch, mean, policy=policy)) > 0
    assert_same(before, state_of(model, batch))
    assert "forward" not in vars(model)


def test_a_region_stays_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4))
    region = prepare(model, torch.optim.SGD(model.parameters()), "mixed_float16")
    before = region.state_dict()
    observe(model, torch.ones(2, 4), mean)
    assert region.state_dict() == before


def test_what_is_refused():
    with pytest.raises(UsageError, match=r"observe needs a torch.nn.Module, got Tensor"):
        observe(torch.ones(1), None, mean)
    with pytest.raises(UsageError, match=r"observe needs a loss_fn.*of shape \(2, 1\)"):
        observe(nn.Linear(4, 1), torch.ones(2, 4), lambda model, batch: model(batch))
    with autocast("cpu"), pytest.raises(UsageError, match=r"observe needs to be called outside"):
        observe(nn.Linear(4, 1), torch.ones(2, 4), mean)
