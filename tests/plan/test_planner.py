import pytest

from halfstep.core import Machine, Plan, Policy
from halfstep.errors import UsageError
from halfstep.plan._planner import Planner

PLAN = Plan(Policy.named("float32"), Machine("cpu", "a processor"))


class Looking:
    """Looks at nothing, and finds what it is given."""

    def __init__(self, found=PLAN):
        self.found, self.forgot, self.ended = found, 0, False

    def start(self):
        return self.end

    def end(self):
        self.ended = True

    def forget(self):
        self.forgot += 1

    def plan(self, *, tell, seconds, budget):
        tell(f"{seconds} {budget}")
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class Blind(Looking):
    plan = property()


class Probe:
    def __init__(self, looking):
        self.looking = looking

    def look_closely(self):
        return self.looking


def sent_by(looking, *, step=3, updates=((1.0, 7, 1),) * 5):
    sent = []
    planner = Planner(sent.append, step=step, seconds=5.0, budget=0.1)
    planner.meet(Probe(looking))
    for scale, scaler, steps in updates:
        planner("update", {"scale": scale, "scaler": scaler, "steps": steps})
        planner("loss", {"value": 1.0})
        if any(each["kind"] in ("plan", "refused") for each in sent):
            break
    return planner, sent


def test_the_step_that_was_asked_for_is_measured():
    looking = Looking()
    planner, sent = sent_by(looking)
    assert sent == [
        {"kind": "telling", "text": "5.0 0.1"},
        {"kind": "plan", "plan": PLAN.to_toml()},
    ]
    assert (planner.steps, looking.forgot) == (3, 2)


def test_steps_are_those_of_the_first_optimizer():
    planner, _ = sent_by(Looking(), updates=[(1.0, 7, 1), (1.0, 8, 1), (1.0, 7, 1), (1.0, 8, 1)])
    assert planner.steps == 2


def test_several_steps_may_end_at_once():
    planner, sent = sent_by(Looking(), updates=[(1.0, None, 5)])
    assert planner.steps == 5
    assert sent[-1]["kind"] == "plan"


@pytest.mark.parametrize(
    ("looking", "why"),
    [
        (Looking(None), "No model was called"),
        (Looking(UsageError("It cannot be.")), "It cannot be."),
        (Blind(), "plan knows training scripts of PyTorch"),
        (None, "plan knows training scripts of PyTorch"),
    ],
)
def test_why_there_is_no_plan(looking, why):
    _, sent = sent_by(looking)
    assert sent[-1]["kind"] == "refused"
    assert sent[-1]["why"].startswith(why)


def test_another_framework_is_looked_at_instead():
    first, second = Looking(), Looking()
    planner, _ = sent_by(first, updates=[])
    planner.meet(Probe(second))
    assert (first.ended, second.ended) == (True, False)
