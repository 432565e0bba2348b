"""A script under `halfstep run` cannot tell the difference from plain Python."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.errors import UsageError
from halfstep.launch import Script
from tests.launch.scripts import write

pytestmark = pytest.mark.usefixtures("no_framework")

PLAIN = [sys.executable]
OURS = [sys.executable, "-m", "halfstep", "run"]
SUMMARY = "halfstep: nothing was trained in "


def finished(command, folder, stdin=""):
    """Returns exit code, output and errors of a command, without the summary at the end."""
    paths = [os.environ["PYTHONPATH"], str(Path(__file__).parents[2] / "src")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "500"}
    done = subprocess.run(
        command, cwd=folder, input=stdin, capture_output=True, text=True, env=environment
    )
    errors, _, summary = done.stderr.partition(SUMMARY)
    return (done.returncode, done.stdout, errors), summary


def check(folder, *words, stdin=""):
    """Runs the words after `python` both ways and returns what plain Python gives."""
    plain, _ = finished([*PLAIN, *words], folder, stdin)
    ours, summary = finished([*OURS, *words], folder, stdin)
    assert ours == plain
    assert summary
    return plain


SCRIPTS = {
    "names": """
        import sys
        main = sys.modules["__main__"]
        assert main.__dict__ is globals()
        print(__name__, __file__, __package__, __spec__, __doc__, type(__loader__).__name__)
        print(sys.argv, sorted(set(globals()) - {"__annotations__"}))
    """,
    "the path": """
        import os, sys
        print(os.getcwd(), sys.path[0], [each for each in sys.path if "site-packages" in each])
    """,
    "input": "print(input() + input()); import sys; print(sys.stdin.read())",
    "input that ends": "input(); input(); input(); input(); input()",
    "exit 3": "import sys; sys.exit(3)",
    "exit 300": "import sys; sys.exit(300)",
    "exit with a text": "import sys; print('x'); sys.exit('a text')",
    "exit with None": "raise SystemExit",
    "exit with a tuple": "import sys; sys.exit((1, 2))",
    "an error": """
        def inner():
            raise ValueError("deep")
        def outer():
            try:
                inner()
            except ValueError as error:
                raise KeyError("chained") from error
        outer()
    """,
    "a usage error": "from halfstep.errors import UsageError; raise UsageError('of the script')",
    "an error without frames": "def wrong(:\n    pass",
    "no file in the traceback": "exec('1 / 0')",
    "an interruption": "raise KeyboardInterrupt",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGINT)\nwhile True: pass",
    "a deadly signal": "import os, signal; print('x', flush=True); os.kill(os.getpid(), 15)",
    "an own hook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print("hook", kind, error, trace.tb_lineno)
        raise ValueError("text")
    """,
    "the end": """
        import atexit, threading
        atexit.register(print, "at exit")
        def late():
            threading.main_thread().join()
            print(__name__, "thread")
        threading.Thread(target=late).start()
        print("main")
    """,
    "an error in a thread": """
        import threading
        thread = threading.Thread(target=lambda: 1 / 0, name="worker")
        thread.start(); thread.join()
    """,
    "encoding": "import sys; print(sys.stdout.errors, sys.stdout.encoding, sys.stderr.errors)",
    "a neighbour": "import neighbour; print(neighbour.name)",
    "pickle": """
        import pickle
        class Mine: pass
        print(type(pickle.loads(pickle.dumps(Mine()))) is Mine, Mine)
    """,
    "signals": """
        import signal
        print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
        print(signal.getsignal(signal.SIGPIPE))
    """,
}
WITHOUT_A_SUMMARY = {
    "a deadly signal",
    # A traceback says all there is to say.
    "an error without frames",
    "an error",
    "a usage error",
    "no file in the traceback",
    "input that ends",
    "an interruption",
    "a signal",
    "an own hook",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "neighbour.py", "name = 'the neighbour'")
    return tmp_path


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(folder, name):
    write(folder / "sub" / "a.py", SCRIPTS[name])
    words = ["sub/a.py", "--policy", "-m", "--", "-x", "two words"]
    given = "one\ntwo\nrest"
    plain, _ = finished([*PLAIN, *words], folder, given)
    ours, summary = finished([*OURS, *words], folder, given)
    if name == "an error in a thread":  # the address of the lambda
        assert (plain[:2], plain[2].count("ZeroDivisionError")) == (ours[:2], 1)
    else:
        assert ours == plain
    assert bool(summary) is (name not in WITHOUT_A_SUMMARY)


@pytest.fixture
def package(folder):
    inner = folder / "pkg" / "inner"
    inner.mkdir(parents=True)
    write(folder / "pkg" / "__init__.py", "import sys; print('package', sys.argv)")
    write(folder / "pkg" / "__main__.py", "from . import inner; print('main of', __package__)")
    write(inner / "__init__.py", "")
    write(inner / "sibling.py", "name = 'the sibling'")
    write(
        inner / "train.py",
        """
        import os, sys
        from . import sibling
        from ..inner.sibling import name
        print(__name__, __package__, __spec__.name, __spec__.parent, __file__, __cached__)
        print(sys.argv, sys.path[0], os.getcwd(), name, type(__loader__).__name__)
        print(sys.modules["__main__"].__dict__ is globals())
        """,
    )
    write(inner / "broken.py", "1 / 0")
    return folder


@pytest.mark.parametrize("module", ["pkg.inner.train", "pkg", "sub.neighbour"])
def test_a_module(package, module):
    check(package, "-m", module, "-m", "--x", "1")


def test_a_module_that_fails(package):
    code, out, errors = finished([*OURS, "-m", "pkg.inner.broken"], package)[0]
    plain = finished([*PLAIN, "-m", "pkg.inner.broken"], package)[0]
    assert (code, out) == plain[:2]
    frames = [line for line in plain[2].splitlines(keepends=True) if "<frozen runpy>" not in line]
    assert errors == "".join(frames)


@pytest.mark.parametrize("module", ["nowhere", "pkg.nowhere", "pkg.inner", ".pkg", "sys"])
def test_a_module_that_cannot_be_run(package, module):
    (code, _, errors), _ = finished([*OURS, "-m", module], package)
    assert code == 2
    assert f"halfstep: -m needs the name of a Python module, got {module!r}, which is" in errors
    assert "Traceback" not in errors


SPAWNING = """
import multiprocessing, os, sys

def work(value):
    return value * 2, __name__, sys.argv[1:], os.path.basename(sys.path[0] or os.getcwd())

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
"""


def test_spawned_workers(package):
    write(package / "sub" / "spawning.py", SPAWNING)
    assert "(4, '__mp_main__', ['-v']" in check(package, "sub/spawning.py", "-v")[1]
    write(package / "pkg" / "spawning.py", SPAWNING)
    assert "(4, '__mp_main__', ['-v']" in check(package, "-m", "pkg.spawning", "-v")[1]


def test_a_fork_says_nothing(folder):
    text = "import os, sys\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nsys.exit(0)"
    write(folder / "a.py", text)
    (_, _, errors), _ = finished([*OURS, "a.py"], folder)
    assert SUMMARY not in errors  # once at the end only, which is cut off


def test_the_signals_of_a_terminal(folder):
    write(folder / "a.py", "import signal; print('ready', flush=True); signal.pause()")
    codes = []
    for command in (PLAIN, OURS):
        process = subprocess.Popen(
            [*command, "a.py"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        codes.append(process.returncode)
        assert errors.partition(SUMMARY)[0].splitlines()[-1] == "KeyboardInterrupt"
    assert codes[0] == codes[1] == -signal.SIGINT  # 130 in a shell


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)
    with pytest.raises(
        UsageError, match=r"doctor needs a Python file that can be read.*chmod u\+r"
    ):
        Script(str(path)).check("doctor")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"run needs the path .* which does not exist"):
        Script("no.py").check("run")
    with pytest.raises(UsageError, match=r"run needs a Python file, got .* which is not a file"):
        Script(str(tmp_path)).check("run")
    Script("no", module=True).check("run")
