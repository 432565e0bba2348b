"""What is kept of a measurement, in this process and in files."""

import json
import logging
import math
import stat

import pytest

from halfstep.core import Chosen, FamilyTimes, Machine, subscribe

MACHINE = Machine("cpu", "AMD EPYC", 2, ("halfstep 0.1.0", "torch 2.13.0"))
FASTER = (FamilyTimes("matmul", "large", 1.0, 0.5, 30.0),)
SLOWER = (FamilyTimes("matmul", "large", 1.0, 2.0, 30.0),)


class Measure:
    def __init__(self, times=FASTER):
        self.times, self.count = times, 0

    def __call__(self):
        self.count += 1
        return self.times


@pytest.fixture
def fresh(tmp_path):
    """Makes what a new process knows."""
    return lambda: Chosen(lambda: tmp_path)


def dtype(chosen, measure, machine=MACHINE):
    return chosen.policy(machine, measure).compute_dtype


def test_a_process_measures_once(fresh):
    chosen, measure = fresh(), Measure()
    assert {dtype(chosen, measure) for _ in range(3)} == {"bfloat16"}
    assert measure.count == 1


def test_the_next_process_chooses_the_same_whatever_it_would_measure(fresh, tmp_path):
    dtype(fresh(), Measure())
    later = Measure(SLOWER)
    assert dtype(fresh(), later) == "bfloat16"
    assert later.count == 0
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "other",
    [
        Machine("cuda", "AMD EPYC", 2, MACHINE.versions),
        Machine("cpu", "H200", 2, MACHINE.versions),
        Machine("cpu", "AMD EPYC", 4, MACHINE.versions),
        Machine("cpu", "AMD EPYC", 2, ("halfstep 0.1.0", "torch 2.14.0")),
    ],
)
def test_each_device_version_and_number_of_threads_is_measured(fresh, other):
    dtype(fresh(), Measure())
    assert dtype(fresh(), Measure(SLOWER), other) == "float32"


def test_without_its_file_a_device_is_measured_again(fresh, tmp_path):
    dtype(fresh(), Measure())
    for path in tmp_path.iterdir():
        path.unlink()
    assert dtype(fresh(), Measure(SLOWER)) == "float32"


def test_of_several_processes_the_first_one_decides(fresh):
    """One writes its file while the other one measures."""
    first, second = fresh(), fresh()

    def measure():
        dtype(first, Measure())
        return SLOWER

    assert dtype(second, measure) == "bfloat16"


def other_machine(path):
    data = json.loads(path.read_text())
    return json.dumps(data | {"machine": data["machine"] | {"name": "H200"}})


UNREADABLE = {
    "empty": lambda path: "",
    "cut short": lambda path: path.read_text()[:40],
    "of another kind": lambda path: "[1, 2]",
    "with a key too many": lambda path: json.dumps(json.loads(path.read_text()) | {"more": 1}),
    "with times that cannot be": lambda path: path.read_text().replace("0.5", "-0.5"),
    "of an unknown family": lambda path: path.read_text().replace("matmul", "linear"),
    "of another machine": other_machine,
    "no text": lambda path: "\udcff",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_is_written_anew(fresh, tmp_path, name):
    dtype(fresh(), Measure())
    (path,) = tmp_path.iterdir()
    path.write_text(UNREADABLE[name](path), errors="surrogateescape")
    assert dtype(fresh(), Measure(SLOWER)) == "float32"
    assert dtype(fresh(), Measure()) == "float32"
    assert list(tmp_path.iterdir()) == [path]


def no_folder():
    raise PermissionError("there is none")


def no_home():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("folder", [no_folder, no_home])
def test_without_a_folder_only_this_process_knows(folder):
    chosen, measure = Chosen(folder), Measure()
    assert [dtype(chosen, measure), dtype(chosen, measure)] == ["bfloat16", "bfloat16"]
    assert measure.count == 1
    assert dtype(Chosen(folder), Measure(SLOWER)) == "float32"


def test_what_there_was_no_time_for_is_not_kept(fresh, tmp_path):
    unknown = FamilyTimes("attention", "large")
    assert dtype(fresh(), Measure((*FASTER, unknown))) == "float32"
    assert list(tmp_path.iterdir()) == []


def test_what_a_format_cannot_do_is_kept(fresh):
    times = (FamilyTimes("matmul", "large", 1.0, math.inf, 0.5),)
    dtype(fresh(), Measure(times))
    assert dtype(fresh(), Measure()) == "float16"


def test_where_links_are_unknown_the_file_is_put_in_place(fresh, monkeypatch):
    def refuse(*_):
        raise OSError("not supported")

    monkeypatch.setattr("os.link", refuse)
    dtype(fresh(), Measure())
    assert dtype(fresh(), Measure(SLOWER)) == "bfloat16"


def test_the_file_is_of_its_user(fresh, tmp_path):
    dtype(fresh(), Measure())
    (path,) = tmp_path.iterdir()
    assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def test_a_choice_is_told_in_one_line_and_logged_once(fresh, caplog):
    told = []
    end = subscribe(lambda event, values: told.append((event, values)))
    with caplog.at_level(logging.INFO, logger="halfstep.auto"):
        chosen = fresh()
        for _ in range(2):
            dtype(chosen, Measure())
    end()
    (record,) = caplog.records
    line = (
        "auto chose mixed_bfloat16 on AMD EPYC: of the time of float32, bfloat16 takes 0.50 in "
        "matmul; float16 takes 30.00 in matmul."
    )
    assert record.message == line
    assert told == [("auto", {"policy": "mixed_bfloat16", "why": line})] * 2


def test_what_is_forgotten_comes_from_the_file_again(fresh, tmp_path):
    chosen, later = fresh(), Measure(SLOWER)
    dtype(chosen, Measure())
    for path in tmp_path.iterdir():
        path.unlink()
    assert dtype(chosen, later) == "bfloat16"
    chosen.forget()
    assert dtype(chosen, later) == "float32"
