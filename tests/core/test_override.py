import threading

import pytest

from halfstep.core import Policy, override_policy, overriding_policy
from halfstep.errors import PolicyError


def test_overrides_nest_and_end():
    assert overriding_policy() is None
    with override_policy("float32") as outer:
        assert overriding_policy() is outer == Policy.named("float32")
        with override_policy(Policy()):
            assert overriding_policy() == Policy()
        assert overriding_policy() is outer
    assert overriding_policy() is None


def test_an_exception_ends_the_override():
    with pytest.raises(ZeroDivisionError), override_policy("float32"):
        raise ZeroDivisionError
    assert overriding_policy() is None


def test_an_unknown_policy_overrides_nothing():
    with pytest.raises(PolicyError), override_policy("float31"):
        pass
    assert overriding_policy() is None


def test_every_thread_sees_the_override():
    seen = []
    with override_policy("mixed_bfloat16"):
        thread = threading.Thread(target=lambda: seen.append(overriding_policy()))
        thread.start()
        thread.join()
    assert seen == [Policy.named("mixed_bfloat16")]
