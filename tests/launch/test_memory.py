from pathlib import Path

from halfstep.launch import _memory


def test_growth_is_seen_although_it_is_given_back():
    growth = _memory.MemoryGrowth()
    block = bytearray(2**26)
    del block
    assert 2**25 < growth.bytes() < 2**27


def test_where_the_system_tells_less(monkeypatch):
    monkeypatch.setattr(_memory, "_STATUS", Path("no such file"))
    monkeypatch.setattr(_memory, "_CLEAR", Path("no/such/file"))
    growth = _memory.MemoryGrowth()
    assert growth.bytes() >= 0


def test_where_the_system_tells_nothing(monkeypatch):
    monkeypatch.setattr(_memory, "_peak", lambda: None)
    monkeypatch.setattr(_memory, "_resident", lambda field: None)
    assert _memory.MemoryGrowth().bytes() is None
