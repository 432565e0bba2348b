"""What a model may return or keep: anything, and each tensor of it leaves the region."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from halfstep.torch import prepare

FLOAT32 = "compute_dtype=float32"
FLOAT16 = "compute_dtype=float16,scale=static(256.0)"
POLICIES = [FLOAT32, FLOAT16, "mixed_bfloat16", "float32"]


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclasses.dataclass
class Changeable:
    one: Any
    other: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    one: Any
    other: Any = None


class Custom:
    def __init__(self, one, other):
        self.one, self.other = one, other


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)
        self.make = make

    def forward(self, values):
        return self.make(self.first(values), self.second(values))


@dataclasses.dataclass(frozen=True)
class Form:
    """How two tensors are put into what a model returns, and found in it again."""

    make: Any
    get: Any


def both(out):
    return out.one, out.other


FORMS = {
    "tensor": Form(lambda a, b: a + b, lambda out: (out,)),
    "tuple": Form(lambda a, b: (a, b), tuple),
    "list": Form(lambda a, b: [a, b], tuple),
    "dict": Form(lambda a, b: {"a": a, "b": b}, lambda out: tuple(out.values())),
    "ordered": Form(
        lambda a, b: collections.OrderedDict(a=a, b=b), lambda out: tuple(out.values())
    ),
    "defaulting": Form(
        lambda a, b: collections.defaultdict(list, a=a, b=b), lambda out: tuple(out.values())
    ),
    "wrapped": Form(
        lambda a, b: Custom(collections.UserList([a]), b), lambda out: (*out.one, out.other)
    ),
    "named": Form(Pair, both),
    "dataclass": Form(Changeable, both),
    "frozen": Form(Frozen, both),
    "object": Form(Custom, both),
    "nested": Form(
        lambda a, b: {"x": [(a, None), Pair(3, Frozen(b, "text"))], "y": torch.float16},
        lambda out: (out["x"][0][0], out["x"][1].other.one),
    ),
    "normal": Form(
        lambda a, b: Normal(a, b.exp()), lambda out: (out.loc, out.scale, out.entropy())
    ),
    "independent": Form(
        lambda a, b: Independent(Normal(a, b.exp()), 1),
        lambda out: (out.mean, out.log_prob(torch.ones(3))),
    ),
    "categorical": Form(
        lambda a, b: Categorical(logits=a * b), lambda out: (out.logits, out.entropy())
    ),
    "packed": Form(
        lambda a, b: pack_padded_sequence(
            torch.stack([a, b]), torch.tensor([5, 3]), batch_first=True
        ),
        lambda out: (pad_packed_sequence(out)[0],),
    ),
}


def run(form, policy):
    model = Returning(form.make)
    if policy:
        prepare(model, policy=policy)
    values = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = model(values)
    sum(each.square().sum() * 1e-3 for each in form.get(out)).backward()
    return out, [values.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_an_output_stays(form, policy):
    form = FORMS[form]
    (plain, expected), (out, got) = run(form, None), run(form, policy)
    assert type(out) is type(plain)
    for one, other in zip(form.get(plain), form.get(out), strict=True):
        assert other.dtype is torch.float32
        assert other.requires_grad
        torch.testing.assert_close(other, one, atol=0.03, rtol=0.03)
    for one, other in zip(expected, got, strict=True):
        assert ((one - other).abs().max() / one.abs().max()).item() < 0.05


def test_a_factory_of_defaults_stays():
    out, _ = run(FORMS["defaulting"], FLOAT16)
    assert out["absent"] == []


def test_what_holds_no_tensor_stays_the_same_object():
    plain, listing = Custom(1, "text"), [1, 2]
    model = Returning(lambda a, b: (a, plain, listing, None, 3, "text", {1, 2}, torch.float16))
    prepare(model, policy=FLOAT16)
    out = model(torch.ones(2, 6))
    assert out[1] is plain
    assert out[2:] == ([1, 2], None, 3, "text", {1, 2}, torch.float16)


def test_a_dict_keeps_its_order():
    model = Returning(lambda a, b: {"z": b, "a": 3, "m": a})
    prepare(model, policy=FLOAT16)
    assert list(model(torch.ones(2, 6))) == ["z", "a", "m"]


@pytest.mark.parametrize("policy", [FLOAT32, FLOAT16])
def test_one_tensor_returned_twice_is_counted_twice(policy):
    _, expected = run(Form(lambda a, b: (a, a), lambda out: (out[0], 3 * out[1])), None)
    _, got = run(Form(lambda a, b: (a, a), lambda out: (out[0], 3 * out[1])), policy)
    for one, other in zip(expected[:2], got[:2], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0.01)
    assert expected[3] is None
    assert got[3] is None


def test_an_object_that_refers_to_itself():
    def make(a, b):
        made = Custom(a, b)
        made.itself = made
        return made

    model = Returning(make)
    prepare(model, policy=FLOAT16)
    out = model(torch.ones(2, 6))
    assert out.itself is out
    assert out.one.dtype is torch.float32


def test_an_output_of_transformers():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    model = Returning(lambda a, b: outputs.CausalLMOutput(loss=a.mean(), hidden_states=(b, a)))
    prepare(model, policy=FLOAT16)
    out = model(torch.ones(2, 6))
    assert type(out) is outputs.CausalLMOutput
    assert list(out) == ["loss", "hidden_states"]
    assert out.loss is out["loss"]
    assert out[0].dtype is out.hidden_states[1].dtype is torch.float32
    out.loss.backward()
    torch.testing.assert_close(model.first.bias.grad, torch.full((3,), 1 / 3), atol=1e-3, rtol=0)


@pytest.mark.parametrize("policy", [FLOAT16, "mixed_bfloat16"])
def test_a_language_model_of_transformers_trains_as_without(policy):
    transformers = pytest.importorskip("transformers")

    def losses(policy):
        torch.manual_seed(0)
        size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 11, "n_positions": 8}
        config = transformers.GPT2Config(
            **size, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if policy:
            prepare(model, optimizer, policy)
        words = torch.arange(16).reshape(2, 8) % 5
        for _ in range(10):
            optimizer.zero_grad()
            out = model(input_ids=words, labels=words)
            out.loss.backward()
            optimizer.step()
            yield out.loss.item()

    expected, got = [*losses(None)], [*losses(policy)]
    assert expected[-1] < 0.7 * expected[0]
    assert got == pytest.approx(expected, abs=0.05)


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 3)

    def forward(self, values, targets):
        return nn.functional.cross_entropy(self.inner(values), targets)


@pytest.mark.parametrize("factor", [1e-6, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_computed_inside(policy, factor):
    def gradient(policy):
        model = WithLoss()
        if policy:
            prepare(model, policy=policy)
        loss = model(torch.ones(4, 6) * torch.arange(4)[:, None], torch.arange(4) % 3)
        assert loss.dtype is torch.float32
        (loss * factor).backward()
        return model.inner.weight.grad

    expected = gradient(None)
    assert ((gradient(policy) - expected).norm() / expected.norm()).item() < 0.01


@pytest.mark.parametrize("policy", [FLOAT16, "mixed_bfloat16", FLOAT32])
def test_other_dtypes_leave_as_they_are(policy):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.complex = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.register_buffer("count", torch.arange(3))

        def forward(self):
            return self.weight * 2, self.wide * 2, self.complex * 2j, self.count, self.count > 1

    model = Other()
    prepare(model, policy=policy)
    out = model()
    kinds = [torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool]
    assert [each.dtype for each in out] == kinds
    (out[0].sum() + out[1].sum() + out[2].imag.sum()).backward()
    assert model.weight.grad.tolist() == [2.0] * 3
    assert model.wide.grad.dtype is torch.float64
    assert model.wide.grad.tolist() == [2.0] * 3
    assert model.complex.grad.tolist() == [2.0 + 0.0j] * 3


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32", FLOAT32])
def test_the_output_dtype_is_the_one_of_the_policy(policy):
    model = WithLoss()
    prepare(model.inner, policy=f"{policy},output_dtype=bfloat16")
    out = model.inner(torch.ones(2, 6))
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert model.inner.weight.grad.dtype is torch.float32


def test_an_output_without_a_gradient_is_cast_too():
    model = Returning(lambda a, b: (a.detach().half(), a, torch.ones(2, dtype=torch.bfloat16)))
    prepare(model, policy=FLOAT16)
    out = model(torch.ones(2, 6))
    assert [each.dtype for each in out] == [torch.float32] * 3
    assert [each.requires_grad for each in out] == [False, True, False]


def test_an_argument_that_is_returned_has_a_true_gradient():
    model = Returning(lambda a, b: a)
    model.forward = lambda values, other: (values, other["more"][0], model.first(values))
    prepare(model, policy=FLOAT16)
    values, other = (torch.ones(2, 6, requires_grad=True) for _ in range(2))
    out = model(values, other={"more": [other]})
    (out[0].sum() + 2 * out[1].sum()).backward()
    assert torch.equal(values.grad, torch.ones(2, 6))
    assert torch.equal(other.grad, torch.full((2, 6), 2.0))
    assert model.first.weight.grad is None


def test_a_parameter_that_is_returned_is_trained_outside():
    model = Returning(lambda a, b: a)
    model.forward = lambda values: (model.first(values), model.second.weight)
    prepare(model, policy=FLOAT16)
    out = model(torch.ones(2, 6))
    out[1].square().sum().backward()
    assert torch.equal(model.second.weight.grad, 2 * model.second.weight)


KEPT = {
    "tensor": (lambda a: a, lambda kept: kept),
    "list": (lambda a: [a, 3], lambda kept: kept[0]),
    "dict": (lambda a: {"aux": a, "n": 3}, lambda kept: kept["aux"]),
    "tuple": (lambda a: (3, a), lambda kept: kept[1]),
    "named": (lambda a: Pair(a, 3), lambda kept: kept.one),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KEPT)
def test_an_attribute_set_in_forward_leaves_too(kind, policy):
    make, get = KEPT[kind]

    class Auxiliary(Returning):
        def forward(self, values):
            self.aux = make(self.second(values).square().mean())
            return self.first(values)

    def gradients(policy):
        model = Auxiliary(None)
        if policy:
            prepare(model, policy=policy)
        for _ in range(2):
            out = model(torch.ones(2, 6))
            aux = get(model.aux)
            (out.square().mean() * 1e-3 + aux).backward()
        assert type(model.aux) is type(make(aux))
        return aux, [parameter.grad for parameter in model.parameters()]

    (kept, expected), (aux, got) = gradients(None), gradients(policy)
    # A region that has no boundary leaves attributes as they are.
    assert policy == "mixed_bfloat16" or aux.dtype is torch.float32
    torch.testing.assert_close(aux.float(), kept, atol=0.01, rtol=0.01)
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, atol=1e-3, rtol=0.02)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_attribute_that_a_hook_sets_leaves_too(policy):
    def gradient(policy):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
        model[0].aux = None
        model[0].register_forward_hook(
            lambda module, given, out: setattr(module, "aux", out.square().mean())
        )
        if policy:
            prepare(model, policy=policy)
        for _ in range(2):
            model.zero_grad()
            out = model(torch.ones(2, 6))
            (out.sum() * 1e-3 + model[0].aux).backward()
        return model[0].weight.grad

    torch.testing.assert_close(gradient(policy), gradient(None), atol=1e-3, rtol=0.02)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)
        self.layer.aux = None

    def forward(self, values):
        out = self.layer(values)
        self.layer.aux = out.square().mean()
        return out


@pytest.mark.parametrize("policy", [FLOAT32, FLOAT16, "mixed_bfloat16", "float32"])
def test_an_attribute_of_a_layer_that_was_none(policy):
    def gradient(policy):
        model = Router()
        if policy:
            prepare(model, policy=policy)
        out = model(torch.ones(2, 6))
        (out.sum() * 1e-3 + model.layer.aux).backward()
        return model.layer.weight.grad

    torch.testing.assert_close(gradient(policy), gradient(None), atol=1e-3, rtol=0.02)


class Stateful(nn.Module):
    def __init__(self, detached):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(6, 4)
        self.state = None
        self.detached = detached

    def forward(self, values):
        out, self.state = self.lstm(values, self.state)
        if self.detached:
            self.state = tuple(each.detach() for each in self.state)
        return out


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("detached", [True, False])
def test_a_state_kept_from_call_to_call(detached, policy):
    def gradients(policy):
        model = Stateful(detached)
        if policy:
            prepare(model, policy=policy)
        generator = torch.Generator().manual_seed(0)
        outs = [model(torch.randn(3, 2, 6, generator=generator)) for _ in range(3)]
        (outs[-1].square().mean() * 1e-4).backward()
        return [parameter.grad for parameter in model.parameters()]

    for one, other in zip(gradients(None), gradients(policy), strict=True):
        assert ((one - other).abs().max() / one.abs().max()).item() < 0.05


@pytest.mark.parametrize("policy", [FLOAT32, FLOAT16, "mixed_bfloat16"])
def test_a_packed_sequence_through_an_lstm(policy):
    def gradients(policy):
        torch.manual_seed(0)
        model = nn.LSTM(6, 4, bidirectional=True)
        if policy:
            prepare(model, policy=policy)
        values = torch.randn(5, 2, 6, requires_grad=True)
        out, (hidden, _) = model(pack_padded_sequence(values, torch.tensor([5, 3])))
        assert type(out) is PackedSequence
        (pad_packed_sequence(out)[0].square().sum() + hidden.sum()).mul(1e-4).backward()
        return [values.grad, *(parameter.grad for parameter in model.parameters())]

    for one, other in zip(gradients(None), gradients(policy), strict=True):
        assert ((one - other).abs().max() / one.abs().max()).item() < 0.05


def test_a_model_without_a_gradient_to_give():
    model = Returning(lambda a, b: (a.detach(), 3))
    region = prepare(model, policy="mixed_float16")
    out = model(torch.ones(2, 6))
    assert not out[0].requires_grad
    assert region.scale == 65536.0
