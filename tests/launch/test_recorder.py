import contextlib
import threading
from types import SimpleNamespace

from halfstep.launch._log import RunLog
from halfstep.launch._probe import NoProbe
from halfstep.launch._recorder import Recorder
from halfstep.launch._runs import Skip


class CountingProbe(NoProbe):
    """Counts how often it is made to wait, and what is open."""

    def __init__(self):
        self.reads = 0
        self.counting, self.at_rest, self.lowered = False, True, False
        self.time = 0.0

    def floats(self, values):
        self.reads += 1
        return super().floats(values)

    def tick(self):
        self.time += 1.0
        return self.time

    def may_count(self):
        return self.at_rest

    def has_lowered(self):
        return self.lowered

    @contextlib.contextmanager
    def saved_bytes(self):
        self.counting = True
        yield SimpleNamespace(bytes=640, may_end=lambda: self.at_rest)
        self.counting = False


class Session:
    def __init__(self):
        self.now, self.probe, self.log = 0.0, CountingProbe(), RunLog("float32", 0)
        self.recorder = Recorder(self.probe, self.log.add, lambda: self.now)

    def step(self, loss, reason="", **update):
        self.recorder("loss", {"value": loss})
        self.recorder("step", {"record": SimpleNamespace(skipped=bool(reason), reason=reason)})
        self.recorder("update", {"scale": 8.0 * loss, **update})

    def result(self):
        self.recorder.flush()
        return self.log.result(exit_code=0, error="", seconds=1.0)


def test_everything_arrives():
    session = Session()
    session.step(3.0)
    session.step(2.0, "gradients held inf")
    session.recorder("metric", {"name": "accuracy", "value": 0.5})
    session.step(1.0)
    run = session.result()
    assert (run.steps, run.losses, run.scale) == (3, (3.0, 2.0, 1.0), 8.0)
    assert run.skipped == (Skip(2, "gradients held inf"),)
    assert run.metrics == (("accuracy", 0.5, 2),)


def test_step_times_go_on_across_batches():
    session = Session()
    for _ in range(3):
        session.step(1.0)
        session.recorder.flush()
    session.step(1.0)
    assert session.result().step_seconds == (1.0, 1.0, 1.0)


def test_steps_that_end_together_share_their_time():
    session = Session()
    session.step(1.0, steps=4)
    session.step(1.0, steps=4)
    session.step(1.0)
    run = session.result()
    assert (run.steps, run.step_seconds) == (9, (0.25, 0.25, 0.25, 0.25, 1.0))


def test_values_are_read_in_batches():
    session = Session()
    for _ in range(100):
        session.step(1.0)
    assert session.probe.reads == 0
    session.now = 1.0
    session.step(1.0)
    assert session.probe.reads <= 6


def test_saved_bytes_are_counted_between_the_first_and_the_second_update():
    session = Session()
    session.recorder("loss", {"value": 1.0})
    assert not session.probe.counting
    session.step(1.0)
    assert session.probe.counting
    session.step(1.0)
    assert not session.probe.counting
    run = session.result()
    assert (run.saved_bytes, run.measured_step) == (640, 0)


def test_no_count_begins_where_it_may_not():
    session = Session()
    session.probe.at_rest = False
    session.step(1.0)
    session.probe.at_rest = True
    session.step(1.0)
    assert not session.probe.counting
    assert session.result().saved_bytes is None


def test_a_count_ends_where_it_may_and_is_of_one_step_or_none():
    session = Session()
    session.step(1.0)
    session.probe.at_rest = False
    session.step(1.0)
    assert session.probe.counting
    session.probe.at_rest = True
    session.step(1.0)
    assert not session.probe.counting
    assert session.result().saved_bytes is None


def test_one_update_counts_no_bytes():
    session = Session()
    session.step(1.0)
    assert session.result().saved_bytes is None


def test_steps_are_the_updates_of_the_first_of_several_scalers():
    session = Session()
    for _ in range(2):
        session.step(1.0, scaler=7)
        assert session.probe.counting is (session.recorder._updates == 1)
        session.step(0.5, "gradients held inf", scaler=8)
        assert session.probe.counting is (session.recorder._updates == 1)
    session.step(1.0, scaler=7)
    run = session.result()
    assert (run.steps, run.optimizer_steps, run.scalers) == (3, 5, 2)
    assert (len(run.step_seconds), run.scale) == (2, 8.0)
    assert [skip.step for skip in run.skipped] == [2, 3]
    assert (run.saved_bytes, run.measured_step) == (640, 0)


def test_losses_of_backward_count_until_a_scaler_tells_of_them():
    for source in ("scale", ""):
        session = Session()
        for _ in range(2):
            session.recorder("loss", {"value": 1.0} | ({"source": source} if source else {}))
            session.recorder("backward", {})
            session.recorder("loss", {"value": 65536.0, "source": "backward"})
            session.recorder("update", {"scale": 65536.0})
        run = session.result()
        assert run.losses == (1.0, 1.0)
        assert run.backwards == 2
    session = Session()
    session.recorder("loss", {"value": 3.0, "source": "backward"})
    assert session.result().losses == (3.0,)


def test_another_probe_takes_over():
    session, later = Session(), CountingProbe()
    session.step(2.0)
    session.recorder.use(later)
    later.time = 100.0
    for _ in range(2):
        session.step(1.0)
    run = session.result()
    assert run.losses == (2.0, 1.0, 1.0)
    assert run.step_seconds == (1.0,)  # no time between two clocks
    assert later.reads > 0


def test_bytes_are_given_up_where_the_probe_does():
    session = Session()
    session.probe.saved_bytes = lambda: contextlib.nullcontext(
        SimpleNamespace(bytes=None, may_end=lambda: True)
    )
    for _ in range(3):
        session.step(1.0)
    assert session.result().saved_bytes is None


def test_several_threads():
    session = Session()
    session.step(1.0, scaler=1)  # this thread begins to count bytes

    def train():
        for _ in range(50):
            session.step(1.0, scaler=1)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.probe.counting  # left to the thread that it is for
    run = session.result()
    assert (run.steps, len(run.losses), run.saved_bytes) == (201, 201, None)


def test_the_scale_after_the_step_of_the_first_optimizer():
    session = Session()
    session.recorder("scale", {"scale": 3.0, "scalers": [1]})
    session.step(1.0, scaler=1)
    session.recorder("scale", {"scale": 4.0, "scalers": [1, 2]})
    session.recorder("scale", {"scale": 5.0, "scalers": [2]})
    assert session.result().scale == 4.0


def test_regions():
    session = Session()
    for policy in ("mixed_bfloat16", "mixed_bfloat16", "mixed_float16"):
        session.recorder("region", {"policy": policy})
    run = session.result()
    assert (run.regions, run.region_policies) == (3, ("mixed_bfloat16", "mixed_float16"))


def test_what_auto_stands_for():
    session = Session()
    for policy in ("mixed_bfloat16", "float32", "mixed_bfloat16"):
        session.recorder("auto", {"policy": policy, "why": f"auto chose {policy}."})
    run = session.result()
    assert run.auto == ("mixed_bfloat16", "float32")
    assert run.why == ("auto chose mixed_bfloat16.", "auto chose float32.")


def test_what_ran_in_low_precision():
    session = Session()
    session.recorder("loss", {"value": 1.0, "source": "backward"})
    session.recorder("loss", {"value": 1.0, "source": "scale"})
    assert (session.result().lowered, session.result().torch_amp) == (False, True)
    session.recorder("loss", {"value": 1.0})  # of a scaler of halfstep
    assert session.result().lowered is True
    session = Session()
    assert (session.result().lowered, session.result().torch_amp) == (False, False)
    session.probe.lowered = True
    assert session.result().lowered is True


def test_unknown_events_are_left_alone():
    session = Session()
    session.recorder("later", {"value": 1.0})
    assert session.result().steps == 0


def test_progress_text():
    session = Session()
    assert session.log.text == "0 steps"
    session.step(0.123456)
    session.recorder.flush()
    assert session.log.text == "1 steps, loss 0.1235"
