import sys
from types import SimpleNamespace

import jax
import pytest

from halfstep.jax import DynamicLossScale, NoOpLossScale, StaticLossScale, _flax, jmp

MADE = (
    lambda: DynamicLossScale(),
    lambda: jax.tree.map(lambda leaf: leaf, DynamicLossScale()),
    lambda: StaticLossScale(2.0),
    lambda: NoOpLossScale(),
    lambda: jmp.DynamicLossScale(2.0),
    lambda: jmp.DynamicLossScale(2.0).adjust(True),
)


@pytest.mark.parametrize("make", MADE)
def test_a_type_is_told_once_and_when_flax_is_there(make, monkeypatch):
    told = []
    flax = SimpleNamespace(register_serialization_state=lambda kind, *functions: told.append(kind))
    monkeypatch.setattr(_flax, "_TOLD", set())
    monkeypatch.delitem(sys.modules, "flax.serialization", raising=False)
    make()
    monkeypatch.setitem(sys.modules, "flax.serialization", flax)
    assert told == []
    values = make(), make()
    assert told == [type(values[0])]
