"""Every operation that works in float32 works in a region, whatever mix of dtypes arrives."""

import collections
import itertools
import warnings

import pytest
import torch
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db

from halfstep import Rules
from halfstep.torch import autocast

SAMPLES = 3
# What stays refused, and why.
REFUSED = {
    "_chunk_cat": "an internal operation of FSDP, which brings its own dtype",
    "_softmax_backward_data": "a backward formula, which autograd calls with matching dtypes",
    "as_strided": "addresses memory by element size, so half the bytes are too few",
    "_batch_norm_with_update": "PyTorch mixes float32 statistics with low inputs, not the reverse",
    "_native_batch_norm_legit": "as _batch_norm_with_update",
    "native_batch_norm": "as _batch_norm_with_update",
    "nn.functional.batch_norm": "as _batch_norm_with_update",
    "native_group_norm": "the inner form of group_norm",
    "nn.functional.linear_cross_entropy": "fuses a product and a loss in one dtype",
}


@pytest.fixture(autouse=True)
def nothing_to_find(monkeypatch):
    """Keeps PyTorch from looking for its own kind of test in the stack, for each operation."""
    monkeypatch.setattr(common_utils, "extract_test_fn", lambda: None)


def converted(value, choose):
    """Converts the float32 tensors in a value to the dtypes that `choose` names one by one."""
    if isinstance(value, torch.Tensor):
        wanted = choose() if value.dtype is torch.float32 else value.dtype
        return value.detach().to(wanted)
    if isinstance(value, list | tuple):
        return type(value)(converted(item, choose) for item in value)
    return value


def mixes(low):
    """Yields functions that name a dtype for each tensor: all low, and alternating both ways."""
    yield lambda: low
    for first, second in ((low, torch.float32), (torch.float32, low)):
        dtypes = [second, first]
        yield lambda dtypes=dtypes: dtypes.reverse() or dtypes[1]


def works(function):
    try:
        with torch.no_grad():
            warnings.simplefilter("ignore")
            function()
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return str(error).splitlines()[0]
    return ""


def samples(entry):
    """Yields the arguments of an operation's samples that work in plain float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = list(itertools.islice(entry.sample_inputs("cpu", torch.float32), SAMPLES))
    for sample in made:
        arguments = (sample.input, *sample.args)
        if not works(lambda: entry(*arguments, **sample.kwargs)):  # noqa: B023
            yield arguments, sample.kwargs


def entries():
    skipped = ("_refs", "sparse", "jiterator", "ops.", "masked", "torch.ops")
    return [
        entry
        for entry in op_db
        if torch.float32 in entry.supported_dtypes("cpu") and not entry.name.startswith(skipped)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_an_operation_that_works_in_float32_works_in_a_region(low):
    failures = collections.defaultdict(set)
    for entry in entries():
        for arguments, keywords in samples(entry):
            for choose in mixes(low):
                given = converted(arguments, choose)
                with autocast("cpu", dtype=low):
                    error = works(lambda: entry(*given, **keywords))  # noqa: B023
                if error:
                    failures[entry.name].add(error)
    assert {name: errors for name, errors in failures.items() if name not in REFUSED} == {}
    assert set(REFUSED) - {"nn.functional.linear_cross_entropy"} - set(failures) == set()


def test_operations_that_pytorch_refuses_in_mixed_dtypes():
    wide, half = torch.randn(3), torch.randn(3).half()
    matrix, half_matrix = torch.eye(3), torch.eye(3).half()
    with autocast("cpu", dtype=torch.float16):
        assert torch.lerp(wide, half, 0.5).dtype is torch.float32
        assert torch.dot(wide, half).dtype is torch.float32
        assert torch.linalg.cross(wide, half).dtype is torch.float32
        assert torch.tensordot(matrix, half_matrix, 1).dtype is torch.float32
        assert torch.linalg.inv(matrix @ matrix).dtype is torch.float32
        assert matrix.clone().addmm_(half_matrix, half_matrix).dtype is torch.float32
        buffer = torch.zeros(3)
        buffer[torch.tensor([0])] = half[:1]
        assert buffer.dtype is torch.float32
        assert half.masked_fill(half > 0, -1e9).min() == torch.finfo(torch.float16).min


@pytest.mark.parametrize("name", ["add", "div", "mul", "sub"])
@pytest.mark.parametrize("where", ["", "elsewhere"])
def test_a_rule_leaves_a_number_in_place_of_a_tensor(name, where):
    call, halves = getattr(torch, name), torch.ones(2).half()
    rules = Rules().with_rule(f"aten::{name}", "full", reason="-", where=where)
    with autocast("cpu", dtype=torch.float16, rules=rules):
        found = call(halves, 2)
    with autocast("cpu", dtype=torch.float16):
        assert call(halves, 0.5).dtype is torch.float16
    assert found.dtype is (torch.float16 if where else torch.float32)
