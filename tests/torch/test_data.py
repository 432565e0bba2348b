"""What can be saved is what can be loaded again, and the error names the part that cannot."""

import argparse
import io
import pathlib
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from enum import Enum

import numpy
import pytest
import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.torch._data import refuse_all_but_data

Pair = namedtuple("Pair", "first second")


class Colour(Enum):
    RED = 1


class Sub(torch.Tensor):
    pass


@dataclass
class Settings:
    width: int = 3


def tagged(tag):
    parameter = nn.Parameter(torch.ones(1))
    parameter.tag = tag
    return parameter


def with_attribute(value):
    state = OrderedDict()
    state._metadata = {"extra": value}
    return state


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


DATA = {
    "none": None,
    "int": -(1 << 2000),
    "float": float("inf"),
    "complex": 1j,
    "text": "text",
    "bytes": b"text",
    "bytearray": bytearray(),
    "size": torch.Size([1]),
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "layout": torch.strided,
    "storage": torch.ones(2).untyped_storage(),
    "set": {1, "a"},
    "counter": Counter([1]),
    "tuple": (1, [2, {"a": torch.ones(1)}]),
    "keys": {1: 1, ("a", 2): 2, None: 3},
    "parameter": nn.Parameter(torch.ones(1)),
    "tagged": tagged({"a": [1]}),
    "buffer": nn.Buffer(torch.ones(1)),
    "meta": torch.ones(2, device="meta"),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    "module": nn.BatchNorm1d(2).state_dict(),
    "generator": torch.get_rng_state(),
    "nested": nested(100),
}
NOT_DATA = {
    "module": nn.Linear(1, 1),
    "function": len,
    "lambda": lambda: 0,
    "class": nn.Linear,
    "big int": 1 << 2100,
    "empty bytes": b"",
    "frozenset": frozenset([1]),
    "range": range(3),
    "enum": Colour.RED,
    "defaultdict": defaultdict(int),
    "namedtuple": Pair(1, 2),
    "path": pathlib.PurePosixPath("a"),
    "numpy scalar": numpy.float64(1),
    "numpy array": numpy.ones(2),
    "dataclass": Settings(),
    "namespace": argparse.Namespace(a=1),
    "subclass": torch.ones(1).as_subclass(Sub),
    "tagged": tagged(len),
    "attribute": with_attribute(len),
    "generator": torch.Generator(),
}


def loads(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("value", DATA.values(), ids=DATA.keys())
def test_data_is_saved_and_can_be_loaded(value):
    refuse_all_but_data(value)
    loads(value)


@pytest.mark.parametrize("value", NOT_DATA.values(), ids=NOT_DATA.keys())
def test_what_is_refused_could_not_be_loaded(value):
    with pytest.raises(UsageError):
        refuse_all_but_data([value])
    with pytest.raises(Exception, match=r"Weights only load failed|pickle"):
        loads(value)


def schedulers(optimizer):
    kinds = torch.optim.lr_scheduler
    yield kinds.OneCycleLR(optimizer, 0.1, 10)
    yield kinds.LambdaLR(optimizer, lambda epoch: 1.0)
    yield kinds.MultiStepLR(optimizer, [1, 2])
    yield kinds.ReduceLROnPlateau(optimizer)
    steps = [kinds.LinearLR(optimizer), kinds.CosineAnnealingLR(optimizer, 3)]
    yield kinds.SequentialLR(optimizer, steps, [2])
    yield torch.optim.swa_utils.SWALR(optimizer, 0.1)


def test_state_dicts_are_data():
    model = nn.Linear(2, 2)
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS):
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step(lambda: torch.zeros(1, requires_grad=True))
        refuse_all_but_data(optimizer.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scheduler in schedulers(optimizer):
        refuse_all_but_data(scheduler.state_dict())


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (nn.Linear(1, 1), "got Linear at state. Save its state_dict()."),
        ({"a": [0, {"b": len}]}, "got builtin_function_or_method at state['a'][1]['b']. Leave"),
        ({1: (0, Pair(1, 2))}, "got Pair at state[1][1]. Convert it with list()."),
        ({"a{0}": [len]}, "got builtin_function_or_method at state['a{0}'][0]. Leave it out, or "),
        ({"a": {len: 1}}, "got builtin_function_or_method at a key of state['a']."),
        ({"a": {len}}, "got builtin_function_or_method at an element of state['a']."),
        ({"w": tagged(len)}, "got builtin_function_or_method at state['w'].tag."),
        ({"m": with_attribute(len)}, "at state['m']._metadata['extra']."),
        ([b""], "got empty bytes at state[0]. Save it as a str."),
        ([1 << 2100], "got an int of 2101 bits at state[0]. Save it as a str."),
        ([numpy.float64(1)], "got float64 at state[0]. Convert it with item() or torch.as_tensor"),
        ([torch.ones(1).as_subclass(Sub)], "got Sub at state[0]. Convert it with as_subclass("),
        ([defaultdict(int)], "got defaultdict at state[0]. Convert it with dict()."),
        ([pathlib.PurePosixPath("a")], "got PurePosixPath at state[0]. Convert it with str()."),
        ([Settings()], "got Settings at state[0]. Convert it with dataclasses.asdict()."),
        ([argparse.Namespace()], "got Namespace at state[0]. Convert it with vars()."),
    ],
)
def test_the_error_names_the_part_and_what_to_do(state, text):
    with pytest.raises(UsageError) as caught:
        refuse_all_but_data(state)
    assert str(caught.value).startswith("save needs data only, got ")
    assert text in str(caught.value)


def test_allowed_classes_are_data():
    with torch.serialization.safe_globals([Colour]):
        refuse_all_but_data([Colour.RED])
    with torch.serialization.safe_globals([(Colour, "elsewhere.Colour")]):
        refuse_all_but_data([Colour.RED])


def test_a_state_that_holds_itself_is_walked_once():
    state = {"a": [1]}
    state["again"] = state
    refuse_all_but_data(state)
