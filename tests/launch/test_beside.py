from types import SimpleNamespace

import pytest

from halfstep.launch._beside import Beside
from halfstep.launch._probe import NoProbe


def probe(lowered=None, **answers):
    versions = {"jax": "0.10"}
    known = {"has_lowered": lowered, "versions": versions, "device": "", "peak_memory": None}
    given = known | answers
    return SimpleNamespace(**{name: lambda it=it: it for name, it in given.items()})


@pytest.mark.parametrize(
    ("main", "other", "expected"),
    [(True, None, True), (False, None, None), (None, False, None), (False, False, False)],
)
def test_what_one_does_not_know_is_not_known(main, other, expected):
    assert Beside(probe(main), probe(other)).has_lowered() is expected


def test_a_framework_that_took_no_step_has_no_version():
    main = probe(False, versions={"torch": "2.13"})
    assert Beside(main, probe(False)).versions() == {"torch": "2.13"}
    assert Beside(main, probe(None)).versions() == {"torch": "2.13", "jax": "0.10"}


def test_whichever_knows_is_asked():
    both = Beside(NoProbe(), probe(device="an accelerator", peak_memory=(3, "there")))
    assert (both.device(), both.peak_memory()) == ("an accelerator", (3, "there"))
    assert both.floats([2]) == [2.0]
