"""Models of other kinds, what is said of their optimizers, and what is refused."""

import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep import Exponents
from halfstep.errors import PolicyError, UsageError
from halfstep.torch import keep_masters, lost_updates, prepare, ranges, set_global_policy
from halfstep.torch._observing._families import families_of
from tests.torch.stepping import CASES

OTHER = nn.Linear(3, 1)


def summed(model, batch):
    return model(batch).sum()


def keeping():
    """Returns a model that keeps a tensor with a history, which cannot be copied."""
    model = nn.Linear(3, 1)
    model.kept = model.weight * 2
    return model


def role(found, module, name):
    return next(row for row in found.rows if (row.module, row.role) == (module, name))


def test_a_module_that_is_called_twice_counts_twice():
    model = nn.Linear(3, 3)
    found = ranges(model, torch.ones(4, 3), lambda model, batch: summed(model, model(batch)))
    assert role(found, "Linear", "output").reference.total == 24
    assert role(found, "Linear", "grad_weight").reference.total == 12


def test_tied_weights_are_those_of_the_module_that_comes_first():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    found = ranges(model, torch.ones(4, 3), summed)
    weights = [row.module for row in found.rows if row.role == "grad_weight"]
    assert weights == ["0"]


def test_outputs_without_a_gradient_and_sparse_gradients():
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.LSTM(4, 4, batch_first=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.tensor([[1, 2, 2]])
    for policy in (None, "mixed_float16"):
        found = ranges(
            model,
            batch,
            lambda model, batch: model(batch)[0].square().sum(),
            policy=policy,
            optimizer=optimizer,
        )
        assert role(found, "0", "grad_weight").reference.total == 12
        assert role(found, "1", "grad_output").reference.total == 12
        assert dict(found.updates)["0.weight"] == 0.0


class Recomputing(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.inner, self.reentrant = nn.Linear(3, 3), reentrant

    def forward(self, inputs):
        return checkpoint(self.inner, inputs, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_counts_once(reentrant):
    batch = torch.randn(4, 3, requires_grad=True)
    found = ranges(Recomputing(reentrant=reentrant), batch, summed)
    assert role(found, "inner", "output").reference.total == 12
    assert role(found, "inner", "grad_output").reference == Exponents.of([1.0] * 12)
    assert role(found, "inner", "grad_input").reference.total == 12
    assert batch.grad is None


def test_compiled_models_are_seen_as_they_are_written():
    case = CASES["mlp"]
    plain = ranges(case.model(), case.batch(), case.loss, policy="mixed_float16")
    compiled = torch.compile(case.model(), backend="eager")
    assert ranges(compiled, case.batch(), case.loss, policy="mixed_float16") == plain


def test_a_part_that_is_a_region_is_seen_inside():
    case = CASES["mlp"]
    model = case.model()
    prepare(model[2], policy="mixed_float16, scale=static(1024.0)")
    found = ranges(model, case.batch(), case.loss)
    assert found.form == "float16"
    assert role(found, "0", "output").form == "float32"
    whole = prepare(case.model(), policy="mixed_float16")
    assert whole.history.steps == 0


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_the_inside_of_a_region_is_in_its_format(policy):
    case = CASES["mlp"]
    found = ranges(case.model(), case.batch(), case.loss, policy=policy)
    forms = {row.form for row in found.rows if row.role in ("output", "grad_output")}
    assert forms == {policy.removeprefix("mixed_")}
    assert role(found, "0", "weight").form == "float32"


def test_a_global_policy_is_followed():
    case = CASES["mlp"]
    expected = ranges(case.model(), case.batch(), case.loss, policy="mixed_float16")
    set_global_policy("mixed_float16")
    try:
        model = case.model()
        assert ranges(model, case.batch(), case.loss) == expected
        case.loss(model, case.batch()).backward()
        assert ranges(model, case.batch(), case.loss) == expected
    finally:
        set_global_policy("float32")


def test_bfloat16_needs_no_scale_and_float8_one_for_each_tensor():
    case = CASES["transformer"]
    found = ranges(case.model(), case.batch(), case.loss, policy="mixed_bfloat16")
    assert (found.power, found.outside) == (0, ())
    assert "GradScaler" not in str(found)
    eight = found.to_dict()["rows"][0]["windows"]["float8_e4m3fn"]
    assert eight["lowest"] <= eight["highest"]
    assert not found.window(form="float8_e4m3fn")


def test_values_that_no_scale_fits_get_a_rule():
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 2))
    nn.init.constant_(model[0].weight, 300.0)
    found = ranges(model, torch.full((1, 64), 4.0), lambda model, batch: model(batch).mean() / 1e6)
    assert found.outside == ("0", "1")
    assert [each.where for each in found.changes[0].rules] == ["0", "1"]
    assert role(found, "0", "output").reference.overflowed("float16") == 1.0


def gradients(case, **options):
    model = case.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, **options)
    return model, optimizer


def test_updates_that_are_lost_are_those_of_the_next_step():
    case = CASES["mlp"]
    model = case.model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batch = case.batch()[0].bfloat16(), case.batch()[1]

    def loss_fn(model, batch):
        dtype = next(model.parameters()).dtype
        return case.loss(model, (batch[0].to(dtype), batch[1]))

    found = ranges(model, batch, loss_fn, optimizer=optimizer)
    loss_fn(model, batch).backward()
    with lost_updates(optimizer, model) as lost:
        optimizer.step()
    assert dict(found.updates) == lost.fractions
    assert max(lost.fractions.values()) > 0.5
    assert "updates that change nothing" in str(found)


def test_adam_in_half_precision_loses_squares_and_its_eps():
    case = CASES["mlp"]
    model = case.model().half()
    optimizer = torch.optim.Adam(model.parameters())

    def loss_fn(model, batch):
        dtype = next(model.parameters()).dtype
        return case.loss(model, (batch[0].to(dtype), batch[1])) / case.factor

    found = ranges(model, case.batch(), loss_fn, optimizer=optimizer)
    loss_fn(model, case.batch()).backward()
    for moment, each in zip(found.moments, model.parameters(), strict=True):
        there = each.grad[each.grad != 0].double()
        zero = ((1 - 0.999) * there.square()).half() == 0
        assert moment.vanishing == pytest.approx(zero.double().mean().item(), abs=1e-3)
        assert (moment.form, moment.eps_vanishes) == ("float16", True)
    assert max(each.vanishing for each in found.moments) > 0.1
    assert "eps=1e-08 is zero there" in str(found)


def test_adam_with_float32_state_loses_neither():
    case = CASES["mlp"]
    for model in (case.model(), case.model().bfloat16()):
        optimizer = torch.optim.Adam(model.parameters())
        keep_masters(optimizer)
        found = ranges(
            model,
            case.batch(),
            lambda model, batch: case.loss(
                model, (batch[0].to(next(model.parameters()).dtype), batch[1])
            ),
            optimizer=optimizer,
        )
        assert {each.form for each in found.moments} == {"float32"}
        assert not any(each.vanishing or each.eps_vanishes for each in found.moments)


def test_only_an_adam_has_moments():
    case, model = CASES["mlp"], CASES["mlp"].model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert ranges(model, case.batch(), case.loss, optimizer=optimizer).moments == ()


def test_all_of_it_is_plain_data():
    case = CASES["mlp"]
    found = ranges(case.model(), case.batch(), case.loss)
    data = found.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["rows"][0]["reference"] == found.rows[0].reference.to_dict()
    assert data["power"] == found.power


@pytest.mark.parametrize(
    ("module", "families"),
    [
        (nn.Linear(1, 1), ("matmul",)),
        (nn.ConvTranspose2d(1, 1, 1), ("convolution",)),
        (nn.LSTM(1, 1), ("recurrent",)),
        (nn.BatchNorm1d(1), ("normalisation",)),
        (nn.ReLU(), ("pointwise",)),
        (nn.PReLU(), ("matmul", "pointwise")),
    ],
)
def test_families(module, families):
    assert families_of(module) == families


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"loss_fn": lambda model, batch: 1.0}, "a loss of one number, got float. Return"),
        (
            {"loss_fn": lambda model, batch: model(batch)},
            "got a tensor of shape (5, 1) in",
        ),
        (
            {"loss_fn": lambda model, batch: torch.ones(())},
            "with a gradient, got one without",
        ),
        ({"loss_fn": lambda model, batch: OTHER(batch).sum()}, "got one of something else. Write"),
        ({"model": nn.ReLU()}, "parameters to train, got ReLU without any that"),
        ({"model": "model"}, "a torch.nn.Module, got str"),
        ({"optimizer": "Adam"}, "takes one step at a time, got str. Pass"),
        ({"optimizer": torch.optim.LBFGS(OTHER.parameters())}, "got LBFGS. Pass"),
        ({"model": keeping()}, "a model that can be copied, got Linear: Only Tensors created"),
    ],
)
def test_what_makes_no_step_is_refused(arguments, text):
    given = {"model": nn.Linear(3, 1), "batch": torch.ones(5, 3), "loss_fn": summed} | arguments
    with pytest.raises(UsageError) as caught:
        ranges(given.pop("model"), given.pop("batch"), given.pop("loss_fn"), **given)
    assert text in str(caught.value)


def test_policies_that_cannot_be_followed_are_refused():
    with pytest.raises(PolicyError, match="Did you mean 'mixed_float16'"):
        ranges(nn.Linear(3, 1), torch.ones(5, 3), summed, policy="fp16")


def test_data_that_is_stored_in_another_format_is_not_what_is_computed_in():
    model, data = nn.Linear(4, 2), torch.ones(3, 4, dtype=torch.float16)

    def loss_fn(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch).sum()

    assert ranges(model, data, loss_fn).form == "bfloat16"
