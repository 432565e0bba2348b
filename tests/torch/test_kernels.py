"""How long the kernels of rules are there."""

import pytest
import torch

from halfstep.core import Rules
from halfstep.torch import autocast
from halfstep.torch._engine._state import KERNELS

RULES = Rules().with_rule("aten::mul", "full", reason="It is tried.")
MUL = "aten::mul.Tensor"


def lower(rules=None):
    return autocast("cpu", dtype=torch.float16, rules=rules)


@pytest.fixture(autouse=True)
def _nobody_holds_it():
    with lower():
        assert MUL not in KERNELS.names()


def test_an_operation_that_takes_numbers_has_a_kernel_while_a_region_needs_it():
    with lower(RULES):
        assert MUL in KERNELS.names()
        assert (torch.ones(2).half() * 2.0).dtype is torch.float32
        with lower():
            assert MUL in KERNELS.names()
        assert (torch.ones(2).half() * 2.0).dtype is torch.float32


def test_it_is_there_for_the_next_time_until_another_region_is_entered():
    with lower(RULES):
        pass
    assert MUL in KERNELS.names()
    with lower():
        assert MUL not in KERNELS.names()
        assert (torch.ones(2).half() * 2.0).dtype is torch.float16


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_functions_work_after_a_region_that_had_one(transform):
    with lower(RULES):
        torch.ones(2) * 2.0
    with lower():
        out = transform(lambda w: (w * 2.0).sum())(torch.ones(2))
    assert out.tolist() == [2.0, 2.0]


def test_an_error_inside_lets_it_go():
    with pytest.raises(ZeroDivisionError), lower(RULES):
        raise ZeroDivisionError
    with lower():
        assert MUL not in KERNELS.names()


def test_an_observation_and_a_region_share_it():
    with lower().explain(), lower(RULES):
        assert (torch.ones(2).half() * 2.0).dtype is torch.float32
    with lower(RULES).explain() as explanation:
        torch.ones(2).half() * 2.0
    assert [row.action for row in explanation.rows if row.operation == "aten::mul"] == ["full"]
