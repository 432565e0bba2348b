import ml_dtypes
import numpy
import pytest

from halfstep.core import FORMATS, Format
from halfstep.core._formats import COMPUTE_DTYPES, dtype_suggestion
from halfstep.errors import FormatError

NUMPY_NAMES = {"float64": numpy.float64, "float32": numpy.float32, "float16": numpy.float16}


@pytest.mark.parametrize("entry", FORMATS, ids=str)
def test_limits_are_those_that_finfo_says(entry):
    info = ml_dtypes.finfo(NUMPY_NAMES.get(entry.name) or getattr(ml_dtypes, entry.name))
    assert entry.bits == info.bits
    assert entry.exponent_bits == info.nexp
    assert entry.mantissa_bits == info.nmant
    assert entry.max == float(info.max)
    assert entry.min_normal == float(info.smallest_normal)
    assert entry.smallest_subnormal == float(info.smallest_subnormal)
    assert entry.epsilon == float(info.eps)


@pytest.mark.parametrize("entry", FORMATS, ids=str)
def test_limits_are_those_that_torch_says(entry):
    torch = pytest.importorskip("torch")
    info = torch.finfo(getattr(torch, entry.name))
    assert (entry.bits, entry.max, entry.min_normal, entry.epsilon) == (
        info.bits,
        info.max,
        info.smallest_normal,
        info.eps,
    )


@pytest.mark.parametrize("entry", FORMATS, ids=str)
def test_named_finds_every_format(entry):
    assert Format.named(entry.name) is entry
    assert str(entry) == entry.name


@pytest.mark.parametrize(
    ("name", "ending"),
    [("flaot16", "got 'flaot16'. Did you mean 'float16'?"), (16, "got 16."), (["a"], "got ['a'].")],
)
def test_unknown_names_are_refused(name, ending):
    with pytest.raises(FormatError) as caught:
        Format.named(name)
    assert str(caught.value) == (
        "Format needs one of float64, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, "
        + ending
    )


def test_operations_run_in_formats_of_16_bits_and_more():
    assert COMPUTE_DTYPES == ("float64", "float32", "bfloat16", "float16")


@pytest.mark.parametrize("name", ["half", "fp16", "torch.float16", "torch.half", "flaot16"])
def test_short_and_framework_names_are_understood_as_hints(name):
    assert dtype_suggestion(name) == " Did you mean 'float16'?"
