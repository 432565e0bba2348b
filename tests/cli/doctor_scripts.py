"""Runs `halfstep doctor` on scripts, and reads what it has found."""

import json
import subprocess
import sys

from halfstep.core import Report
from tests.cli.test_run import finished
from tests.launch.scripts import write

DOCTOR = [sys.executable, "-m", "halfstep", "doctor"]


def examined(folder, text, *options) -> tuple[subprocess.CompletedProcess, Report]:
    """Returns how the command ended, and its report."""
    write(folder / "train.py", text)
    done = finished([*DOCTOR, *options, "--json", "out.json", "train.py"], folder)
    assert (folder / "out.json").exists(), done.stderr
    return done, Report.from_dict(json.loads((folder / "out.json").read_text()))


def told(report, severity):
    """Returns the texts of the findings of one severity."""
    return [each.text for each in report.findings if each.severity == severity]
