import pytest

from tests.launch.scripts import hide_frameworks


@pytest.fixture
def no_framework(monkeypatch, tmp_path):
    hide_frameworks(monkeypatch, tmp_path / "hidden")
