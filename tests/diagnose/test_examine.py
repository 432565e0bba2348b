import pytest

from halfstep.core import Exponents, Range, Ranges, Report
from halfstep.diagnose import Examination, examine
from halfstep.diagnose._heard import Heard
from halfstep.errors import PolicyError, UsageError
from tests.launch.scripts import TRAINING, hide_frameworks, write


class Watcher:
    def __init__(self):
        self.texts, self.lines = [], []

    def update(self, text):
        self.texts.append(text)

    def output(self, line):
        self.lines.append(line)


@pytest.fixture
def no_framework(monkeypatch, tmp_path):
    hide_frameworks(monkeypatch, tmp_path / "hidden")


def run(path, text, **options):
    watcher = Watcher()
    asked = Examination.of(write(path / "train.py", text), **options)
    return examine(asked, watcher), watcher


@pytest.mark.usefixtures("no_framework")
def test_the_steps_of_a_script(tmp_path):
    report, watcher = run(tmp_path, TRAINING + "print('done')\n")
    assert len(report.steps) == 20
    assert [step.number for step in report.skipped] == [1]
    assert report.steps[0].loss == pytest.approx(2.0, abs=0.02)
    assert report.policy == "mixed_float16 (doctor's choice: the script asks for none)"
    assert report.error == ""
    assert watcher.lines == ["done"]
    assert watcher.texts[-1].startswith("20 steps, loss 0.1")
    assert Report.from_dict(report.to_dict()) == report


@pytest.mark.usefixtures("no_framework")
def test_it_stops_after_so_many_steps(tmp_path):
    report, _ = run(tmp_path, TRAINING + "while True: pass\n", steps=5)
    assert len(report.steps) == 5
    assert (report.error, report.stopped) == ("", False)


@pytest.mark.usefixtures("no_framework")
def test_whoever_interrupts_it_gets_what_was_found_so_far(tmp_path):
    class Impatient(Watcher):
        def output(self, line):
            raise KeyboardInterrupt

    script = write(tmp_path / "train.py", "print('ready', flush=True)\nwhile True: pass\n")
    report = examine(Examination.of(script), Impatient())
    assert (report.error, report.steps, report.stopped) == ("", (), True)


@pytest.mark.usefixtures("no_framework")
def test_the_error_of_a_script_is_told(tmp_path):
    report, _ = run(tmp_path, TRAINING + "raise ValueError('oh')\n")
    assert report.error.splitlines()[-1] == "ValueError: oh"
    assert len(report.steps) == 20


@pytest.mark.usefixtures("no_framework")
def test_a_process_that_dies_without_a_word_is_told_of(tmp_path):
    report, _ = run(tmp_path, "import os; os._exit(3)\n")
    assert report.error == "The process ended with exit code 3."


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 0}, UsageError, "doctor needs --every >= 1, got 0"),
        ({"steps": 0}, UsageError, "doctor needs --steps >= 1, got 0"),
        ({"policy": "float17"}, PolicyError, "float17"),
        (
            {"policy": "compute_dtype=float64"},
            UsageError,
            "doctor needs a policy with compute_dtyp",
        ),
    ],
)
def test_wrong_usage_is_refused_before_anything_runs(tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        Examination.of(write(tmp_path / "train.py", ""), **options)


def test_a_script_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UsageError, match="doctor needs the path of a Python script"):
        Examination.of(str(tmp_path / "none.py"))


def sample(step, exponents, power, failed=False):
    ranges = Ranges((Range("a", "output", exponents, exponents, "float16"),))
    report = Report(script="", policy="", sampled=(step,), ranges=ranges, power=power)
    return {"kind": "look", "failed": failed, "outside": False, "report": report.to_dict()}


def test_what_was_counted_in_several_steps_adds_up():
    heard, one = Heard("mixed_float16"), Exponents({0: 2}, zeros=1, largest=1.0)
    heard.add(sample(1, one, 16))
    heard.add(sample(10, Exponents({3: 1}, largest=9.0), 15))
    report = heard.report("a.py", "", lambda evidence: evidence.report)
    (row,) = report.ranges.rows
    assert row.reference == Exponents({0: 2, 3: 1}, zeros=1, largest=9.0)
    assert (report.power, report.sampled) == (15, (1, 10))


def test_no_sample_is_no_range():
    report = Heard("float32").report("a.py", "", lambda evidence: evidence.report)
    assert report.ranges == Ranges()
