"""The plan of a model, with a clock that says what each policy and operation takes."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.core import Candidate, Plan, Policy, StalePlanWarning
from halfstep.errors import UsageError
from halfstep.torch import autocast, plan, prepare, set_global_policy
from halfstep.torch._machine import machine
from halfstep.torch._planning import _search, _timing
from halfstep.torch._planning._search import Timed, _best
from halfstep.torch._planning._timing import Spent, alternate, at_a_glance, plainly

FLOAT32, BFLOAT16, FLOAT16 = (
    Policy.named(name) for name in ("float32", "mixed_bfloat16", "mixed_float16")
)


def loss_fn(model, batch):
    return model(batch).square().mean()


def a_model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture
def clock(monkeypatch):
    """Lets a step take what a table says of the policy's compute dtype; rules save a half."""
    seconds = {"float32": 1.0, "bfloat16": 1.0, "float16": 1.0}

    def timed(search, policies):
        distinct = list(dict.fromkeys(policies))
        return [
            Timed(each, Spent(seconds[each.compute_dtype] / (1 + bool(each.rules.edits)), 0.0), 0)
            for each in distinct
        ]

    for name in ("_timed", "_glanced"):
        monkeypatch.setattr(_search.Search, name, timed)
    return seconds


def test_where_nothing_is_faster_float32_is_the_plan(clock):
    clock.update(bfloat16=3.0, float16=9.0)
    found = plan(a_model(), torch.ones(4, 8), loss_fn, seconds=0.01)
    assert found.policy == FLOAT32
    assert found.speedup == 1.0
    assert found.measured == ()
    assert [each.seconds for each in found.candidates] == [1.0, 3.0, 3.0, 9.0, 9.0]


def test_the_fastest_policy_is_the_plan(clock):
    clock.update(bfloat16=0.5, float16=9.0)
    found = plan(a_model(), torch.ones(4, 8), loss_fn, seconds=0.01)
    assert found.policy.compute_dtype == "bfloat16"
    assert {each.operation for each in found.measured} >= {"aten::linear", "aten::relu"}
    assert {each.policy for each in found.candidates} >= {"float32", "mixed_float16"}


def test_what_takes_far_longer_is_not_looked_at_any_further(clock):
    clock.update(bfloat16=0.5, float16=9.0)
    told = []
    plan(a_model(), torch.ones(4, 8), loss_fn, seconds=0.01, tell=told.append)
    assert told == ["Timing operations in float32 and bfloat16"]


def timed(policy, seconds, saved_bytes=100, *, edits=0, spread=0.0):
    rules = policy.rules
    for place in range(edits):
        rules = rules.with_rule("softmax", "full", reason="x", where=f"m{place}")
    return Timed(policy.with_(rules=rules), Spent(seconds, spread, 16), saved_bytes)


@pytest.mark.parametrize(
    ("candidates", "best"),
    [
        ([timed(FLOAT32, 1.0), timed(BFLOAT16, 0.9)], 1),
        ([timed(FLOAT32, 1.0), timed(BFLOAT16, 1.1)], 0),
        # As fast as each other: the one that keeps less, then the one with fewer rules.
        ([timed(FLOAT32, 1.0, 100), timed(BFLOAT16, 1.005, 50)], 1),
        ([timed(FLOAT32, 2.0), timed(BFLOAT16, 1.0, edits=1), timed(BFLOAT16, 1.005)], 2),
        # Not faster by more than what the clock may be wrong: the simpler one.
        ([timed(FLOAT32, 1.0, spread=0.2), timed(BFLOAT16, 0.96, spread=0.2)], 0),
        ([timed(FLOAT32, 1.0, spread=0.02), timed(BFLOAT16, 0.96, spread=0.02)], 1),
        # However wrong it may be.
        ([timed(FLOAT32, 1.0, spread=9.0), timed(BFLOAT16, 0.9, spread=9.0)], 1),
        # Faster, but keeps more than the best that anybody would try.
        ([timed(FLOAT32, 2.0), timed(BFLOAT16, 1.0, 50), timed(BFLOAT16, 0.9, 60, edits=1)], 1),
        ([timed(FLOAT32, 2.0), timed(BFLOAT16, 1.0, 50), timed(BFLOAT16, 0.9, 50, edits=2)], 2),
    ],
)
def test_the_best_is_fast_and_small(candidates, best):
    assert _best(candidates) is candidates[best]


def test_a_model_is_left_as_it_was():
    model, batch = a_model(), torch.ones(4, 8)
    model[0].weight.grad = torch.full((8, 8), 3.0)
    before, drawn = model[0].weight.clone(), torch.get_rng_state()
    plan(model, batch, loss_fn, seconds=0.01)
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight.grad, torch.full((8, 8), 3.0))
    assert model[0].bias.grad is None
    assert torch.equal(torch.get_rng_state(), drawn)
    assert "forward" not in vars(model)


def test_a_format_without_a_kernel_is_no_candidate():
    class Refusing(nn.Linear):
        def forward(self, inputs):
            if torch.get_autocast_dtype("cpu") is torch.float16 and torch.is_autocast_enabled(
                "cpu"
            ):
                raise RuntimeError("no kernel for Half")
            return super().forward(inputs)

    told = []
    found = plan(Refusing(8, 2), torch.ones(4, 8), loss_fn, seconds=0.01, tell=told.append)
    formats = {Policy.parse(each.policy).compute_dtype for each in found.candidates}
    assert formats == {"float32", "bfloat16"}
    assert "mixed_float16 cannot run: no kernel for Half" in told


def test_a_compiled_model_is_measured_without_its_compiler():
    found = plan(torch.compile(a_model(), backend=refuse), torch.ones(4, 8), loss_fn, seconds=0.01)
    assert found.candidates


def refuse(graph, inputs):
    raise AssertionError("was compiled")


def test_a_plan_trains_what_it_was_made_for(tmp_path):
    model, path = a_model(), tmp_path / "plan.toml"
    plan(model, torch.ones(4, 8), loss_fn, seconds=0.01).save(path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    region = prepare(model, optimizer, policy=str(path))
    before = loss_fn(model, torch.ones(4, 8)).item()
    for _ in range(5):
        optimizer.zero_grad()
        loss_fn(model, torch.ones(4, 8)).backward()
        optimizer.step()
    assert loss_fn(model, torch.ones(4, 8)).item() < before
    assert region.policy == Plan.load(path).policy


def test_a_plan_from_elsewhere_says_so():
    here = machine("cpu")
    elsewhere = Plan(BFLOAT16, halfstep.core.Machine("cuda", "NVIDIA H200"))
    with pytest.warns(StalePlanWarning, match="device cpu, not cuda") as seen:
        prepare(a_model(), policy=elsewhere)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(a_model(), policy=Plan(BFLOAT16, here))
    with pytest.warns(StalePlanWarning):
        autocast("cpu", policy=elsewhere)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"budget": 0}, "budget above zero, got 0"),
        ({"seconds": "long"}, "seconds above zero, got 'long'"),
        ({"model": 3}, "needs a torch.nn.Module, got int"),
        ({"loss_fn": lambda model, batch: model(batch)}, "a loss of one number"),
        ({"loss_fn": lambda model, batch: model(batch).mean().detach()}, "a loss with a gradient"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, says):
    given = {"model": a_model(), "batch": torch.ones(4, 8), "loss_fn": loss_fn} | change
    with pytest.raises(UsageError, match=says):
        plan(**given)


@pytest.mark.parametrize("part", [slice(None), 0])
def test_a_model_that_is_prepared_is_refused(part):
    model = a_model()
    prepare(model[part] if part == 0 else model, policy=BFLOAT16)
    with pytest.raises(UsageError, match="nobody has prepared, in whole or in part"):
        plan(model, torch.ones(4, 8), loss_fn)


def test_a_global_policy_is_refused():
    set_global_policy("mixed_bfloat16")
    try:
        with pytest.raises(UsageError, match=r'set_global_policy\("float32"\)'):
            plan(a_model(), torch.ones(4, 8), loss_fn)
    finally:
        set_global_policy("float32")


@pytest.mark.parametrize("lower", [torch.autocast, autocast])
def test_an_autocast_in_the_loss_is_refused(lower):
    def lowered(model, batch):
        with lower("cpu", dtype=torch.bfloat16):
            return loss_fn(model, batch)

    with pytest.raises(UsageError, match="leaves the formats to it"):
        plan(a_model(), torch.ones(4, 8), lowered)


def test_a_checkpoint_that_sees_that_it_is_looked_at_has_a_plan(clock):
    class Kept(nn.Sequential):
        def forward(self, inputs):
            return checkpoint(super().forward, inputs, use_reentrant=False)

    clock.update(bfloat16=0.5, float16=9.0)
    told = []
    model = Kept(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    found = plan(model, torch.ones(4, 8), loss_fn, seconds=0.01, tell=told.append)
    assert found.policy == BFLOAT16
    assert any("cannot be timed one by one" in each for each in told)


def test_a_transform_of_a_function_is_left_as_it_is():
    class Mapped(nn.Linear):
        def forward(self, inputs):
            return torch.func.vmap(super().forward)(inputs)

    assert plan(Mapped(8, 2), torch.ones(4, 8), loss_fn, seconds=0.01).candidates


def test_a_glance_is_the_shorter_of_two(monkeypatch):
    now, seconds = [0.0], iter([9.0, 9.0, 2.0, 9.0, 1.0, 9.0])
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: now[0])

    def call():
        now[0] += next(seconds)

    assert at_a_glance(plainly(call), "cpu") == Spent(1.0, 0.0)
    assert at_a_glance(plainly(call), "cpu", limit=5.0) == Spent(9.0, 0.0)
    assert list(seconds) == []


def test_calls_take_turns(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: now[0])

    def taking(name, seconds):
        def call():
            order.append(name)
            now[0] += seconds

        return plainly(call)

    spent = alternate([taking("a", 1.0), taking("b", 3.0)], "cpu", 0.0, least=3)
    assert spent == [Spent(1.0, 0.0, 3), Spent(3.0, 0.0, 3)]
    # Each reading warms up with one call.
    assert order == ["a", "a", "b", "b"] * 4


def test_a_quick_call_is_read_many_at_a_time(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: now[0])

    def call():
        calls.append(1)
        now[0] += 0.0001

    (spent,) = alternate([plainly(call)], "cpu", 0.0, least=3)
    assert spent.seconds == pytest.approx(0.0001)
    assert len(calls) == 2 + 3 * 31


def test_what_was_looked_at_only_is_told_as_if_it_had_been_timed_with_the_others(monkeypatch):
    def glanced(search, policies):
        return [timed(each, 2.0 if each == FLOAT32 else 10.0) for each in policies]

    def timed_later(search, policies):
        return [timed(each, 1.0) for each in policies]

    monkeypatch.setattr(_search.Search, "_glanced", glanced)
    monkeypatch.setattr(_search.Search, "_timed", timed_later)
    found = plan(a_model(), torch.ones(4, 8), loss_fn, seconds=0.01)
    assert [each.seconds for each in found.candidates] == [1.0, 5.0, 5.0, 5.0, 5.0]


def test_candidates_say_what_was_timed():
    assert timed(BFLOAT16, 0.5).candidate == Candidate("mixed_bfloat16", 0.5, 0.0, 100)
    (edit,) = Policy.parse(timed(BFLOAT16, 0.5, edits=1).candidate.policy).rules.edits
    assert edit.where == "m0"
