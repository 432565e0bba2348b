import os
import signal

import pytest

from halfstep.errors import PolicyError, UsageError
from halfstep.run import DEFAULT_POLICIES, Comparison, run_all, summarise
from tests.launch.scripts import TRAINING, write


class Watcher:
    def __init__(self):
        self.seen = []
        self.lines = []

    def start(self, index):
        self.seen.append(("start", index))

    def update(self, index, text):
        self.seen.append(("update", text))

    def output(self, line):
        self.lines.append(line)

    def finish(self, index, run):
        self.seen.append(("finish", run.name))


def compared(path, text, *args, policies=("float32",), **options):
    watcher = Watcher()
    script = write(path, text)
    runs = list(run_all(Comparison.of(script, args, policies, **options), watcher))
    return runs, watcher


def lines(path, text, *args, **options):
    return compared(path, text, *args, **options)[1].lines


@pytest.fixture(autouse=True)
def _fast(no_framework):
    """Every process of this file does without a framework."""


def test_a_run_per_policy_and_seed(tmp_path):
    policies = ("float32", "mixed_float16")
    runs, watcher = compared(tmp_path / "a.py", TRAINING, policies=policies, seeds=2, seed=5)
    assert [(run.policy, run.seed) for run in runs] == [
        ("float32", 5),
        ("mixed_float16", 5),
        ("float32", 6),
        ("mixed_float16", 6),
    ]
    full, low = summarise(runs)
    assert (full.skipped, low.skipped) == (0, 2)
    assert runs[1].skipped[0].reason == "gradients held inf"
    assert (full.steps, full.metric("accuracy")) == (40, (0.97, 0.97))
    assert watcher.seen[0] == ("start", 0)
    assert watcher.seen[-1] == ("finish", "mixed_float16 seed 6")


def test_the_same_seed_gives_the_same_numbers(tmp_path):
    first, second, other = (
        compared(tmp_path / "a.py", TRAINING, seed=seed)[0][0].losses for seed in (1, 1, 2)
    )
    assert first == second != other
    text = "import random, numpy; print(random.random(), numpy.random.rand(), hash('a'))"
    assert lines(tmp_path / "b.py", text) == lines(tmp_path / "b.py", text)


def test_what_a_run_knows_about_itself(tmp_path):
    run = compared(tmp_path / "a.py", TRAINING)[0][0]
    assert [name for name, _ in run.versions] == ["python", "halfstep"]
    assert run.device
    assert run.date.endswith("+00:00")
    assert run.seconds > 0
    assert len(run.step_seconds) == 19
    assert run.peak_memory_kind == "growth of the process"


def test_memory_of_the_script_is_counted(tmp_path):
    run = compared(tmp_path / "a.py", "x = bytearray(2**26)")[0][0]
    assert 2**26 <= run.peak_memory < 2**26 + 2**24


def test_arguments_and_main(tmp_path):
    script = tmp_path / "a.py"
    text = """
        import sys
        print(sys.argv)
        print(__name__, __file__, __spec__, sys.modules["__main__"].__dict__ is globals())
    """
    assert lines(script, text, "--lr", "1", "--policy") == [
        str([str(script), "--lr", "1", "--policy"]),
        f"__main__ {script} None True",
    ]


def test_a_relative_path_and_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "neighbour.py", "name = 'the neighbour'")
    write(tmp_path / "random.py", "raise ImportError('the working directory is not searched')")
    write(tmp_path / "folder" / "a.py", "")
    monkeypatch.chdir(tmp_path)
    text = """
        import os, sys, neighbour
        print(neighbour.name, os.getcwd(), sys.argv[0], os.path.basename(sys.path[0]))
    """
    write(tmp_path / "folder" / "a.py", text)
    watcher = Watcher()
    list(run_all(Comparison.of("folder/a.py", (), ["float32"]), watcher))
    assert watcher.lines == [f"the neighbour {tmp_path} folder/a.py folder"]


def test_a_module(tmp_path, monkeypatch):
    (tmp_path / "pkg").mkdir()
    write(tmp_path / "pkg" / "__init__.py", "")
    text = """
        import os, sys
        from . import __name__ as name
        print(name, __name__, __spec__.name, sys.argv, sys.path[0] == os.getcwd())
    """
    path = tmp_path / "pkg" / "train.py"
    write(path, text)
    monkeypatch.chdir(tmp_path)
    watcher = Watcher()
    list(run_all(Comparison.of("pkg.train", ["-x"], ["float32"], module=True), watcher))
    assert watcher.lines == [f"pkg __main__ pkg.train {[str(path), '-x']} True"]
    (run,) = run_all(Comparison.of("pkg.nowhere", (), ["float32"], module=True), watcher)
    assert "-m needs the name of a Python module, got 'pkg.nowhere'" in run.error


def test_unicode_and_both_streams(tmp_path):
    text = "import sys; print('grüße ✓'); print('down', file=sys.stderr, end='')"
    assert sorted(lines(tmp_path / "a.py", text)) == ["down", "grüße ✓"]


def test_the_last_state_of_a_progress_bar_is_the_line(tmp_path):
    assert lines(tmp_path / "a.py", r"print('10 %\r50 %\r100 %')") == ["100 %"]


def test_exit_handlers_and_threads_still_count(tmp_path):
    text = """
        import atexit, threading
        import halfstep
        atexit.register(halfstep.metric, "at exit", 1.0)
        threading.Thread(target=lambda: halfstep.metric("thread", 2.0)).start()
    """
    run = compared(tmp_path / "a.py", text)[0][0]
    assert run.last_metrics == {"thread": 2.0, "at exit": 1.0}


def test_forked_workers_are_not_this_run(tmp_path):
    text = """
        import os, sys
        from halfstep import core
        core.emit("update", scale=1.0)
        if os.fork() == 0:
            core.emit("update", scale=1.0)
            sys.exit(0)
        os.wait()
    """
    assert compared(tmp_path / "a.py", text)[0][0].steps == 1


def test_classes_of_the_script_can_be_pickled_by_workers(tmp_path):
    text = """
        import multiprocessing
        class Item:
            value = 7
        def read(item):
            return item.value
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(read, [Item()]))
    """
    assert lines(tmp_path / "a.py", text) == ["[7]"]


def test_futures_of_this_package_do_not_reach_the_script(tmp_path):
    text = "def f(x: int): ...\nprint(f.__annotations__)"
    assert lines(tmp_path / "a.py", text) == ["{'x': <class 'int'>}"]


@pytest.mark.parametrize(
    ("text", "exit_code", "error"),
    [
        ("def f():\n    raise ValueError('no data')\nf()", 1, "ValueError: no data"),
        ("import nothing_of_that_name", 1, "No module named 'nothing_of_that_name'"),
        ("x = = 1", 1, "SyntaxError: invalid syntax"),
        ("import sys; print('why'); sys.exit(3)", 3, "why\nThe process ended with exit code 3."),
        (
            "import sys; sys.exit('bad config')",
            1,
            "bad config\nThe process ended with exit code 1.",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            -9,
            "The process was killed by SIGKILL. The system may have run out of memory.",
        ),
        ("import os; os._exit(4)", 4, "The process ended with exit code 4."),
        ("print(input())", 1, "EOFError: EOF when reading a line"),
    ],
)
def test_failures(tmp_path, text, exit_code, error):
    run = compared(tmp_path / "a.py", text)[0][0]
    assert run.exit_code == exit_code
    assert run.failed
    assert error in run.error
    assert "_child.py" not in run.error


def test_a_failure_keeps_what_was_seen_and_the_others_run(tmp_path):
    text = TRAINING + "\nif low: raise FloatingPointError('too low')"
    runs, watcher = compared(
        tmp_path / "a.py", text, policies=("mixed_float16", "float32", "mixed_bfloat16")
    )
    assert [run.failed for run in runs] == [True, False, False]
    assert runs[0].steps == 20
    assert "FloatingPointError: too low" in watcher.lines[-1]


def test_an_orderly_exit_is_no_failure(tmp_path):
    assert not compared(tmp_path / "a.py", "import sys; sys.exit(0)")[0][0].failed


def test_a_daemon_that_keeps_the_pipes_open_is_not_waited_for(tmp_path):
    text = """
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]).pid)
    """
    _, watcher = compared(tmp_path / "a.py", text)
    os.kill(int(watcher.lines[0]), signal.SIGKILL)  # it is still there


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"script": "nope.py"}, UsageError, "got 'nope.py', which does not exist. Check the path"),
        ({"script": "."}, UsageError, "got '.', which is not a file. Name the script itself"),
        ({"seeds": 0}, UsageError, "compare needs --seeds >= 1, got 0. Write --seeds 3"),
        ({"seed": -1}, UsageError, "compare needs seeds from 0 to 4294967295, got --seed -1"),
        ({"seed": 2**32 - 1, "seeds": 2}, UsageError, "got --seed 4294967295 with 2 of them"),
        ({"policies": ["mixed_fp16"]}, PolicyError, "mixed_float16"),
        ({"policies": ["bf16"]}, PolicyError, "got 'bf16'. Did you mean 'mixed_bfloat16'?"),
        (
            {"policies": ["float32", "compute_dtype=float64"]},
            UsageError,
            "compare needs a policy with compute_dtype float32, bfloat16, float16, got "
            "'compute_dtype=float64'. Write --policy float32 for the most precise one.",
        ),
        (
            {"policies": ["float32", " float32"]},
            UsageError,
            "compare needs different policies, got 'float32' and 'float32', which are the same.",
        ),
        (
            {"policies": ["mixed_float16", "compute_dtype=float16"]},
            UsageError,
            "got 'mixed_float16' and 'compute_dtype=float16', which are the same.",
        ),
    ],
)
def test_usage_errors(tmp_path, given, error, text):
    values = {"script": write(tmp_path / "a.py", "")} | given
    with pytest.raises(error) as caught:
        Comparison.of(**values)
    assert text in str(caught.value)


def test_the_default_policies(tmp_path):
    comparison = Comparison.of(write(tmp_path / "a.py", ""))
    assert comparison.policies == DEFAULT_POLICIES
    assert comparison.seeds == (0,)
