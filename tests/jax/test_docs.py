"""Executes the blocks of the documentation's pages about JAX."""

from pathlib import Path

import jax
import pytest

import halfstep.jax as front_end
from halfstep.jax import jmp
from tests.test_readme import blocks, marked, padded

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def standard_promotion():
    """A reader's setting."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", ["coming-from-jmp.md", "jax.md"])
def test_every_block_runs(name):
    page, names = DOCS / name, {"__name__": "__page__"}
    for line, code in blocks(page.read_text()):
        exec(compile(padded(line, code), str(page), "exec"), names)


def test_the_block_of_the_readme_runs():
    (code,) = marked((DOCS.parent / "README.md").read_text(), "tests/jax runs it")
    exec(code, names := {})
    assert names["gradient"].tolist() == [[4.0, 4.0]] * 4


def test_the_blocks_of_the_rules_run():
    names = {}
    for code in marked((DOCS / "rules.md").read_text(), "tests/jax runs it"):
        exec(code, names)
    assert names["row"].operation == "lax::square"


@pytest.mark.slow
def test_the_blocks_of_the_doctor_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in marked((DOCS / "doctor.md").read_text(), "tests/jax runs it"):
        exec(code, names)
    assert names["fault"].module == "norm"


def test_the_reference_has_every_public_name():
    page = (DOCS / "reference.md").read_text()
    names = [f"halfstep.jax.{name}" for name in front_end.__all__]
    for name in {*jmp.__all__} - {"LossScale"}:
        if getattr(jmp, name) is not getattr(front_end, name, None):
            names.append(f"halfstep.jax.jmp.{name}")
    assert [name for name in names if f"::: {name}\n" not in page] == []
