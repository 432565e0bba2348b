import math

import numpy
import pytest

import halfstep
from halfstep.core import emit, listening, metric, subscribe
from halfstep.errors import UsageError


@pytest.fixture
def heard():
    events = []
    unsubscribe = subscribe(lambda event, values: events.append((event, values)))
    yield events
    unsubscribe()


def test_subscribers_hear_events_with_their_values(heard):
    assert listening()
    emit("loss", value=0.5)
    emit("metric", name="accuracy", value=1.0)
    assert heard == [("loss", {"value": 0.5}), ("metric", {"name": "accuracy", "value": 1.0})]


def test_nobody_listens_after_the_last_unsubscription():
    first, second = subscribe(print), subscribe(print)
    first()
    first()
    assert listening()
    second()
    assert not listening()
    emit("loss", value=0.5)


def test_the_same_callback_can_be_subscribed_twice():
    events = []
    unsubscribes = [subscribe(lambda event, values: events.append(event)) for _ in range(2)]
    emit("loss")
    unsubscribes[0]()
    emit("step")
    unsubscribes[1]()
    assert events == ["loss", "loss", "step"]


def test_a_subscriber_may_unsubscribe_while_it_is_called(heard):
    unsubscribe = subscribe(lambda event, values: unsubscribe())
    emit("loss")
    emit("step")
    assert [event for event, _ in heard] == ["loss", "step"]


@pytest.mark.parametrize("value", [1, 0.5, numpy.float32(0.5), math.nan])
def test_metric_hands_on_a_float(heard, value):
    halfstep.metric("accuracy", value)
    ((event, values),) = heard
    assert event == "metric"
    assert values["name"] == "accuracy"
    assert type(values["value"]) is float
    assert values["value"] == pytest.approx(value, nan_ok=True)


def test_metric_takes_a_tensor(heard):
    torch = pytest.importorskip("torch")
    metric("accuracy", torch.tensor(0.5))
    assert heard == [("metric", {"name": "accuracy", "value": 0.5})]
    with pytest.raises(UsageError):
        metric("accuracy", torch.ones(2))


def test_metric_takes_a_loss_without_a_warning(heard, recwarn):
    torch = pytest.importorskip("torch")
    metric("loss", torch.ones((), requires_grad=True) * 2)
    assert heard == [("metric", {"name": "loss", "value": 2.0})]
    assert not list(recwarn)


def test_metric_without_a_listener_has_no_effect_but_is_checked():
    metric("accuracy", 1.0)
    with pytest.raises(UsageError):
        metric("accuracy", "good")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "accuracy",
            "0.5",
            "The metric 'accuracy' needs a number, got '0.5'. Pass a float or a 0-dim tensor.",
        ),
        (
            "accuracy",
            True,
            "The metric 'accuracy' needs a number, got True. Pass a float or a 0-dim tensor.",
        ),
        (
            "accuracy",
            None,
            "The metric 'accuracy' needs a number, got None. Pass a float or a 0-dim tensor.",
        ),
        ("", 1.0, "A metric needs a name, got ''. Write metric('accuracy', 0.98)."),
        (None, 1.0, "A metric needs a name, got None. Write metric('accuracy', 0.98)."),
    ],
)
def test_errors_of_metric(name, value, message):
    with pytest.raises(UsageError) as caught:
        metric(name, value)
    assert str(caught.value) == message
