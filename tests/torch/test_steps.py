import copy
import pickle
import warnings

import pytest
import torch

from halfstep.core import SkippedStepsWarning, culprits_text, levels_to_user, overflow_reason
from halfstep.errors import NonFiniteError
from halfstep.torch._scaling._steps import EMPTY, History, ScaleChange, StepRecord, advice


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])


def skipped(**values):
    return StepRecord(**{"skipped": True, "reason": "gradients held inf", **values})


def test_values_are_asked_once_and_only_when_read():
    asked = []

    def ask(name, value):
        return lambda: asked.append(name) or value

    record = StepRecord(skipped=ask("skipped", True), scale=ask("scale", 4.0))
    assert not record.known
    assert asked == []
    assert (record.skipped, record.skipped, record.scale) == (True, True, 4.0)
    assert asked == ["skipped", "scale"]
    assert record.known


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each))]
)
def test_copies_of_a_record_hold_values(copied):
    record = skipped(scale=lambda: 4.0, nonfinite=(("weight", "nan"),))
    again = copied(record)
    assert repr(again) == repr(record)
    assert "nonfinite=(('weight', 'nan'),)" in repr(again)


def test_a_history_counts():
    history, one, other = History(), optimizer(), optimizer()
    history.add(one, StepRecord())
    history.add(one, skipped())
    history.add(other, StepRecord())
    history.add(one, skipped())
    history.add(other, skipped(reason=EMPTY))
    assert (history.steps, history.skipped, history.consecutive_skips) == (5, 3, 2)
    history.add(one, StepRecord())
    assert (history.skipped, history.consecutive_skips) == (3, 0)


def test_steps_known_only_to_the_device_are_counted_when_asked():
    history, one, asked = History(), optimizer(), []
    for value in (True, True, False, True):
        history.add(one, StepRecord(skipped=lambda value=value: asked.append(value) or value))
    assert (history.steps, asked) == (4, [])
    assert history.consecutive_skips == 1
    assert history.skipped == 3
    assert asked == [True, True, False, True]


def test_a_history_is_bounded_and_ignores_what_is_no_change():
    history = History(kept=3)
    for step in range(6):
        history.changed(2.0**step, 2.0 ** (step + 1), "growth")
    history.changed(64.0, 64.0, "nothing")
    assert [change.before for change in history.scale_changes] == [8.0, 16.0, 32.0]
    assert history.scale_changes[-1] == ScaleChange(0, 32.0, 64.0, "growth")


def test_a_copied_history_goes_on():
    history, one = History(max_consecutive_skips=5), optimizer()
    history.add(one, skipped())
    history.changed(8.0, 4.0, "gradients held inf")
    again = pickle.loads(pickle.dumps(history))
    again.add(one, StepRecord())
    assert (again.steps, again.skipped) == (2, 1)
    assert again.scale_changes == history.scale_changes
    assert copy.deepcopy(history).steps == 1


def test_the_limit_raises_at_once_even_for_late_news():
    history, one = History(max_consecutive_skips=2), optimizer()
    history.add(one, skipped())
    history.add(one, StepRecord(skipped=lambda: True, reason=lambda: "gradients held nan"))
    history.add(one, StepRecord(skipped=lambda: False))
    with pytest.raises(NonFiniteError, match="got 2, the latest because gradients held nan"):
        history.settle()
    assert history.consecutive_skips == 0


def test_warnings_come_at_25_and_then_at_every_doubling():
    history, one, told = History(), optimizer(), []
    for step in range(1, 450):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history.add(one, skipped(scale=2.0, nonfinite=(("head.weight", "inf"),)))
        told += [step] * len(caught)
    assert told == [25, 50, 100, 200, 400]
    assert caught == []


def test_what_a_warning_says():
    history, one = History(), optimizer()
    for _ in range(24):
        history.add(one, skipped())
    with pytest.warns(SkippedStepsWarning) as caught:
        history.add(one, skipped(scale=2.0, nonfinite=(("head.weight", "inf"),)))
    text = str(caught[0].message)
    assert text.startswith("25 optimizer steps in a row were skipped, the latest because gradients")
    assert "at loss scale 2" in text
    assert "head.weight (inf)" in text


def test_words():
    many = tuple((f"layer{number}", "nan") for number in range(7))
    assert overflow_reason(many) == "gradients held nan"
    assert overflow_reason(()) == "gradients were not finite"
    assert culprits_text(many).endswith("layer4 (nan) and 2 more")
    assert culprits_text(()) == "unknown"
    assert "no loss scale helps" in advice(skipped(loss_nonfinite=True))
    assert "The loss was finite" in advice(skipped())


def test_the_level_of_the_user():
    assert levels_to_user() == 1
