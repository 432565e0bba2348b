import json

import pytest

from halfstep import Rules
from halfstep.cli import main


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("name", Rules.names())
def test_every_rule_set_can_be_read(name, capsys):
    assert main(["rules", name]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert f"{name}: {len(Rules.named(name).rows)} rules." in " ".join(out.split())
    assert "…" not in out


@pytest.mark.parametrize("name", Rules.names())
@pytest.mark.parametrize("columns", ["80", "120", "200"])
def test_no_name_is_broken_and_no_reason_is_cut(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    main(["rules", name])
    words = capsys.readouterr().out.replace(",", "").split()
    for rule in Rules.named(name).rows:
        reason = rule.reason.replace(",", "").split()
        assert {rule.target, *(word for word in reason if len(word) < 18)} - {*words} == set()


@pytest.mark.parametrize("name", Rules.names())
@pytest.mark.parametrize("columns", [30, 60])
def test_a_very_narrow_terminal_folds(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    main(["rules", name])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out
    assert sum(letter == ":" for letter in out) >= len(Rules.named(name).rows)


@pytest.mark.parametrize("name", Rules.names())
def test_every_rule_is_there(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "3000")
    main(["rules", name])
    out = capsys.readouterr().out
    for rule in Rules.named(name).rows:
        assert rule.target in out
        assert rule.reason in out


def test_the_default_is_the_default_of_a_policy(capsys):
    main(["rules"])
    assert f"{Rules().base}: " in capsys.readouterr().out


def test_json(capsys):
    assert main(["rules", "torch-2.13", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["name"] == "torch-2.13"
    assert data["rules"][0].keys() == {"target", "action", "reason", "where", "device", "dtype"}


def test_an_unknown_name(capsys):
    assert main(["rules", "torch-2.31"]) == 2
    err = capsys.readouterr().err
    assert "torch-2.31" in err
    assert "torch-2.13" in err
