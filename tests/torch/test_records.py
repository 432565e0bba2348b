import gc

import pytest
import torch

from halfstep.torch._scaler import GradScaler
from halfstep.torch._scaling._records import unknown_record


def start(bad_gradient=1.0, factor=1.0):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([("weight", parameter)], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale((parameter * factor).sum()).backward()
    parameter.grad[0] = bad_gradient
    return parameter, optimizer, scaler


def test_a_record_that_waits_for_the_device():
    _, optimizer, scaler = start(torch.nan)
    record = unknown_record(scaler._facts(), optimizer, torch.tensor(1.0))
    assert not record.known
    assert (record.skipped, record.reason, record.scale) == (True, "gradients held nan", 8.0)
    assert record.nonfinite == (("weight", "nan"),)
    assert not record.loss_nonfinite


def test_a_record_of_a_step_that_was_taken_after_all():
    _, optimizer, scaler = start()
    record = unknown_record(scaler._facts(), optimizer, torch.tensor(0.0))
    assert (record.skipped, record.reason, record.nonfinite) == (False, "", ())


def test_a_record_of_a_bad_loss():
    _, optimizer, scaler = start(torch.nan, factor=torch.nan)
    record = unknown_record(scaler._facts(), optimizer, torch.tensor(1.0))
    assert (record.reason, record.loss_nonfinite) == ("the loss was not finite", True)


@pytest.mark.parametrize(
    "change", [lambda optimizer, p: optimizer.zero_grad(), lambda optimizer, p: p.grad.zero_()]
)
def test_gradients_that_are_gone_are_said_to_be_gone(change):
    parameter, optimizer, scaler = start(torch.inf)
    record = unknown_record(scaler._facts(), optimizer, torch.tensor(1.0))
    change(optimizer, parameter)
    assert "cleared or changed before anybody asked" in record.nonfinite[0][0]
    assert record.reason == "gradients were not finite"


def test_a_record_keeps_no_optimizer_alive():
    parameter, optimizer, scaler = start(torch.inf)
    record = unknown_record(scaler._facts(), optimizer, torch.tensor(1.0))
    del parameter, optimizer
    gc.collect()
    assert record.nonfinite[0][1] == "unknown"
