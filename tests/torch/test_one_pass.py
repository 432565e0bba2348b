import copy
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from halfstep.errors import UsageError
from halfstep.torch import float32_state_dict, prepare
from halfstep.torch._native import _kernel
from halfstep.torch._native._kernel import LARGE
from halfstep.torch._scaling._one_pass import (
    checked_max_norm,
    clip,
    clip_or_put_off,
    coefficient,
    divisor,
    finite_norm_of,
    multiply,
    norm_of,
    tells_of_all,
)

HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF)
LAYOUTS = {
    "whole": lambda values: values,
    "an odd start": lambda values: values.flatten()[3:],
    "transposed": lambda values: values.mT,
    "permuted": lambda values: values.permute(2, 0, 1, 3),
    "channels last": lambda values: values.contiguous(memory_format=torch.channels_last),
    "gaps": lambda values: values[..., 1::2],
    "permuted gaps": lambda values: values.permute(2, 0, 1, 3)[:, 1:, ::2],
    "repeated": lambda values: values[:1, :, :1].expand_as(values),
}


@pytest.fixture(params=["compiled", "not compiled"])
def compiled(request, undecided, monkeypatch):
    """Computes norms with the kernel, and without."""
    if request.param == "not compiled":
        monkeypatch.setattr(_kernel, "load", lambda: None)
    elif undecided() is None:
        pytest.skip("needs a C compiler")


@pytest.fixture(params=[1, 2])
def threads(request):
    """Runs a test with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def pytorchs(gradients):
    """Returns the norm that PyTorch gives of the same numbers in float32."""
    return torch.nn.utils.get_total_norm([each.float() for each in gradients if each.numel()])


@given(
    st.lists(st.lists(st.floats(-1e4, 1e4, width=32), max_size=4), max_size=4),
    st.sampled_from([1.0, 2.0, 3.0, math.inf]),
)
def test_the_norm_is_pytorchs(values, kind):
    gradients = [torch.tensor(each) for each in values]
    expected = torch.nn.utils.get_total_norm([each for each in gradients if each.numel()], kind)
    assert torch.equal(norm_of(gradients, kind), expected)
    assert torch.equal(finite_norm_of(gradients, kind), expected)


@pytest.mark.parametrize("dtype", HALF)
def test_norms_of_half_precision_are_computed_in_float32(dtype):
    gradients = [torch.full((100,), 60000.0, dtype=dtype), torch.full((3,), 0.1, dtype=dtype)]
    norm = norm_of(gradients)
    assert norm.dtype is torch.float32
    expected = torch.cat(gradients).double().norm()
    assert math.isclose(norm.item(), expected.item(), rel_tol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 7, 1025, LARGE - 1, LARGE, LARGE + 13, 2**20 + 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_pytorch_in_float32(dtype, size, compiled, threads):
    gradients = [torch.randn(size).to(dtype)]
    assert torch.equal(norm_of(gradients), pytorchs(gradients))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_so_they_are_in_every_layout(layout, dtype, compiled, threads):
    gradients = [LAYOUTS[layout](torch.randn(3, 5, 129, 66).to(dtype))]
    assert torch.equal(norm_of(gradients), pytorchs(gradients))


@pytest.mark.parametrize("scale", [0.0, 1e-38, 2.0**-70, 2.0**-64, 1e-18, 1e16, 1e30])
@pytest.mark.parametrize("size", [1, 6, LARGE + 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_they_are_where_squares_are_inexact(dtype, scale, size, compiled):
    gradients = [(torch.randn(size) * scale).to(dtype), torch.zeros(LARGE, dtype=dtype)]
    for some in (gradients, gradients[:1]):
        assert torch.equal(norm_of(some), pytorchs(some))


@pytest.mark.parametrize("count", [3, 4, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_they_are_of_tensors_that_go_side_by_side(dtype, count, compiled, threads):
    sizes = torch.randint(1, LARGE, (count,)).tolist()
    gradients = [torch.randn(size).to(dtype) for size in [*sizes, LARGE, 0, 7]]
    assert torch.equal(norm_of(gradients), pytorchs(gradients))


def test_so_they_are_of_many_tensors_in_mixed_dtypes(compiled, threads):
    values = [torch.randn(size).bfloat16() for size in (3, LARGE, 1, 2**16 + 7, 50, 0, LARGE + 1)]
    kinds = (torch.bfloat16, torch.float32, torch.bfloat16)
    mixed = [each.to(kinds[place % 3]) for place, each in enumerate([*values, values[1]])]
    assert torch.equal(norm_of(mixed), pytorchs(mixed))


def clipped(model, gradients, **options):
    """Returns a model after three clipped steps, and the norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    region = prepare(model, optimizer, policy="mixed_bfloat16", **options)
    norms = []
    for step in gradients:
        optimizer.zero_grad()
        model(torch.ones(1, 300)).sum().backward()
        for parameter, values in zip(model.parameters(), step, strict=True):
            parameter.grad = values.to(parameter.dtype, copy=True)
        norms.append(region.clip_grad_norm_(0.5).item())
        optimizer.step()
    return float32_state_dict(model), norms


def test_a_clipped_step_of_split_masters_is_that_of_float32_parameters(compiled):
    model = torch.nn.Linear(300, 300)
    gradients = [[torch.randn_like(each).bfloat16() for each in model.parameters()]] * 3
    one, norms = clipped(copy.deepcopy(model), gradients)
    other, same = clipped(model, gradients, masters="split")
    assert norms == same
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("place", [0, LARGE, -1])
def test_norms_of_bfloat16_tell_of_every_number(bad, place, compiled):
    gradient = torch.ones(LARGE + 5).bfloat16()
    gradient[place] = bad
    assert not norm_of([torch.ones(LARGE).bfloat16(), gradient]).isfinite()


def test_norms_of_float64_stay_in_float64():
    gradients = [torch.tensor([1.0, 1e-12], dtype=torch.float64), torch.ones(2)]
    assert norm_of(gradients).dtype is torch.float64


def test_complex_gradients_have_real_norms():
    assert norm_of([torch.tensor([3.0 + 4.0j])]) == 5.0


def test_sparse_gradients_are_added_up_first():
    indices = torch.tensor([[0, 0, 2]])
    with torch.sparse.check_sparse_tensor_invariants():
        gradient = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 4.0]), (3,))
    assert norm_of([gradient]) == 5.0
    clip([gradient], 2.5)
    assert torch.allclose(gradient.to_dense(), torch.tensor([1.5, 0.0, 2.0]))


def test_no_gradients_have_the_norm_zero():
    assert norm_of([]) == norm_of([torch.empty(0)], math.inf) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("kind", [2.0, 3.0])
def test_a_sum_that_overflows_is_added_up_again(dtype, kind):
    size = 1e200 if dtype is torch.float64 else 2e30
    gradients = [torch.full((2,), size, dtype=dtype), torch.full((6,), -size, dtype=dtype)]
    assert norm_of(gradients, kind) == torch.inf
    norm = finite_norm_of(gradients, kind)
    assert math.isclose(norm.item(), 8 ** (1 / kind) * size, rel_tol=1e-5)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradients_that_are_not_finite_stay_as_they_are(bad):
    gradients = [torch.tensor([1.0, bad]), torch.tensor([3.0])]
    norm = clip(gradients, 0.5)
    assert not norm.isfinite()
    assert gradients[1] == 3.0


def test_gradients_whose_norm_no_float32_holds_are_clipped():
    gradients = [torch.full((16,), 3e38)]
    assert math.isclose(clip(gradients, 2.0).item(), 1.2e39, rel_tol=1e-6)
    assert torch.allclose(gradients[0], torch.tensor(0.5))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_factor_of_one_is_no_pass(dtype):
    gradient = torch.ones(3, dtype=dtype)
    multiply([gradient], torch.tensor(4.0), torch.tensor(0.25))
    assert gradient._version == 0


def test_a_product_that_float32_cannot_hold_is_exact():
    gradient = torch.tensor([2.0**120])
    multiply([gradient], torch.tensor(2.0**-100), torch.tensor(2.0**-44 + 2.0**-60))
    assert math.isclose(gradient.item(), 2.0**-24 + 2.0**-40, rel_tol=1e-6)


@given(st.floats(0.0, 1e6, width=32), st.floats(1e-3, 1e6))
def test_dividing_is_multiplying(size, max_norm):
    norm = torch.tensor(size)
    factor, by = coefficient(norm, max_norm), divisor(norm, max_norm)
    assert by >= 1.0
    assert by == 1.0 or factor < 1.0
    assert math.isclose(factor * by, 1.0, rel_tol=5e-7)


def test_what_is_put_off_is_left_to_kernels():
    gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert clip_or_put_off(norm_of(gradients), gradients, 6.0, kernels=True) is None
    by = clip_or_put_off(norm_of(gradients), gradients, 2.5, kernels=True)
    assert math.isclose(by.item(), 2.0, rel_tol=1e-6)
    assert gradients[0] == 3.0
    assert clip_or_put_off(norm_of(gradients), gradients, 2.5, kernels=False) is None
    assert math.isclose(gradients[0].item(), 1.5, rel_tol=1e-6)


def test_kernels_do_not_clip_what_float32_is_too_coarse_for():
    gradients = [torch.full((2,), 3.0, dtype=torch.float64)]
    assert clip_or_put_off(norm_of(gradients), gradients, 1.0, kernels=True) is None
    assert math.isclose(norm_of(gradients).item(), 1.0, rel_tol=1e-6)


def test_which_norms_tell_of_every_entry():
    assert [kind for kind in (0.0, 0.5, 1.0, 2.0, math.inf) if tells_of_all(kind)] == [
        1.0,
        2.0,
        math.inf,
    ]


@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan, True, "1", torch.ones(())])
def test_limits_that_make_no_sense_are_refused(max_norm):
    with pytest.raises(UsageError) as caught:
        checked_max_norm(max_norm, "step()")
    assert str(caught.value) == (
        f"step() needs max_norm > 0, got {max_norm!r}. Pass a number such as 1.0, or math.inf to "
        "measure without clipping."
    )
