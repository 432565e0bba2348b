"""Executes the blocks of the documentation's page on JAX."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_block_runs(capsys):
    text, names = PAGE.read_text(), {"__name__": "__page__"}
    for match in BLOCK.finditer(text):
        code = "\n" * text.count("\n", 0, match.start(1)) + match[1]
        exec(compile(code, str(PAGE), "exec"), names)
    assert "lax::dot_general" in capsys.readouterr().out
