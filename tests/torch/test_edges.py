"""What is written keeps each value, and each derivative, that an operation has by itself."""

import pytest
import torch

from halfstep.torch._observing._edges import edge_of

ANY = torch.tensor([0.5, 2.0, -3.0, 0.0, 1.0, -0.5])
# Word, the constants it is called with, what is called with h, and what the text names besides.
CALLS = {
    "sqrt": ("sqrt", (), torch.sqrt, {}),
    "rsqrt": ("rsqrt", (), torch.rsqrt, {}),
    "log": ("log", (), torch.log, {}),
    "log2": ("log2", (), torch.log2, {}),
    "log10": ("log10", (), torch.log10, {}),
    "log1p": ("log1p", (), torch.log1p, {}),
    "acos": ("acos", (), torch.acos, {}),
    "asin": ("asin", (), torch.asin, {}),
    "atanh": ("atanh", (), torch.atanh, {}),
    "reciprocal": ("reciprocal", (), torch.reciprocal, {"dividend": 1}),
    "divide": ("divide", (), lambda h: 3 / h, {"dividend": 3}),
    **{
        f"power {number}": ("power", (number,), lambda h, p=number: h**p, {"power": number})
        for number in (0.5, 1.5, -0.5, -2.0, -3.0)
    },
    **{
        f"powers {place}": ("power", (), lambda h, p=power: h ** p.to(h.dtype), {"power": power})
        for place, power in enumerate(ANY)
    },
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def numbers(dtype):
    """Returns all finite numbers of a format of 16 bits, and for float32 those around its edges."""
    if dtype is not torch.float32:
        found = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        return found[found.isfinite()]
    ends = torch.tensor([0.0, 1.0, -1.0, 2.0**-126, -(2.0**-126), 2.0**-149])
    inside = torch.nextafter(ends, torch.tensor(0.0))
    beyond = torch.nextafter(ends, torch.tensor(torch.inf))
    return torch.cat([ends, inside, beyond, torch.linspace(-3, 3, 4001)])


def with_derivative(call, h):
    h = h.clone().requires_grad_()
    made = call(h)
    made.sum().backward()
    return made.detach(), h.grad


def text_of(text, names):
    *before, last = text.splitlines()

    def call(h):
        known = {"torch": torch, "h": h, **names}
        exec("\n".join(before), known)
        return eval(last, known)

    return call


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_safe_is_the_same_elsewhere(name, dtype):
    word, constants, call, names = CALLS[name]
    edge, h = edge_of(word, constants), numbers(dtype)
    value, derivative = with_derivative(call, h)
    written, moved = with_derivative(text_of(edge.safe(word), names), h)
    right = value.isfinite() & derivative.isfinite()
    assert right.any()
    assert torch.equal(written[right], value[right])
    assert torch.equal(moved[right], derivative[right])


@pytest.mark.parametrize("name", ["sqrt", "acos", "asin", "power 0.5", "powers 0"])
def test_a_value_at_the_edge_that_is_right_stays(name):
    word, constants, call, names = CALLS[name]
    h = torch.tensor([0.0, 1.0] + [-1.0] * name.startswith("a"))
    written, derivative = with_derivative(text_of(edge_of(word, constants).safe(word), names), h)
    assert torch.equal(written, call(h))
    assert derivative.isfinite().all()


@pytest.mark.parametrize("name", ["log", "log2", "log10", "log1p"])
def test_a_logarithm_at_its_end_is_not_what_it_is_at_one(name):
    end = torch.tensor([-1.0 if name == "log1p" else 0.0])
    written, _ = with_derivative(text_of(edge_of(name, ()).safe(name), {}), end)
    assert written.item() < -4


WITH_EPSILON = [name for name in CALLS if edge_of(*CALLS[name][:2]).apart]


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", WITH_EPSILON)
def test_epsilon_moves_only_what_is_at_the_edge(name, dtype):
    word, constants, call, _ = CALLS[name]
    edge, h = edge_of(word, constants), numbers(dtype)
    value, derivative = with_derivative(call, h)
    known = {"torch": torch, "h": h}
    exec(edge.written_apart(word, str(dtype).removeprefix("torch.")), known)
    right = value.isfinite() & derivative.isfinite()
    assert torch.equal(known["h"][right], h[right])
    assert not edge.is_there(known["h"]).any()
    assert torch.equal(edge.kept_apart(known["epsilon"])(h), known["h"])
