"""A fault that is planted anywhere in a model is found there, and none is where there is none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.torch import diagnose
from tests.torch.planted_models import FAULTS, WAYS, batch, models

quick = settings(max_examples=4, deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("kind", FAULTS)
@quick
@given(data=st.data(), way=st.sampled_from(sorted(WAYS)), seed=st.integers(0, 99))
def test_a_planted_fault_is_found_where_it_is(kind, data, way, seed):
    torch.manual_seed(seed)
    model, path = data.draw(models(kind))
    loss_fn, how = WAYS[way]
    fault = diagnose(model, batch(), loss_fn, **how).first
    assert fault is not None
    assert (fault.module, fault.operation, fault.phase) == (path, *FAULTS[kind])


@settings(quick, max_examples=20)
@given(data=st.data(), way=st.sampled_from(sorted(WAYS)), seed=st.integers(0, 99))
def test_there_is_no_alarm_where_nothing_is_wrong(data, way, seed):
    torch.manual_seed(seed)
    model, _ = data.draw(models(None))
    loss_fn, how = WAYS[way]
    assert str(diagnose(model, batch(), loss_fn, **how)).startswith("no inf and no NaN")
