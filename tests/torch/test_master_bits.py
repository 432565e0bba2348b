"""Masters are split and merged bit by bit as a plain reference does, compiled or not."""

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from halfstep.torch._masters import _bits
from halfstep.torch._masters._bits import merge, split
from halfstep.torch._native._kernel import kernel
from tests.reference import master_bits as reference

UPPER = torch.arange(-(2**15), 2**15).short()
# Ties and their neighbours, what a subnormal and a payload of NaN end in, and both ends.
REMAINDERS = (0, 1, 2, 0x40, 0x3FFF, 0x4000, 0x7FFE, 0x7FFF)
REMAINDERS = (*REMAINDERS, *(~each for each in REMAINDERS), -0x7FFF)
SPECIAL = {
    "+0": 0x00000000,
    "smallest subnormal": 0x00000001,
    "subnormal tie": 0x00008000,
    "subnormal past a tie": 0x00008001,
    "largest subnormal": 0x007FFFFF,
    "smallest normal": 0x00800000,
    "one": 0x3F800000,
    "tie above even": 0x3F808000,
    "tie above odd": 0x3F818000,
    "largest bfloat16": 0x7F7F0000,
    "the last to round to it": 0x7F7F7FFF,
    "the first to round to infinity": 0x7F7F8000,
    "largest": 0x7F7FFFFF,
    "infinity": 0x7F800000,
    "NaN with the smallest payload": 0x7F800001,
    "NaN with a tie for a payload": 0x7F808000,
    "NaN": 0x7FC00000,
    "NaN that rounds to zero": 0x7FFF8000,
    "NaN with the largest payload": 0x7FFFFFFF,
}
EVERY_SPECIAL = torch.tensor([*SPECIAL.values(), *(each - 2**31 for each in SPECIAL.values())])
BITS = arrays.arrays(numpy.int32, st.integers(0, 40), elements=st.integers(-(2**31), 2**31 - 1))


def aten():
    return _bits._split_bfloat16, _bits._merge


def compiled():
    found = kernel() or pytest.skip("needs a C compiler")
    return _bits._of_one(found.split), _bits._of_one(found.merge)


ways = pytest.mark.parametrize("way", [aten, compiled])


def masters(bits):
    return torch.as_tensor(bits).int().view(torch.float32)


def parts(master, dtype=torch.bfloat16):
    return torch.empty_like(master, dtype=dtype), torch.empty_like(master, dtype=torch.int16)


def there(master, way=aten):
    low, remainder = parts(master)
    way()[0](master, low, remainder)
    return low, remainder


def back(low, remainder, way=aten):
    out = torch.empty_like(low, dtype=torch.float32)
    way()[1](low, remainder, out)
    return out


def same(got, expected):
    return torch.equal(_bits._comparable(got), _bits._comparable(torch.as_tensor(expected)))


@ways
@pytest.mark.parametrize("remainder", REMAINDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_parameter_merges_like_the_reference(way, remainder, dtype):
    if dtype is torch.float16 and way is compiled:
        way = aten  # the kernel knows bfloat16 alone
    low, rest = UPPER.view(dtype), torch.full_like(UPPER, remainder)
    expected = reference.merge(low.float().numpy(), rest.numpy().astype(numpy.int64))
    got = back(low, rest, way)
    assert same(got, expected)
    assert torch.equal(got.isnan(), low.isnan())


@ways
@pytest.mark.parametrize("remainder", REMAINDERS)
def test_every_upper_half_splits_like_the_reference_and_comes_back(way, remainder):
    master = masters(UPPER.int() * 2**16 + remainder)
    low, rest = there(master, way)
    expected_low, expected_rest = reference.split_bfloat16(master.numpy())
    assert same(low, torch.from_numpy(expected_low).view(torch.bfloat16))
    assert torch.equal(rest, torch.from_numpy(expected_rest))
    assert same(back(low, rest, way), master)


@ways
@given(bits=BITS)
@example(bits=EVERY_SPECIAL.numpy())
def test_any_master_splits_like_the_reference_and_comes_back(way, bits):
    master = masters(bits)
    low, rest = there(master, way)
    expected_low, expected_rest = reference.split_bfloat16(master.numpy())
    assert same(low, torch.from_numpy(expected_low).view(torch.bfloat16))
    assert torch.equal(rest, torch.from_numpy(expected_rest))
    assert same(back(low, rest, way), master)


@ways
@given(bits=BITS)
def test_what_is_no_tie_is_rounded_as_pytorch_rounds(way, bits):
    master = masters(bits[(bits & 0xFFFF) != 0x8000])
    assert same(there(master, way)[0], master.bfloat16())


@given(bits=BITS, count=st.integers(0, 5000))
@example(bits=EVERY_SPECIAL.numpy(), count=70_000)  # enough for more than one thread
def test_the_kernel_and_pytorch_give_the_same_bits(bits, count):
    master = torch.cat([masters(bits), torch.randn(count) * 1e3])
    expected = there(master)
    got = there(master, compiled)
    assert all(map(same, got, expected))
    stale = torch.randint(-(2**15), 2**15, master.shape).short()
    assert same(back(got[0], stale, compiled), back(expected[0], stale))


@ways
@pytest.mark.parametrize(
    ("parameter", "remainder"),
    [(0.0, -1), (-0.0, -1), (0.0, -(2**15)), (torch.inf, 1), (-torch.inf, 2**15 - 1)],
)
def test_a_stale_remainder_does_not_make_a_nan_of_a_number(way, parameter, remainder):
    low = torch.full((3,), parameter, dtype=torch.bfloat16)
    got = back(low, torch.full((3,), remainder, dtype=torch.int16), way)
    assert same(got, low.float())


@ways
def test_a_finite_master_that_rounds_to_infinity_comes_back(way):
    master = masters([SPECIAL["the first to round to infinity"], SPECIAL["largest"]])
    low, remainder = there(master, way)
    assert low.isinf().all()
    assert torch.equal(back(low, remainder, way), master)


@given(bits=BITS)
@example(bits=EVERY_SPECIAL.numpy())
@example(bits=numpy.array([0x477FEFFF, 0x477FF000, 0x38800000, 0x387FFFFF, 0x33000000]))
def test_float16_says_whether_every_element_was_kept(bits):
    for master in [masters(bits), *masters(bits).split(1)]:
        low, remainder = parts(master, torch.float16)
        expected_low, expected_rest, kept = reference.split_float16(master.numpy())
        assert split(master, low, remainder) is bool(kept.all())
        assert same(low, expected_low)
        number = ~master.isnan()
        assert torch.equal(remainder[number], torch.from_numpy(expected_rest)[number])


@given(
    st.lists(st.floats(2**-14, 65504.0, width=32) | st.sampled_from([0.0, torch.inf]), max_size=9)
)
def test_float16_keeps_what_it_says_it_keeps(values):
    master = torch.tensor([*values, *(-each for each in values)])
    low, remainder = parts(master, torch.float16)
    out = torch.empty_like(master)
    assert split(master, low, remainder)
    merge(low, remainder, out)
    assert same(out, master)


@given(bits=BITS)
@example(bits=EVERY_SPECIAL.numpy())
def test_float16_gives_back_the_elements_that_were_kept(bits):
    master = masters(bits)
    low, remainder = parts(master, torch.float16)
    split(master, low, remainder)
    out = torch.empty_like(master)
    merge(low, remainder, out)
    kept = torch.from_numpy(reference.split_float16(master.numpy())[2])
    assert same(out[kept], master[kept])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0,), (), (3, 0, 2), (1,)])
def test_there_may_be_few_elements_or_none(dtype, shape):
    master = torch.ones(shape)
    low, remainder = parts(master, dtype)
    assert split(master, low, remainder) is True
    out = torch.zeros(shape)
    merge(low, remainder, out)
    assert torch.equal(out, master)


LAYOUTS = {
    "as they come": torch.randn,
    "transposed": lambda size: torch.randn(size[::-1]).permute(3, 2, 1, 0),
    "channels last": lambda size: torch.randn(size).to(memory_format=torch.channels_last),
    "with gaps": lambda size: torch.randn(*size, 2)[..., 0],
    "expanded": lambda size: torch.randn(size[1:]).expand(size),
}


@pytest.mark.parametrize("written", ["as they come", "transposed", "channels last", "with gaps"])
@pytest.mark.parametrize("read", LAYOUTS)
def test_any_layout_comes_back(read, written):
    size = (4, 16, 32, 32)
    master, out = LAYOUTS[read](size), LAYOUTS[written](size)
    low, remainder = LAYOUTS[written](size).bfloat16(), LAYOUTS[written](size).short()
    assert split(master, low, remainder)
    merge(low, remainder, out)
    assert torch.equal(out, master)


def test_memory_need_not_be_aligned():
    def shifted(master, dtype, size):
        return torch.frombuffer(bytearray(master.numel() * size + 1), dtype=dtype, offset=1)

    master = torch.randn(50_000)
    odd = shifted(master, torch.float32, 4).copy_(master)
    low, remainder = shifted(master, torch.bfloat16, 2), shifted(master, torch.int16, 2)
    split(odd, low, remainder)
    odd.zero_()
    merge(low, remainder, odd)
    assert torch.equal(odd, master)


@pytest.mark.parametrize("count", [3, 50_000])
def test_parameters_are_written_to_behind_no_back(count):
    parameter, master = torch.nn.Parameter(torch.zeros(count).bfloat16()), torch.ones(count)
    loss = (parameter * parameter).sum()
    split(master, parameter, torch.empty(count).short())
    assert torch.equal(parameter, master.bfloat16())
    assert parameter.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("count", [3, 50_000])
def test_inference_tensors_are_taken(count):
    with torch.inference_mode():
        master, out = torch.randn(count), torch.empty(count)
        low, remainder = parts(master)
        split(master, low, remainder)
        merge(low, remainder, out)
        assert torch.equal(out, master)
