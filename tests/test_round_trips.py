import copy
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import halfstep
from halfstep import core
from halfstep.core import FORMATS, ScaleState
from tests.core.strategies import (
    DIAGNOSES,
    EXPONENTS,
    FAULTS,
    LOSS_SCALES,
    PLANS,
    POLICIES,
    REPORTS,
    RULES,
    RULES_ROWS,
)

STATES = st.builds(
    ScaleState,
    scale=st.floats(2.0**-126, 2.0**127),
    finite_steps=st.integers(0, 5),
    overflows=st.integers(0, 5),
)
VALUES = st.one_of(
    st.sampled_from(FORMATS),
    EXPONENTS,
    FAULTS,
    DIAGNOSES,
    STATES,
    LOSS_SCALES,
    RULES_ROWS,
    RULES,
    POLICIES,
    PLANS,
    REPORTS,
)
PUBLIC_CLASSES = (
    core.Diagnosis,
    core.Exponents,
    core.Fault,
    core.Format,
    core.LossScale,
    core.Plan,
    core.Policy,
    core.Report,
    core.Rule,
    core.Rules,
    core.ScaleState,
)


def test_every_public_class_takes_part():
    public = {getattr(halfstep, name) for name in halfstep.__all__}
    classes = {value for value in public if isinstance(value, type)}
    assert {each for each in classes if not issubclass(each, Warning)} == set(PUBLIC_CLASSES)


@given(VALUES)
def test_repr_evaluates_to_an_equal_value(value):
    assert eval(repr(value), vars(core) | {"inf": math.inf}) == value


@given(VALUES)
def test_pickle_copy_and_hash(value):
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert other == value
        assert hash(other) == hash(value)
        assert type(other) is type(value)


@given(st.one_of(LOSS_SCALES, RULES, POLICIES))
def test_text(value):
    text = str(value)
    assert type(value).parse(text) == value
    assert str(type(value).parse(text)) == text


@given(st.one_of(EXPONENTS, LOSS_SCALES, RULES_ROWS, RULES, POLICIES, PLANS, REPORTS))
def test_dict_also_by_way_of_json(value):
    data = value.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert type(value).from_dict(data) == value


@pytest.mark.parametrize("kind", PUBLIC_CLASSES)
def test_pickles_name_the_public_module(kind):
    assert kind.__module__ == "halfstep.core"
