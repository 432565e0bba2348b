"""Several models in a step, one on what another returned: each fault is that of its own model."""

import pytest
import torch
from torch import nn

from halfstep.torch import diagnose, observe, prepare
from halfstep.torch._looking import Looking


@pytest.fixture
def looking():
    looks = Looking()
    end = looks.start()
    yield looks
    end()


class Root(nn.Module):
    """Has an infinite derivative."""

    def forward(self, x):
        return (x - x.detach()).abs().sqrt()


class Steep(nn.Module):
    """Hands on a gradient that is so many times as large, and numbers as they are."""

    def __init__(self, factor=2.0**15):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return (x - x.detach()) * self.factor + x.detach()


class Hidden(nn.Module):
    """Overflows, and hides it."""

    def forward(self, x):
        return torch.tanh(x * 3e4 * 3e4)


class Infinite(nn.Module):
    def forward(self, x):
        return x * 3e4 * 3e4


def sequential(last=None, *, width=8):
    parts = [nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)]
    return nn.Sequential(*parts, *([last] if last else []))


def prepared(*models):
    torch.manual_seed(0)
    for each in models:
        prepare(each, torch.optim.SGD(each.parameters(), 0.1), policy="mixed_float16")


def batch():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def place(looking):
    fault = looking.faults(1.0).first
    return fault and (fault.module, fault.operation, fault.phase)


PLANTED = [
    (Root, ("sqrt", "backward")),
    (Steep, ("multiply", "backward")),
    (Hidden, ("multiply", "forward")),
    (Infinite, ("multiply", "forward")),
]


@pytest.mark.parametrize(("wide", "narrow"), [(64, 8), (8, 64)])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("kind", "what"), PLANTED)
def test_the_model_at_fault_whichever_it_is(looking, kind, what, which, wide, narrow):
    encoder = sequential(kind() if which == 0 else None, width=wide)
    decoder = sequential(kind() if which == 1 else None, width=narrow)
    prepared(encoder, decoder)
    decoder(encoder(batch())).square().mean().backward()
    assert place(looking) == (("encoder.3", "decoder.3")[which], *what)
    # The gradient of a loss that is not finite comes from outside.
    assert looking.entered_broken == (kind is Infinite)


def test_a_model_that_is_called_before_and_after_another_one(looking):
    encoder, decoder = sequential(Infinite()), sequential()
    prepared(encoder, decoder)
    decoder(encoder(decoder(batch()))).square().mean().backward()
    assert place(looking) == ("encoder.3", "multiply", "forward")


@pytest.mark.parametrize(("kind", "what"), PLANTED)
def test_a_teacher_that_is_not_trained(looking, kind, what):
    student, teacher = sequential(), sequential(kind()).requires_grad_(False)
    prepared(student)
    prepare(teacher, policy="mixed_float16")
    teacher(student(batch())).square().mean().backward()
    assert place(looking) == ("teacher.3", *what)
    assert set(looking.ranges(1.0).ranges.modules) == {"0", "1", "2"}


def test_a_criterion_without_parameters(looking):
    model, criterion = sequential(), Root()
    prepared(model)
    criterion(model(batch())).mean().backward()
    assert place(looking) == ("criterion", "sqrt", "backward")


@pytest.mark.parametrize("where", ["between", "after"])
def test_what_is_made_around_the_models_is_none_of_theirs(looking, where):
    encoder, decoder = sequential(), sequential()
    prepared(encoder, decoder)
    made = encoder(batch())
    made = decoder((made - made.detach()).abs().sqrt() if where == "between" else made)
    made = (made - made.detach()).abs().sqrt() if where == "after" else made
    made.mean().backward()
    assert place(looking) is None
    assert looking.entered_broken


def test_what_was_computed_for_a_model_is_not_its_data(looking):
    encoder, decoder = sequential(), sequential()
    prepared(encoder, decoder)
    decoder(encoder(batch()) / 0.0).sum()
    assert place(looking) is None


def test_data_that_is_broken_is_told_of_the_model_that_was_given_it(looking):
    encoder, decoder = sequential(), sequential()
    prepared(encoder, decoder)
    decoder(encoder(batch() / 0.0)).sum()
    assert place(looking) == ("encoder.0", "data", "forward")


def test_a_remedy_says_which_model_it_is_for(looking):
    encoder, decoder = sequential(), sequential(Hidden())
    prepared(encoder, decoder)
    decoder(encoder(batch())).square().mean().backward()
    lines = looking.faults(1.0).first.remedy.splitlines()
    assert 'reason="Its numbers leave float16 in decoder.", where="3")' in lines[2]
    assert lines[-1].startswith("region = prepare(decoder, optimizer, policy=policy)")


def test_a_scale_that_backs_off_is_told_with_that_at_which_it_fits(looking):
    encoder, decoder = sequential(), sequential(Steep())
    prepared(encoder, decoder)
    decoder(encoder(batch())).square().mean().backward()
    fault = looking.faults(1.0).first
    assert "lowers its scale by itself" in fault.note
    assert "scale=dynamic(init_scale=" in fault.remedy


def test_diagnose_and_observe_keep_two_models_of_a_class_apart():
    encoder, decoder = sequential(), sequential(Root())
    prepared(encoder, decoder)

    def loss_fn(model, batch):
        return decoder(model(batch)).square().mean()

    fault = diagnose(encoder, batch(), loss_fn).first
    assert (fault.module, fault.operation, fault.phase) == ("decoder.3", "sqrt", "backward")
    modules = {row.module for row in observe(encoder, batch(), loss_fn)}
    assert {"0", "2", "decoder.0", "decoder.2"} <= modules


def test_a_step_says_which_is_the_only_model_that_is_trained(looking):
    encoder, decoder = sequential(), sequential()
    encoder(batch()).sum().backward()
    assert looking.only == ("encoder", "Sequential")
    decoder(encoder(batch())).sum().backward()
    assert looking.only is None
