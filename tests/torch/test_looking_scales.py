"""What multiplied a loss is known of each one, by whichever scaler it went, and kept apart."""

import pytest
import torch
from torch import nn

import halfstep.torch as hst
from halfstep.torch._looking import Looking
from halfstep.torch._watch import watch

SCALERS = [torch.amp.GradScaler, hst.GradScaler]


@pytest.fixture
def looking():
    end_watching, looks = watch(), Looking()
    end = looks.start()
    yield looks
    end()
    end_watching()


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 2))


class Other(nn.Sequential):
    """A second model, by another name."""


def incoming(seen, module="0"):
    """Returns the exponents of the gradients that came back to a model, none of a scale."""
    rows = seen.ranges.rows
    (row,) = (row for row in rows if (row.module, row.role) == (module, "grad_output"))
    return row.reference.counts


@pytest.mark.parametrize("scaler", SCALERS)
def test_the_scale_is_that_of_the_scaler_whatever_is_told(looking, scaler):
    model = model_of()
    scaler("cpu", init_scale=2.0**9).scale(model(torch.ones(3, 4)).sum())  # left alone
    kept = scaler("cpu", init_scale=2.0**7)
    kept.scale(model(torch.ones(3, 4)).sum()).backward()
    seen = looking.ranges(1.0)
    assert seen.power == 7
    assert incoming(seen) == ((0, 6),)


@pytest.mark.parametrize("scaler", SCALERS)
def test_two_scalers_in_one_step(looking, scaler):
    first, second = model_of(), Other(nn.Linear(4, 2))
    scalers = [scaler("cpu", init_scale=2.0**each) for each in (12, 3)]
    for each, model in zip(scalers, (first, second), strict=True):
        each.scale(model(torch.ones(3, 4)).sum() * 2.0**-5).backward()
    seen = looking.ranges(2.0**12)
    assert incoming(seen, "first.0") == ((-5, 6),)
    assert incoming(seen, "second.0") == ((-5, 6),)


def test_a_loss_that_goes_by_no_scaler_beside_one_that_does(looking):
    scaled, plain = model_of(), Other(nn.Linear(4, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scaler.scale(scaled(torch.ones(3, 4)).sum()).backward()
    plain(torch.ones(3, 4)).sum().backward()
    seen = looking.ranges(2.0**12)
    assert incoming(seen, "scaled.0") == ((0, 6),)
    assert incoming(seen, "plain.0") == ((0, 6),)


def test_what_is_done_to_a_scaled_loss_is_no_scale(looking):
    model, scaler = model_of(), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = [scaler.scale(model(torch.ones(3, 4)).sum() / 4) for _ in range(2)]
    (sum(losses) * 0.5).backward()
    assert incoming(looking.ranges(1.0)) == ((-3, 12),)


class Overflowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs):
        return self.last((self.first(inputs) * 3e5).tanh())


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_loss_that_is_looked_at_before_the_way_back_has_its_scale(looking, scaler):
    model, kept = Overflowing(), scaler("cpu", init_scale=2.0**7)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.ones(3, 4)).sum()
    kept.scale(loss)
    assert looking.faults(1.0).loss_scale == 2.0**7


@pytest.mark.parametrize("factor", [1.0, 5e4])
def test_no_loss_is_told_that_the_script_does_not_know(looking, factor):
    model = Overflowing()
    with torch.autocast("cpu", dtype=torch.float16):
        made = model(torch.ones(3, 4))
    (made.float() * factor).sum().backward()
    fault = looking.faults(1.0).first
    assert fault.operation == "multiply"
    assert fault.note == ""


@pytest.mark.parametrize("autocast", [torch.autocast, hst.autocast])
def test_the_line_in_which_an_autocast_was_made_is_told(looking, autocast):
    model, made = Overflowing(), autocast("cpu", dtype=torch.float16)
    with made, torch.autocast("cpu", enabled=False):
        pass
    with made:
        model(torch.ones(3, 4)).float().sum().backward()
    fault = looking.faults(1.0).first
    line = test_the_line_in_which_an_autocast_was_made_is_told.__code__.co_firstlineno + 2
    assert fault.remedy.endswith(f" in test_looking_scales.py:{line}")


@pytest.mark.parametrize("of", ["inputs", "parameters"])
def test_gradients_that_a_loss_may_be_made_of_are_known(looking, of):
    model, inputs = nn.Linear(4, 2), torch.ones(3, 4, requires_grad=True)
    model(inputs).sum().backward()
    assert not looking.derived
    whose = [inputs] if of == "inputs" else list(model.parameters())
    torch.autograd.grad(model(inputs).sum(), whose, create_graph=True)
    assert looking.derived
