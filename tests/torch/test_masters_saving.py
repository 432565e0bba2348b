"""Masters in checkpoints: from any step, loaded in any order, a run goes on bit for bit."""

import copy
import io

import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch import (
    float32_state_dict,
    keep_masters,
    load,
    load_float32_state_dict,
    prepare,
    save,
)
from halfstep.torch._masters._kept import kept_tensors, true_value

MAKERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}
POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16, param_dtype=float16"}
STEPS = 6


class Run:
    """A model in training, from the same beginning each time."""

    def __init__(self, kind, dtype, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.optimizer = MAKERS[kind](self.model.parameters())
        self.region = prepare(self.model, self.optimizer, POLICIES[dtype], masters="split")

    def step(self, number):
        torch.manual_seed(1000 + number)
        inputs = torch.randn(5, 8)
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "region": self.region}

    def state(self):
        return {name: part.state_dict() for name, part in self.parts().items()}

    def bits(self):
        values = [true_value(each) for each in self.model.parameters()]
        for each in self.model.parameters():
            state = self.optimizer.state[each]
            values += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return values


def written(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(one, other):
    for left, right in zip(one.bits(), other.bits(), strict=True):
        assert left.dtype is right.dtype
        assert torch.equal(left, right)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("stepped", [0, 3])
def test_a_run_goes_on_from_a_checkpoint(kind, dtype, order, at, stepped):
    whole = Run(kind, dtype)
    for number in range(at):
        whole.step(number)
    state = written(whole.state())
    for number in range(at, STEPS):
        whole.step(number)
    again = Run(kind, dtype, seed=7)
    for number in range(stepped):
        again.step(number)
    names = ["model", "optimizer", "region"]
    for name in names if order == "model first" else names[::-1]:
        again.parts()[name].load_state_dict(state[name])
    for number in range(at, STEPS):
        again.step(number)
    assert_same(whole, again)


def test_a_checkpoint_on_disk(tmp_path):
    whole = Run("adam", "bfloat16")
    whole.step(0)
    save(whole.state(), tmp_path / "last.pt")
    again = Run("adam", "bfloat16", seed=3)
    for name, part in load(tmp_path / "last.pt").items():
        again.parts()[name].load_state_dict(part)
    assert_same(whole, again)


def test_state_is_not_rounded():
    run = Run("adam", "bfloat16")
    run.step(0)
    weight = run.model[0].weight
    run.optimizer.state[weight]["exp_avg_sq"].fill_(1e-9 * (1 + 2.0**-20))
    state = written(run.optimizer.state_dict())
    run.optimizer.load_state_dict(state)
    kept = run.optimizer.state[weight]["exp_avg_sq"]
    assert kept.dtype is torch.float32
    assert torch.equal(kept, state["state"][0]["exp_avg_sq"])


def test_the_state_of_a_float32_optimizer_loads():
    torch.manual_seed(0)
    plain = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
    plain(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    model = copy.deepcopy(plain)
    split = torch.optim.Adam(model.parameters(), lr=1e-3)
    prepare(model, split, "mixed_bfloat16", masters="split")
    split.load_state_dict(written(optimizer.state_dict()))
    assert torch.equal(true_value(model.weight), plain.weight)
    first, second = split.state[model.weight], optimizer.state[plain.weight]
    assert torch.equal(first["exp_avg_sq"], second["exp_avg_sq"])


def test_a_remainder_of_another_dtype_is_refused():
    state = Run("adam", "bfloat16").optimizer.state_dict()
    parameters = [nn.Parameter(torch.ones(shape).half()) for shape in ((16, 8), (16,), (3, 16), 3)]
    optimizer = torch.optim.Adam(parameters)
    keep_masters(optimizer)
    with pytest.raises(UsageError) as error:
        optimizer.load_state_dict(state)
    assert str(error.value) == (
        "load_state_dict() needs 'float16_remainder' for a parameter in float16, got "
        "'bfloat16_remainder'. Prepare the model with the param_dtype that the checkpoint was "
        "saved with."
    )


def test_float16_keeps_whole_masters_where_it_must():
    tiny, usual = (nn.Parameter(torch.full((4,), value)) for value in (1.234e-6, 0.1234))
    optimizer = torch.optim.SGD([tiny, usual], lr=0.1)
    keep_masters(optimizer, param_dtype="float16")
    (group,) = optimizer.state_dict()["param_groups"]
    kept = group["halfstep_masters"]
    assert [set(kept[place]) for place in (0, 1)] == [{"float16_master"}, {"float16_remainder"}]
    assert [each.dtype for each in kept_tensors(optimizer)] == [torch.float32, torch.int16]


def test_state_dicts_do_not_change_the_optimizer():
    run = Run("adam", "bfloat16")
    run.step(0)
    weight = run.model[0].weight
    before = set(run.optimizer.state[weight])
    assert set(run.optimizer.state_dict()["state"][0]) == before | {"bfloat16_remainder"}
    assert set(run.optimizer.state[weight]) == before


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, index):
        return self.head(self.norm(self.table(index)))


def test_all_bits_leave_and_return():
    torch.manual_seed(0)
    plain = Tied()
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer, "mixed_bfloat16", masters="split")
    state = float32_state_dict(model)
    assert model.table.weight.dtype is torch.bfloat16
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    other = Tied()
    prepare(other, torch.optim.SGD(other.parameters(), lr=0.1), "mixed_bfloat16", masters="split")
    load_float32_state_dict(other, written(state))
    again = float32_state_dict(other)
    assert all(torch.equal(again[name], value) for name, value in expected.items())


def test_a_part_of_a_state_dict_loads():
    model = nn.Linear(2, 2)
    keep_masters(torch.optim.SGD(model.parameters(), lr=0.1), param_dtype="bfloat16")
    weight = torch.full((2, 2), 1 + 2.0**-20)
    result = load_float32_state_dict(model, {"weight": weight, "other": weight}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["bias"], ["other"])
    assert torch.equal(true_value(model.weight), weight)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_checkpoint_may_be_loaded_before_prepare(kind, dtype, at, order):
    run = Run(kind, dtype)
    for number in range(at):
        run.step(number)
    state = written(run.state())
    again = Run.__new__(Run)
    torch.manual_seed(7)
    again.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    again.optimizer = MAKERS[kind](again.model.parameters())
    for name in ("model", "optimizer") if order == "model first" else ("optimizer", "model"):
        getattr(again, name).load_state_dict(state[name])
    again.region = prepare(again.model, again.optimizer, POLICIES[dtype], masters="split")
    again.region.load_state_dict(state["region"])
    for number in range(at, STEPS):
        run.step(number)
        again.step(number)
    assert_same(run, again)
    assert "halfstep_masters" not in again.optimizer.param_groups[0]


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, inputs):
        return self.used(inputs)


def test_a_layer_that_is_not_used_has_no_state_in_a_plain_optimizer():
    torch.manual_seed(0)
    model = Unused()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepare(model, optimizer, "mixed_bfloat16", masters="split")
    model(torch.rand(4, 8)).sum().backward()
    optimizer.step()
    state = written({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    plain = Unused()
    plain.load_state_dict(state["model"])
    other = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    other.load_state_dict(state["optimizer"])
    assert not other.state[plain.idle.weight]
    sum(each(torch.rand(4, 8)).sum() for each in (plain.used, plain.idle)).backward()
    other.step()
    third = Unused()
    third.load_state_dict(state["model"])
    last = torch.optim.AdamW(third.parameters(), lr=1e-3)
    last.load_state_dict(state["optimizer"])
    prepare(third, last, "mixed_bfloat16", masters="split")
    assert torch.equal(true_value(third.idle.weight), before["idle.weight"])


@pytest.mark.parametrize("dtype", POLICIES)
@pytest.mark.parametrize("loaded", ["before", "after"])
@pytest.mark.parametrize("at", [0, 3])
def test_float32_parameters_take_all_bits_of_a_checkpoint(at, loaded, dtype):
    run = Run("adam", dtype)
    for number in range(at):
        run.step(number)
    state = written(run.state())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.load_state_dict(state["model"])
    if loaded == "after":
        prepare(model, optimizer, "mixed_bfloat16")
    optimizer.load_state_dict(state["optimizer"])
    if loaded == "before":
        prepare(model, optimizer, "mixed_bfloat16")
    for one, other in zip(model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(one, true_value(other))
    model(torch.rand(3, 8)).sum().backward()
    optimizer.step()


def test_missing_bits_of_other_parameters_are_refused():
    run = Run("adam", "bfloat16")
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    prepare(model, optimizer, "mixed_bfloat16")
    with pytest.raises(UsageError) as caught:
        optimizer.load_state_dict(run.optimizer.state_dict())
    assert str(caught.value) == (
        "load_state_dict() needs the parameters of the checkpoint, of which it has the missing "
        "bits (bfloat16_remainder), got others. Load the state dict of the model before that of "
        "the optimizer, or prepare it with masters='split'."
    )


def test_masters_that_loading_has_rounded_are_refused():
    torch.manual_seed(0)
    model = nn.Linear(8, 3).bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    keep_masters(optimizer)
    model(torch.rand(4, 8).bfloat16()).sum().backward()
    optimizer.step()
    other = torch.optim.Adam(nn.Linear(8, 3).bfloat16().parameters(), lr=1e-3)
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(UsageError) as caught:
        keep_masters(other)
    assert str(caught.value) == (
        "Masters need a state dict that is loaded after prepare or keep_masters, got one loaded "
        "before: PyTorch has rounded all of it to bfloat16. Make the optimizer anew, call "
        "keep_masters(optimizer), and load the state dict then."
    )
    assert "step" not in vars(other)
    assert not kept_tensors(other)
