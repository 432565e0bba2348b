import pickle

import pytest

from halfstep import errors

BUILT_IN = {
    "CheckpointError": RuntimeError,
    "HalfstepError": Exception,
    "PolicyError": ValueError,
    "RuleError": ValueError,
    "ScaleError": ValueError,
    "FormatError": ValueError,
    "PlanError": ValueError,
    "ReportError": ValueError,
    "UsageError": ValueError,
    "MissingFileError": FileNotFoundError,
    "MissingKeyError": KeyError,
    "ScalerStateError": RuntimeError,
    "NoCheckError": AssertionError,
    "NonFiniteError": FloatingPointError,
    "NotScalarError": AssertionError,
    "RefusedOperationError": RuntimeError,
    "MissingExtraError": ImportError,
    "UnsupportedVersionError": ImportError,
}


def test_the_table_names_every_error():
    assert sorted(BUILT_IN) == errors.__all__


@pytest.mark.parametrize(("name", "built_in"), BUILT_IN.items())
def test_errors_are_caught_as_ours_and_as_the_built_in(name, built_in):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.HalfstepError)
    assert issubclass(kind, built_in)
    assert kind.__doc__
    assert kind.__module__ == "halfstep.errors"
    assert str(pickle.loads(pickle.dumps(kind("text")))) == "text"


def test_a_missing_check_is_an_error_of_order():
    assert issubclass(errors.NoCheckError, errors.ScalerStateError)
