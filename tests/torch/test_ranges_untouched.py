"""A look at the ranges of a step leaves nothing behind, whatever the model is."""

import copy
import random

import numpy as np
import pytest
import torch

from halfstep.torch import prepare, ranges
from tests.torch.stepping import CASES

EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def state_of(model):
    tensors = [*model.state_dict().values(), *(each.grad for each in model.parameters())]
    return [None if each is None else each.clone() for each in tensors], dict(vars(model))


@pytest.mark.parametrize("policy", [None, "mixed_float16", "mixed_bfloat16"])
@EVERY
def test_nothing_is_changed(case, policy):
    model, batch = case.model(), case.batch()
    optimizer = torch.optim.Adam(model.parameters())
    region = prepare(model, optimizer, "mixed_float16, scale=dynamic(growth_interval=1)")
    case.loss(model, batch).backward()
    optimizer.step()
    before, held = state_of(model), copy.deepcopy(optimizer.state_dict())
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    ranges(model, batch, case.loss, policy=policy, optimizer=optimizer)
    assert (torch.get_rng_state() == generators[0]).all()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == generators[1:]
    assert state_of(model)[1] == before[1]
    assert region.history.steps == 1
    for old, new in zip(before[0], state_of(model)[0], strict=True):
        assert new is None if old is None else torch.equal(old, new)
    new = optimizer.state_dict()["state"]
    for index, state in held["state"].items():
        assert all(torch.equal(value, new[index][name]) for name, value in state.items())


def test_split_masters_and_half_models_have_a_float32_run_of_all_bits():
    case = CASES["mlp"]
    plain = ranges(case.model(), case.batch(), case.loss)
    model = case.model()
    prepare(model, torch.optim.SGD(model.parameters()), "mixed_bfloat16", masters="split")
    found = ranges(model, case.batch(), case.loss)
    assert [row.reference for row in found.rows] == [row.reference for row in plain.rows]
    assert found.form == "bfloat16"
    half = ranges(
        case.model().bfloat16(),
        case.batch(),
        lambda model, batch: case.loss(
            model, (batch[0].to(next(model.parameters()).dtype), batch[1])
        ),
    )
    assert half.form == "bfloat16"
    assert half.rows[0].form == "bfloat16"
