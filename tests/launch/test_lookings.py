from types import SimpleNamespace

import pytest

from halfstep.core import Diagnosis, Fault
from halfstep.launch._lookings import Lookings

FAULT = Diagnosis((Fault("ff", "matmul", "forward", "output", "inf", "float16", (2,), 9.0),))


def looking(found=None, *, has_calls=True, whole=True, notes=(), ended=None):
    return SimpleNamespace(
        has_calls=has_calls,
        whole=whole,
        notes=notes,
        entered_broken=False,
        faults=lambda scale: found or Diagnosis(),
        ranges=lambda scale: found,
        start=lambda: lambda: ended.append(found),
        forget=lambda: None,
    )


def test_the_first_that_finds_something_is_believed():
    assert Lookings([looking(), None, looking(FAULT)]).faults(1.0) == FAULT
    assert not Lookings([looking()]).faults(1.0)


def test_one_that_saw_no_call_is_not_asked():
    blind = looking(FAULT, has_calls=False)
    both = Lookings([blind, looking()])
    assert (both.has_calls, both.faults(1.0), both.ranges(1.0)) == (True, Diagnosis(), None)
    assert not Lookings([blind]).has_calls


@pytest.mark.parametrize("whole", [True, False])
def test_the_whole_step_is_seen_if_each_sees_it(whole):
    found = Lookings([looking(whole=whole), looking(), looking(whole=False, has_calls=False)])
    assert found.whole is whole


def test_all_begin_and_end():
    ended = []
    end = Lookings([looking("a", ended=ended), looking("b", ended=ended)]).start()
    end()
    end()
    assert ended == ["b", "a"]


def test_notes_of_all_are_told():
    assert Lookings([looking(notes=("a",)), looking(notes=("b", "c"))]).notes == ["a", "b", "c"]
