"""Executes every Python block of the README and the documentation.

The blocks of one page run in order and share their names. A block that cannot run here is preceded
by `<!-- not executed: reason -->`.
"""

import re
from importlib import import_module
from pathlib import Path

import pytest

from halfstep.core import FORMATS

ROOT = Path(__file__).parent.parent
# Keras has one backend per process: `tests/keras` runs its page in one for each. `tests/jax` runs
# its own, because JAX need not be installed.
ELSEWHERE = {ROOT / "docs" / name for name in ("keras.md", "jax.md", "coming-from-jmp.md")}
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - ELSEWHERE)]
BLOCK = re.compile(
    r"^(?P<mark><!-- not executed: (?P<reason>[^\n]+?) -->\n)?```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(text):
    """Yields (line, code) of each block that is to be executed."""
    for match in BLOCK.finditer(text):
        if match["reason"] is None:
            yield text.count("\n", 0, match.start("code")), match["code"]


def marked(text, reason):
    """Yields the code of each block that is not executed here for this reason."""
    return (match["code"] for match in BLOCK.finditer(text) if match["reason"] == reason)


def padded(line, code):
    """Returns the code moved down to its own line, so that a traceback points into the page."""
    return "\n" * line + code


PAGES_WITH_CODE = [page for page in PAGES if any(blocks(page.read_text()))]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__page__"}
    for line, code in blocks(page.read_text()):
        exec(compile(padded(line, code), str(page), "exec"), names)


def test_no_block_escapes():
    text = "".join(page.read_text() for page in PAGES)
    assert len(re.findall(r"^\s*```(?:python|py|pycon)\b", text, re.MULTILINE)) == len(
        BLOCK.findall(text)
    )


def test_a_failing_block_is_noticed():
    text = "```python\nx = 1\n```\n\n<!-- not executed: shows -->\n```python\n1 / 0\n```\n"
    assert list(blocks(text)) == [(1, "x = 1\n")]


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_table_of_formats_is_right():
    page = (ROOT / "docs" / "numerics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    shown = {name: [float(cell) for cell in cells.split(" | ")] for name, cells in rows}
    for f in FORMATS:
        counts = [f.bits, f.exponent_bits, f.mantissa_bits]
        limits = [f.max, f.min_normal, f.smallest_subnormal, f.epsilon]
        assert shown.pop(f.name) == pytest.approx(counts + limits, rel=5e-3)
    assert shown == {}


@pytest.mark.parametrize("package", ["halfstep", "halfstep.torch"])
def test_the_reference_has_every_public_name(package):
    page = (ROOT / "docs" / "reference.md").read_text()
    names = set(import_module(package).__all__) - {"__version__"}
    assert [name for name in sorted(names) if f"::: {package}.{name}\n" not in page] == []
