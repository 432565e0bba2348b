"""What overflows on and on runs in float32 from then on, where that was asked for."""

import copy
import warnings

import pytest
import torch
from torch import nn

from halfstep.core import Rule, subscribe
from halfstep.errors import RuleError, UsageError
from halfstep.torch import SkippedStepsWarning, WidenedRegionWarning, prepare

EYE = nn.init.eye_
INPUTS = torch.full((4, 8), 0.25)


class Block(nn.Module):
    """Sums to 8 * 0.25 * 300 * 5 * 64 * 0.25 in its second layer, which float16 cannot hold."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 64, bias=False), nn.Linear(64, 8, bias=False)
        nn.init.constant_(self.wide.weight, 300.0)
        nn.init.constant_(self.narrow.weight, 5.0)

    def forward(self, values):
        return self.narrow(torch.relu(self.wide(values)))


def overflowing(dropout=0.0):
    """Overflows forward; what follows is so small that the loss is not large."""
    last = nn.Linear(8, 1, bias=False)
    nn.init.constant_(last.weight, 1e-6)
    return nn.Sequential(Block(), nn.Dropout(dropout), last)


def steep():
    """Has gradients in the first layer that are a billion times as large as in the last."""
    layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    for layer, factor in zip(layers, (1e-4, 1300.0, 1300.0, 1300.0), strict=True):
        EYE(layer.weight).data.mul_(factor)
    return nn.Sequential(*layers)


def training(model, on_overflow="widen", lr=1e-16, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    region = prepare(model, optimizer, on_overflow=on_overflow, **settings)

    def step(inputs=INPUTS):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return region, step


def compiled_steps(times):
    model = overflowing()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-16)
    region = prepare(model, optimizer, on_overflow="widen")
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(times):
        optimizer.zero_grad()
        compiled(INPUTS).square().mean().backward()
        optimizer.step()
    return region, compiled


def test_each_model_that_is_compiled_is_compiled_anew():
    for _ in range(2):
        with pytest.warns(WidenedRegionWarning):
            region, compiled = compiled_steps(12)
        assert not region.last_step.skipped
        assert compiled(INPUTS).isfinite().all()


def repeated(step, times):
    for _ in range(times):
        step()


@pytest.mark.parametrize(
    ("build", "where", "lr"),
    [(overflowing, {"0.narrow"}, 1e-13), (steep, {"0", "1", "2"}, 1e-20)],
)
def test_a_run_that_would_stand_still_goes_on(build, where, lr):
    region, step = training(build(), lr=lr)
    with pytest.warns(WidenedRegionWarning):
        repeated(step, 12)
    losses = [step().item() for _ in range(8)]
    assert where & {each.where for each in region.widened}
    assert region.history.skipped < 14
    assert not region.last_step.skipped
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_without_it_the_same_run_stands_still():
    region, step = training(overflowing(), "skip")
    for _ in range(12):
        step()
    assert region.history.skipped == 12
    assert region.widened == ()


@pytest.mark.filterwarnings("ignore::halfstep.torch.WidenedRegionWarning")
def test_the_scale_begins_anew():
    region, step = training(steep())
    while not region.widened:
        step()
    assert region.scale == 65536.0
    assert region.history.scale_changes[-1].reason == "an operation was widened"


@pytest.mark.filterwarnings("ignore::halfstep.torch.WidenedRegionWarning")
def test_a_step_that_is_looked_into_changes_nothing():
    model = overflowing(dropout=0.25)
    region, step = training(model)
    before = copy.deepcopy(model.state_dict())
    drawn = []
    while not region.widened:
        torch.manual_seed(len(drawn))
        step()
        drawn.append(torch.rand(()))
    plain = []
    for seed in range(len(drawn)):
        torch.manual_seed(seed)
        nn.functional.dropout(torch.ones(4, 8), 0.25)
        plain.append(torch.rand(()))
    assert drawn == plain
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_bad_data_widens_nothing():
    region, step = training(nn.Linear(8, 1), lr=0.1)
    with pytest.warns(SkippedStepsWarning) as told:
        repeated(lambda: step(torch.full((4, 8), torch.nan)), 8)
    (vain,) = told
    assert "has found no rule that cures it: Linear: the input holds nan" in str(vain.message)
    assert "halfstep.torch.diagnose(model, batch, loss_fn)" in str(vain.message)
    assert region.widened == ()
    step()
    assert not region.last_step.skipped


def test_a_few_overflows_widen_nothing():
    region, step = training(
        nn.Linear(8, 1), lr=0.1, policy="mixed_float16, scale=dynamic(init_scale=1e30)"
    )
    for _ in range(30):
        step()
    assert region.history.skipped > 2
    assert region.widened == ()


def widened():
    model = overflowing()
    region, step = training(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WidenedRegionWarning)
        while not region.widened:
            step()
    return model, region


def test_it_is_in_the_policy_and_in_the_checkpoint():
    _, region = widened()
    rule = region.widened[0]
    assert rule in region.policy.rules.edits
    again, step = training(overflowing(), "skip")
    again.load_state_dict(region.state_dict())
    assert again.widened == region.widened
    assert again.policy == region.policy
    for _ in range(8):
        step()
    assert not again.last_step.skipped


def test_a_copy_has_it_too():
    model, region = widened()
    twin = copy.deepcopy(model)
    assert twin.forward.region.widened == region.widened
    assert torch.isfinite(twin(INPUTS)).all()


def test_whoever_listens_is_told():
    told = []
    unsubscribe = subscribe(lambda event, values: told.append((event, values)))
    _, region = widened()
    unsubscribe()
    assert [values["rules"] for event, values in told if event == "widened"] == [region.widened]


def test_the_warning_says_what_to_write():
    region, step = training(overflowing())
    with pytest.warns(WidenedRegionWarning, match=r"0\.narrow: matmul made inf") as caught:
        repeated(step, 8)
    (text,) = {str(each.message) for each in caught}
    policy = text.rpartition("write policy=")[2].rstrip(".")
    region.remove()
    again, step = training(overflowing(), "skip", policy=eval(policy))
    for _ in range(8):
        step()
    assert not again.last_step.skipped


def test_wrong_requests_are_refused():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="an optimizer with on_overflow='widen', got none"):
        prepare(model, on_overflow="widen")
    with pytest.raises(UsageError, match="'skip' or 'widen', got 'heal'"):
        prepare(model, on_overflow="heal")
    with pytest.raises(UsageError, match="release=True"):
        prepare(model, optimizer, masters="split", release=True, on_overflow="widen")
    region = prepare(model, optimizer)
    state = region.state_dict()
    with pytest.raises(UsageError, match="list of rules"):
        region.load_state_dict({**state, "widened": "matmul"})
    with pytest.raises(RuleError):
        region.load_state_dict({**state, "widened": [{"target": "matmul"}]})
    assert region.state_dict() == state
    assert region.widened == ()


def test_rules_of_a_checkpoint_are_rules():
    _, region = widened()
    (row, *_) = region.state_dict()["widened"]
    assert Rule.from_dict(row) == region.widened[0]
