import math
from types import SimpleNamespace

import pytest

from halfstep.core import Diagnosis, Fault, Ranges, Report
from halfstep.diagnose._examiner import Examiner
from halfstep.launch import NoProbe

FAULT = Fault("ff", "matmul", "forward", "output", "inf", "float16", (2,), 9.0)


class Looking:
    """Looks at nothing, and notes at what it was asked to."""

    has_calls, whole, notes = True, False, ()
    derived = entered_broken = False
    sizes, only = (4.0, {"model": 2.0}), ("model", "Net")

    def __init__(self, fault=None):
        self.asked, self.fault, self.error = [], fault, None

    def start(self):
        self.asked.append("start")

    def forget(self):
        self.asked.append("forget")

    def expect(self, *, sampled):
        self.expected = sampled

    def faults(self, scale):
        self.asked.append(("faults", scale))
        return Diagnosis((self.fault,) if self.fault else ())

    def ranges(self, scale):
        if self.error:
            raise self.error
        self.asked.append(("ranges", scale))
        return SimpleNamespace(ranges=Ranges(), power=3, casts=())


class Probe(NoProbe):
    def __init__(self, looking):
        self.looking = looking

    def look_closely(self):
        return self.looking


class Run:
    """An examiner, and what it has sent."""

    def __init__(self, looking=None, **options):
        self.sent = []
        self.examiner = Examiner(self.sent.append, **{"every": 4, "steps": 0} | options)
        self.examiner.meet(Probe(looking))

    def step(self, *losses, scale=8.0, skipped=False, **record):
        for loss in losses:
            self.examiner("loss", {"value": loss, "source": "backward"})
        values = {"skipped": skipped, "reason": "", "nonfinite": (), "scale": 1.0} | record
        self.examiner("step", {"record": SimpleNamespace(**values)})
        self.examiner("update", {"scale": scale, "scaler": 1})

    def of(self, kind):
        return [each for each in self.sent if each["kind"] == kind]

    @property
    def steps(self):
        self.examiner.finish()
        found = [Report.from_dict(each["report"]).steps for each in self.of("steps")]
        return [step for batch in found for step in batch]


def test_every_step_is_told():
    run = Run()
    run.step(1.0, 2.0, scale=8.0)
    run.step(skipped=True, reason="inf", nonfinite=(("w", "inf"),), scale=4.0)
    first, second = run.steps
    assert (first.number, first.loss, first.scale, first.skipped) == (1, 1.5, 8.0, False)
    assert (second.number, second.loss, second.skipped) == (2, None, True)
    assert (second.reason, second.nonfinite) == ("inf", (("w", "inf"),))


def test_the_scale_of_the_record_wins():
    run = Run()
    run.step(scale=4.0)
    run.examiner("step", {"record": SimpleNamespace(skipped=False, reason="", scale=16.0)})
    run.examiner("update", {"scale": 4.0, "scaler": 1})
    assert [step.scale for step in run.steps] == [4.0, 16.0]


def test_losses_of_a_scaler_are_not_counted_twice():
    run = Run()
    for source, value in (("", 1.0), ("backward", 64.0)):
        run.examiner("loss", {"value": value, "source": source})
    run.step()
    assert run.steps[0].loss == 1.0


def test_the_first_scaler_counts_the_steps():
    run = Run()
    for scaler in (1, 2, 1, 2):
        run.examiner("update", {"scale": 1.0, "scaler": scaler})
    assert len(run.steps) == 2


def test_without_an_optimizer_each_loss_is_a_step():
    run = Run(Looking())
    for loss in (3.0, 2.0):
        run.examiner("loss", {"value": loss, "source": "backward"})
    assert [(step.number, step.loss, step.scale) for step in run.steps] == [
        (1, 3.0, None),
        (2, 2.0, None),
    ]
    assert run.of("look") == []


def test_several_steps_at_once():
    run = Run()
    for loss in (3.0, 2.0):
        run.examiner("loss", {"value": loss, "source": "keras"})
    run.examiner("update", {"scale": 2.0, "scaler": 1, "steps": 2})
    assert [(step.number, step.loss) for step in run.steps] == [(1, 3.0), (2, 2.0)]


def test_early_steps_each_so_many_and_the_last_are_looked_at():
    looking = Looking()
    run = Run(looking, every=4, steps=11)
    for _ in range(11):
        run.step(1.0)
    assert [each["report"]["sampled"] for each in run.of("look")] == [[1], [4], [8], [10], [11]]
    assert run.sent[-1] == {"kind": "enough"}
    assert looking.asked.count("forget") == 11


def test_a_skipped_step_is_searched_for_faults_with_its_scale():
    looking = Looking(FAULT)
    run = Run(looking)
    run.step(1.0)
    looking.asked.clear()
    run.step(1.0, skipped=True, scale=32.0)
    assert looking.asked == [("faults", 32.0), "forget"]
    message = run.of("look")[-1]
    assert (message["failed"], message["outside"]) == (True, False)
    assert Report.from_dict(message["report"]).diagnosis.first == FAULT


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_looked_at_before_the_way_back(loss):
    looking = Looking()
    run = Run(looking)
    run.examiner("loss", {"value": loss, "source": "backward"})
    assert looking.asked == ["start", ("faults", 1.0)]
    (message,) = run.of("look")
    assert message["outside"]
    assert ":" in message["line"]
    run.step(skipped=True)
    assert len([each for each in looking.asked if each[0] == "faults"]) == 1


def test_faults_are_not_searched_for_without_end():
    looking = Looking(FAULT)
    run = Run(looking, every=1000)
    for _ in range(50):
        run.step(1.0, skipped=True)
    assert sum(each["failed"] for each in run.of("look")) == 8


def test_what_cannot_be_looked_at_is_told_and_the_script_goes_on():
    looking = Looking()
    looking.error = ValueError("no copy. This could be because of it\nor not")
    run = Run(looking)
    run.step(1.0)
    run.step(1.0)
    assert run.of("unseen") == [{"kind": "unseen", "step": 1, "why": "ValueError: no copy"}]
    assert len(run.steps) == 2


def test_nothing_is_looked_at_where_no_model_was_called():
    looking = Looking(FAULT)
    looking.has_calls = False
    run = Run(looking)
    run.step(math.nan, skipped=True)
    assert run.of("look") == []


def test_what_is_not_finite_is_looked_at_whatever_the_loss_is():
    looking = Looking(FAULT)
    run = Run(looking)
    run.examiner("nonfinite", {})
    run.step(1.0)
    assert [each["report"]["sampled"] for each in run.of("look") if each["failed"]] == [[1]]


@pytest.mark.parametrize("whole", [True, False])
def test_where_the_loss_is_looked_at_nothing_comes_from_outside(whole):
    looking = Looking()
    looking.whole = whole
    run = Run(looking)
    run.examiner("loss", {"value": math.nan, "source": "backward"})
    assert [each["outside"] for each in run.of("look")] == [not whole]


def test_several_steps_at_once_may_be_more_than_enough():
    run = Run(steps=3)
    for _ in range(2):
        run.examiner("update", {"scale": 1.0, "scaler": 1, "steps": 2})
    assert len(run.of("enough")) == 1


def test_what_there_is_to_say_is_told_at_the_end():
    looking = Looking()
    looking.notes = ("it is so",)
    run = Run(looking)
    run.examiner.finish()
    assert run.of("note") == [{"kind": "note", "text": "it is so"}]


def test_what_the_script_asks_for_is_told_once_with_its_step():
    run = Run()
    asked = {"how": "torch.autocast", "form": "float16", "source": "a.py:3"}
    run.step(1.0)
    for _ in range(2):
        run.examiner("precision", asked)
    run.examiner("precision", asked | {"form": "bfloat16"})
    told = [
        {"kind": "precision", "step": 1, **asked | {"form": form}}
        for form in ("float16", "bfloat16")
    ]
    assert run.of("precision") == told


def test_it_is_said_before_a_step_whether_it_is_looked_at():
    looking = Looking()
    run, expected = Run(looking, every=4), []
    for _ in range(10):
        run.step(1.0)
        expected.append(looking.expected)
    assert [number for number, each in enumerate(expected, 2) if each] == [4, 8, 10]


def test_a_step_that_was_taken_is_looked_at_where_the_first_was_skipped():
    run = Run(Looking(), every=100)
    for skipped in (True, True, False, False):
        run.step(1.0, skipped=skipped)
    sampled = [each for each in run.of("look") if not each["failed"]]
    assert [each["report"]["sampled"] for each in sampled] == [[1], [3]]
    assert [each["sizes"] for each in sampled] == [(4.0, {"model": 2.0})] * 2
    assert {each["only"] for each in sampled} == {("model", "Net")}
