"""Runs `halfstep doctor` on scripts, and reads what it has found."""

import contextlib
import io
import json
import os
from subprocess import CompletedProcess
from unittest.mock import patch

from halfstep.cli import main
from halfstep.core import Report
from tests.cli.test_run import importing_halfstep
from tests.launch.scripts import write


def examined(folder, text, *options) -> tuple[CompletedProcess, Report]:
    """Returns how the command ended, and its report; the script has a process, not the command."""
    write(folder / "train.py", text)
    command = ["doctor", *options, "--json", "out.json", "train.py"]
    with contextlib.chdir(folder), patch.dict(os.environ, importing_halfstep()):
        done = _captured(command)
    assert (folder / "out.json").exists(), done.stderr
    return done, Report.from_dict(json.loads((folder / "out.json").read_text()))


def _captured(command) -> CompletedProcess:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command)
    return CompletedProcess(command, code, out.getvalue(), err.getvalue())


def told(report, severity):
    """Returns the texts of the findings of one severity."""
    return [each.text for each in report.findings if each.severity == severity]
