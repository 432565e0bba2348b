from types import SimpleNamespace

import pytest

from halfstep.launch._joined import Joined
from halfstep.launch._probe import NoProbe


def probe(**answers):
    asked = []
    found = NoProbe()
    found.set_policy = asked.append
    for name, answer in answers.items():
        setattr(found, name, lambda answer=answer: answer)
    return found, asked


@pytest.mark.parametrize(
    ("other", "keras", "expected"),
    [(None, None, None), (False, None, None), (True, None, True), (False, False, False)],
)
def test_nobody_knows_what_keras_does_not_know(other, keras, expected):
    joined = Joined(probe(has_lowered=keras)[0], probe(has_lowered=other)[0])
    assert joined.has_lowered() is expected


def test_keras_is_asked_first():
    keras, _ = probe(device="its own", peak_memory=(3, "here"), versions={"keras": "3.15"})
    other, _ = probe(device="another", peak_memory=(4, "there"), versions={"torch": "2.13"})
    joined = Joined(keras, other)
    assert (joined.device(), joined.peak_memory()) == ("its own", (3, "here"))
    assert list(joined.versions()) == ["keras", "torch"]
    assert Joined(SimpleNamespace(device=str), other).device() == "another"


def test_both_follow_the_policy():
    (keras, first), (other, second) = probe(), probe()
    Joined(keras, other).set_policy("mixed_bfloat16")
    assert first == second == ["mixed_bfloat16"]
    for each in (keras, other):
        each.offer_policy = each.set_policy
    Joined(keras, other).offer_policy("mixed_float16")
    assert first == second == ["mixed_bfloat16", "mixed_float16"]
