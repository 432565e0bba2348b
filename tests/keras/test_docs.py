"""The documentation on Keras: its blocks that are for this backend run, and no name is missing."""

import os
import re
from pathlib import Path

import halfstep.keras
from tests.test_readme import marked

DOCS = Path(__file__).parents[2] / "docs"
PAGE, README = DOCS / "keras.md", DOCS.parent / "README.md"
BLOCK = re.compile(
    r"^(?:<!-- backend: (?P<backend>\w+) -->\n)?```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def test_every_block_of_this_backend_runs():
    text, names = PAGE.read_text(), {"__name__": "__page__"}
    run = 0
    for match in BLOCK.finditer(text):
        if match["backend"] in (None, os.environ["KERAS_BACKEND"]):
            code = "\n" * text.count("\n", 0, match.start("code")) + match["code"]
            exec(compile(code, str(PAGE), "exec"), names)
            run += 1
    assert run == len(re.findall("^```python$", text, re.MULTILINE)) - 2


def test_the_block_of_the_readme_runs():
    (code,) = marked(README.read_text(), "tests/keras runs it")
    exec(code, {})
    assert halfstep.keras.global_policy().compute_dtype == "float16"


def test_the_reference_has_every_public_name():
    page = (DOCS / "reference.md").read_text()
    names = sorted(halfstep.keras.__all__)
    assert [name for name in names if f"::: halfstep.keras.{name}\n" not in page] == []
