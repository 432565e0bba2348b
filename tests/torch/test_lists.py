"""PyTorch's own lists of operations, run by the rule sets that bear its name, on CPU tensors."""

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

from halfstep.errors import RefusedOperationError
from halfstep.torch import autocast

LOW = {"torch-2.13": torch.float16, "torch-2.13-cpu": torch.bfloat16}
NAMESPACES = {
    "torch": torch,
    "nn": torch._C._nn,
    "linalg": torch.linalg,
    "methods": torch.Tensor,
}
LEFT_OUT = {
    "cudnn_convolution": "a CUDA library, without a kernel for CPU tensors",
    "cudnn_convolution_transpose": "a CUDA library, without a kernel for CPU tensors",
    "einsum": "the row's arguments do not fit its equation; tested below",
}


def rows(lists, low):
    """Yields (namespace, operation, arguments, keyword arguments, expected dtype)."""
    for name, entries in vars(lists).items():
        namespace, _, kind = name.partition("_")
        if namespace not in NAMESPACES or kind == "builtin_promote":
            continue
        for operation, arguments, *rest in entries:
            keywords = next((item for item in rest if isinstance(item, dict)), {})
            listed = next((item for item in rest if isinstance(item, torch.dtype)), None)
            low_kind = kind.endswith("16")
            expected = low if low_kind else torch.float32
            yield namespace, operation, arguments, keywords, listed or expected


def cases(set_name):
    lists = {
        "torch-2.13": lambda: AutocastTestLists(torch.device("cpu")),
        "torch-2.13-cpu": lambda: AutocastCPUTestLists(torch.device("cpu")),
    }[set_name]()
    for namespace, operation, *rest in rows(lists, LOW[set_name]):
        if operation not in LEFT_OUT:
            yield pytest.param(set_name, namespace, operation, *rest, id=f"{set_name}-{operation}")


def run(namespace, operation, arguments, keywords):
    if namespace == "linalg":
        return getattr(torch.linalg, operation.removeprefix("linalg_"))(*arguments, **keywords)
    function = getattr(NAMESPACES[namespace], operation, None) or getattr(torch, operation)
    return function(*arguments, **keywords)


def dtype_of(result):
    first = result[0] if isinstance(result, list | tuple) else result
    return first.dtype if isinstance(first, torch.Tensor) else None


# Two of the listed forms are deprecated in PyTorch, which is not what is tested here.
@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
@pytest.mark.parametrize(
    ("set_name", "namespace", "operation", "arguments", "keywords", "expected"),
    [*cases("torch-2.13"), *cases("torch-2.13-cpu")],
)
def test_an_operation_gets_the_dtype_that_its_list_says(
    set_name, namespace, operation, arguments, keywords, expected
):
    with autocast("cpu", dtype=LOW[set_name], rules=set_name):
        if operation == "binary_cross_entropy" and set_name == "torch-2.13":
            with pytest.raises(RefusedOperationError, match="binary_cross_entropy_with_logits"):
                run(namespace, operation, arguments, keywords)
            return
        found = dtype_of(run(namespace, operation, arguments, keywords))
    assert found in (expected, None)


def test_the_lists_are_not_empty():
    assert len(list(cases("torch-2.13"))) > 100
    assert len(list(cases("torch-2.13-cpu"))) > 50


def test_einsum_runs_low():
    left, right = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    with autocast("cpu", dtype=torch.float16, rules="torch-2.13"):
        assert torch.einsum("bij,bjk->bik", left, right).dtype is torch.float16


def test_what_a_composite_is_made_of_follows_the_rules():
    """PyTorch runs cross_entropy wide on CPU; CUDA's lists do so only through its parts."""
    logits, targets = torch.randn(4, 3).half(), torch.tensor([0, 1, 2, 0])
    with autocast("cpu", dtype=torch.float16, rules="torch-2.13"):
        assert torch.nn.functional.cross_entropy(logits, targets).dtype is torch.float32
        assert torch.nn.functional.normalize(logits).dtype is torch.float32
