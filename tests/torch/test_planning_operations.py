"""What a step is made of, what that costs, and the rules that follow from it."""

import math

import pytest
import torch
from torch import nn

from halfstep.core import Policy, Rules
from halfstep.torch._planning._casts import Casting
from halfstep.torch._planning._choice import Costed
from halfstep.torch._planning._costs import Cost, costs
from halfstep.torch._planning._proposals import Proposals
from halfstep.torch._planning._recording import Source, recorded
from halfstep.torch._planning._steps import Trial

BFLOAT16 = Policy.named("mixed_bfloat16")
FREE = Casting((0.0,) * 6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs)).relu_()
        return self.last(self.drop(hidden).view(-1, 8))


def loss_fn(model, batch):
    found = model(batch).flatten(0, -2)
    return nn.functional.cross_entropy(found, torch.zeros(len(found), dtype=torch.long))


def step_of(model, batch=None, loss=loss_fn):
    batch = torch.randn(2, 2, 8) if batch is None else batch
    return recorded(Trial(model, batch, loss, "cpu"), BFLOAT16)


def named(recorder):
    return [recorder.kinds[call.kind].operation.base for call in recorder.calls]


@pytest.fixture
def step():
    return step_of(Model())


def test_operations_are_those_that_rules_speak_about(step):
    found = named(step)
    assert found[:2] == ["aten::linear", "aten::layer_norm"]
    assert found[-2:] == ["aten::linear", "aten::cross_entropy_loss"]
    actions = {each.operation.base: each.action for each in step.kinds}
    assert actions["aten::linear"] == "lower"
    assert actions["aten::layer_norm"] == "keep"
    assert actions["aten::cross_entropy_loss"] == "full"
    assert actions["aten::relu_"] == ""


def test_what_reads_a_tensor_knows_who_made_it(step):
    for number, call in enumerate(step.calls[1:], 1):
        assert any(source.maker is not None and source.maker < number for source in call.sources)
    weights = [source for source in step.calls[0].sources if source.maker is None]
    assert [source.shape for source in weights] == [(2, 2, 8), (8, 8), (8,)]
    assert [source.trained for source in weights] == [False, True, True]


def test_modules_are_told(step):
    assert [call.path for call in step.calls][:2] == ["first", "norm"]
    assert step.calls[-1].path == ""


def test_calls_that_are_alike_are_one_kind():
    shared = nn.Linear(8, 8)
    step = step_of(nn.Sequential(nn.Linear(8, 8), shared, shared, nn.Linear(8, 2)))
    linear = [c.kind for c in step.calls if step.kinds[c.kind].operation.base == "aten::linear"]
    assert linear[1] == linear[2]
    # The input of the first has no gradient, and the last is narrower.
    assert len(set(linear)) == 3


def test_nothing_is_computed_in_a_low_format():
    model, batch, seen = nn.Linear(8, 2), torch.randn(4, 8), []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output))
    step_of(model, batch)
    assert torch.equal(seen[0], model(batch))


def test_the_step_leaves_everything_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model[0].weight.grad = torch.ones(8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch, drawn = torch.randn(4, 8), torch.get_rng_state()
    torch.set_rng_state(drawn)
    step_of(model, batch)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(8, 8))
    assert torch.equal(torch.get_rng_state(), drawn)


def test_examples_run_again_with_the_gradients_of_the_step(step):
    linear = step.kinds[step.calls[0].kind]
    assert set(linear.grads) == {0}
    assert linear.grads[0].shape == (2, 2, 8)
    wide, low = costs(linear, "cpu", torch.bfloat16, 0.0)
    assert wide.error == 0.0
    assert 0 < low.error < 0.05
    assert 0 < low.saved_bytes < wide.saved_bytes


def test_an_operation_that_draws_is_compared_with_the_same_draws():
    def attention(model, batch):
        read = model(batch)
        return nn.functional.scaled_dot_product_attention(read, read, read, dropout_p=0.5).sum()

    step = step_of(nn.Linear(8, 8), torch.randn(1, 2, 4, 8), attention)
    kind = next(each for each in step.kinds if each.operation.family == "attention")
    assert costs(kind, "cpu", torch.bfloat16, 0.0)[1].error < 0.05


def test_an_operation_without_a_kernel_in_a_format_cannot_run_in_it():
    def loss(model, batch):
        return torch.linalg.svdvals(model(batch)).sum()

    step = step_of(nn.Linear(8, 4), torch.randn(4, 8), loss)
    kind = next(each for each in step.kinds if "svd" in each.operation.base)
    _, low = costs(kind, "cpu", torch.bfloat16, 0.0)
    assert low.seconds == low.error == math.inf


def test_casting_takes_time_in_proportion_to_the_size():
    casting = Casting((1.0, 1.0, 1.0, 2.0, 4.0, 8.0))
    assert casting.seconds(Source(None, (2**20,), trained=False)) == 4.0
    assert casting.seconds(Source(None, (2**20,), trained=True)) == 8.0
    assert casting.seconds(Source(None, (2**21 + 2**19,), trained=False)) == 6.0
    assert casting.seconds(Source(None, (2**23,), trained=False)) == 16.0
    assert casting.seconds(Source(None, (), trained=False)) == 1.0
    assert casting.per_byte == 8.0 / 2**23


def proposed(step, prices, *, casting=FREE, budget=0.05):
    """Returns the rules that follow from what operations cost in float32 and in bfloat16."""
    found = [
        tuple(Cost(*each) if isinstance(each, tuple) else Cost(each) for each in price)
        if kind.movable and (price := prices.get(kind.operation.base, (1.0, 1.0)))
        else None
        for kind in step.kinds
    ]
    costed = Costed(step.calls, step.kinds, found, casting, budget)
    return Proposals(BFLOAT16, costed, per_byte=1.0)


def edits(proposals):
    first = next(iter(proposals.policies()))
    return {(each.target, each.where): each.action for each in first.rules.edits}


def test_where_low_is_faster_the_usual_rules_are_right(step):
    assert edits(proposed(step, {"aten::linear": (4.0, 1.0), "aten::layer_norm": (2.0, 1.0)})) == {}


def test_what_is_slower_stays_in_float32(step):
    prices = {"aten::linear": (1.0, 4.0), "aten::layer_norm": (1.0, 2.0)}
    assert edits(proposed(step, prices))["matmul", ""] == "full"


def test_what_is_far_from_float32_stays_in_it(step):
    prices = {"aten::linear": ((4.0,), (1.0, 0, 0.2))}
    assert edits(proposed(step, prices))["matmul", ""] == "full"
    assert ("matmul", "") not in edits(proposed(step, prices, budget=0.5))


def test_a_cast_that_costs_more_than_it_brings_is_left_out(step):
    prices = {"aten::linear": (2.0, 1.0), "aten::layer_norm": (1.0, 1.0)}
    assert edits(proposed(step, prices)) == {}
    assert edits(proposed(step, prices, casting=Casting((2.0,) * 6)))["matmul", ""] == "full"


def test_what_the_rules_keep_in_float32_stays_there(step):
    assert edits(proposed(step, {"aten::cross_entropy_loss": (100.0, 1.0)})) == {}


def test_calls_that_differ_have_rules_by_module(step):
    kinds = [step.calls[number].kind for number in (0, len(step.calls) - 2)]
    found = [(Cost(1.0), Cost(1.0)) if each.movable else None for each in step.kinds]
    found[kinds[0]] = (Cost(9.0), Cost(1.0))
    found[kinds[1]] = (Cost(1.0), Cost(9.0))
    proposals = Proposals(BFLOAT16, Costed(step.calls, step.kinds, found, FREE, 0.05), 1.0)
    assert edits(proposals) == {("aten::linear", "last"): "full"}


def test_memory_can_be_worth_more_than_time(step):
    prices = {"aten::linear": ((1.0, 100), (1.5, 0))}
    several = [policy.rules.edits for policy in proposed(step, prices).policies()]
    assert [each.target for each in several[0]] == ["matmul"]
    assert several[-1] == ()


def test_a_rule_says_what_was_measured(step):
    found = proposed(step, {"aten::linear": (1.0, 4.0)})
    (rule,) = next(iter(found.policies())).rules.edits
    assert rule.reason == (
        "Measured: 2 calls take 2000.000 ms in float32 and 8000.000 ms in bfloat16, casts apart."
    )


def test_what_was_measured_is_told_with_what_the_rules_say(step):
    found = proposed(step, {"aten::linear": (2.0, 1.0)})
    rows = found.measured(Rules.parse("halfstep-1 + aten::linear[where=last]=full"))
    assert [(each.module, each.rule) for each in rows[:2]] == [("first", "lower"), ("last", "full")]
    assert rows[0].inputs == "2x2x8 8x8 8"
    assert [each.gain for each in rows[:2]] == [2.0, 2.0]
