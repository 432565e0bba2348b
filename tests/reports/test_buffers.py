"""Half results written into float32 buffers, and half buffers that get float32 values."""

import pytest
import torch
from torch import nn

from halfstep.torch import autocast

# PyTorch says that two of the forms are new or old.
pytestmark = [
    pytest.mark.filterwarnings("ignore:index_reduce"),
    pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter"),
]

ROWS = torch.tensor([0, 3, 3, 1, 2, 5])
WIDE = ROWS[:, None].expand(6, 8)
MASK = torch.tensor([1, 0, 1, 1, 0, 1]).bool()


def _set(index, pick=lambda h: h):
    return lambda b, h: b.__setitem__(index, pick(h))


IN_PLACE = {
    "b[0] = ": _set(0, lambda h: h[0]),
    "b[:3] = ": _set(slice(3), lambda h: h[:3]),
    "b[:, 2] = ": _set((slice(None), 2), lambda h: h[:, 0]),
    "b[...] = ": _set(...),
    "b[idx] = ": _set(ROWS),
    "b[mask] = ": _set(MASK, lambda h: h[MASK]),
    "b[mask] = 0-dim": _set(MASK, lambda h: h[0, 0]),
    "b[idx, idx] = ": _set((ROWS, ROWS), lambda h: h[:, 0]),
    "b[idx, 1:3] = ": _set((ROWS, slice(1, 3)), lambda h: h[:, :2]),
    "b[b == 0] = ": lambda b, h: b.__setitem__(b == 0, h.flatten()),
    "index_put_": lambda b, h: b.index_put_((ROWS,), h),
    "index_put_ accumulate": lambda b, h: b.index_put_((ROWS,), h, accumulate=True),
    "index_add_": lambda b, h: b.index_add_(0, ROWS, h),
    "index_add_ alpha": lambda b, h: b.index_add_(0, ROWS, h, alpha=2),
    "index_copy_": lambda b, h: b.index_copy_(0, ROWS, h),
    "index_fill_": lambda b, h: b.index_fill_(0, ROWS, h[0, 0]),
    "index_reduce_": lambda b, h: b.index_reduce_(0, ROWS, h, "amax"),
    "scatter_": lambda b, h: b.scatter_(dim=0, index=WIDE, src=h),
    "scatter_ reduce": lambda b, h: b.scatter_(0, WIDE, h.detach(), reduce="add"),
    "scatter_add_": lambda b, h: b.scatter_add_(0, WIDE, h),
    "scatter_reduce_": lambda b, h: b.scatter_reduce_(0, WIDE, h, "amax"),
    "masked_scatter_": lambda b, h: b.masked_scatter_(MASK[:, None], h),
    "masked_fill_": lambda b, h: b.masked_fill_(MASK[:, None], h[0, 0]),
    "put_": lambda b, h: b.put_(ROWS, h[:, 0]),
    "copy_": lambda b, h: b.copy_(h),
    "fill_": lambda b, h: b.fill_(h[0, 0]),
    "add_": lambda b, h: b.add_(h),
    "mul_": lambda b, h: b.add_(1).mul_(h),
    "addcmul_": lambda b, h: b.addcmul_(h, h),
    "addcdiv_": lambda b, h: b.addcdiv_(h, h.abs() + 1),
    "lerp_": lambda b, h: b.lerp_(h, 0.1),
    "lerp_ by a tensor": lambda b, h: b.lerp_(h, h.sigmoid()),
    "addmm_": lambda b, h: b.addmm_(h, torch.eye(8)),
    "addr_": lambda b, h: b.addr_(h[:, 0], h[0]),
}
FUNCTIONAL = {
    "index_put": lambda b, h: b.index_put((ROWS,), h),
    "index_put accumulate": lambda b, h: torch.index_put(b, (ROWS,), h, True),
    "index_add": lambda b, h: b.index_add(0, ROWS, h),
    "index_copy": lambda b, h: torch.index_copy(b, 0, ROWS, h),
    "index_fill": lambda b, h: b.index_fill(0, ROWS, h[0, 0]),
    "index_reduce": lambda b, h: b.index_reduce(0, ROWS, h, "mean"),
    "scatter": lambda b, h: b.scatter(0, WIDE, h),
    "scatter_add": lambda b, h: torch.scatter_add(b, 0, WIDE, h),
    "scatter_reduce": lambda b, h: b.scatter_reduce(0, WIDE, h, "mean", include_self=False),
    "masked_scatter": lambda b, h: b.masked_scatter(MASK[:, None], h),
    "masked_fill": lambda b, h: b.masked_fill(MASK[:, None], h[0, 0]),
    "put": lambda b, h: b.put(ROWS, h[:, 0]),
    "select_scatter": lambda b, h: b.select_scatter(h[0], 0, 1),
    "slice_scatter": lambda b, h: b.slice_scatter(h[:2], 0, 1, 3),
    "diagonal_scatter": lambda b, h: b.diagonal_scatter(h[:, 0]),
    "cat": lambda b, h: torch.cat([b, h]),
    "stack": lambda b, h: torch.stack([b, h]),
    "where": lambda b, h: torch.where(b == 0, h, b),
    "block_diag": torch.block_diag,
}


def _low_and_buffer():
    return nn.Linear(8, 8), torch.randn(6, 8), torch.zeros(6, 8)


@pytest.mark.parametrize("way", IN_PLACE)
def test_a_half_result_is_written_into_a_float32_buffer(way, low):
    """Index put requires the source and destination dtypes match, got Float and Half."""
    layer, inputs, buffer = _low_and_buffer()
    with autocast("cpu", dtype=low):
        IN_PLACE[way](buffer, layer(inputs))
    assert buffer.dtype == torch.float32
    assert buffer.abs().sum() > 0


@pytest.mark.parametrize("way", FUNCTIONAL)
def test_a_half_result_is_combined_with_a_float32_buffer(way, low):
    """scatter(): expected self.dtype to be equal to src.dtype, in a graph net under autocast."""
    layer, inputs, buffer = _low_and_buffer()
    with autocast("cpu", dtype=low):
        result = FUNCTIONAL[way](buffer, layer(inputs))
    assert result.dtype == torch.float32
    result.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("way", [*IN_PLACE, *FUNCTIONAL])
def test_a_float32_value_is_written_into_a_half_buffer(way, low):
    """The queue of a memory bank is half, and the features that go in are float32."""
    buffer = torch.zeros(6, 8, dtype=low)
    with autocast("cpu", dtype=low):
        result = (IN_PLACE | FUNCTIONAL)[way](buffer, torch.randn(6, 8))
    assert buffer.dtype == low
    assert way in IN_PLACE or result.dtype in (low, torch.float32)


def test_gradients_flow_through_a_written_buffer(low):
    """Mixture of experts: every expert adds its half output to a float32 result by index."""
    experts, inputs = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), torch.randn(6, 8)
    with autocast("cpu", dtype=low):
        result = torch.zeros_like(inputs)
        for number, expert in enumerate(experts):
            rows = torch.arange(number, 6, 3)
            result.index_add_(0, rows, expert(inputs[rows]))
    result.sum().backward()
    assert all(expert.weight.grad.abs().sum() > 0 for expert in experts)


def test_padded_batches_are_filled_row_by_row(low):
    """pad_sequence by hand: a float32 tensor of zeros, filled with the outputs of an encoder."""
    encoder, padded = nn.Linear(8, 8), torch.zeros(2, 5, 8)
    with autocast("cpu", dtype=low):
        for row, length in enumerate((3, 5)):
            padded[row, :length] = encoder(torch.randn(length, 8))
        padded.sum().backward()
    assert encoder.weight.grad.abs().sum() > 0


OUT = {
    "mm": lambda h, out: torch.mm(h, torch.eye(8), out=out),
    "matmul": lambda h, out: torch.matmul(h, torch.eye(8), out=out),
    "add": lambda h, out: torch.add(h, torch.ones(8), out=out),
    "exp": lambda h, out: torch.exp(h, out=out),
    "cumsum": lambda h, out: torch.cumsum(h, 0, out=out),
}


@pytest.mark.parametrize("operation", OUT)
def test_out_arguments_behave_as_in_plain_autocast(operation, low):
    """Code with out= does in a region what it does in torch.autocast."""
    inputs, out = torch.randn(6, 8), torch.empty(6, 8)
    with torch.autocast("cpu", dtype=low):
        expected = OUT[operation](inputs, torch.empty(6, 8))
    with autocast("cpu", dtype=low):
        OUT[operation](inputs, out)
    assert torch.equal(out, expected)
