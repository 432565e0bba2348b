import collections
import tomllib

import pytest

from halfstep.core import FAMILIES, Rule, Rules, _rulesets
from halfstep.errors import RuleError

FILES = sorted(_rulesets._FOLDER.glob("*.toml"))
DISPATCHER_KEYS = {"torch-2.13": "AutocastCUDA", "torch-2.13-cpu": "AutocastCPU"}
COUNTS = {
    "torch-2.13": {"lower": 35, "full": 72, "widest": 11, "refuse": 1},
    "torch-2.13-cpu": {"lower": 24, "full": 100, "widest": 3},
}


def test_every_file_is_a_named_set_beside_none():
    assert sorted([*(path.stem for path in FILES), "none"]) == list(Rules.names())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_hold_nothing_but_what_is_read(path):
    data = tomllib.loads(path.read_text("utf-8"))
    assert set(data) == {"name", "description", "rules"}
    assert data["name"] == path.stem
    for table in data["rules"]:
        assert set(table) <= {"action", "reason", "families", "operations", "device", "dtype"}
        assert table.get("families") or table.get("operations")


@pytest.mark.parametrize("name", Rules.names())
def test_rows_are_rules_with_a_reason_sentence_and_speak_of_each_thing_once(name):
    rows = _rulesets.load(name).rows
    assert all(isinstance(row, Rule) and row.reason.endswith(".") for row in rows)
    assert len({row.key for row in rows}) == len(rows)


@pytest.mark.parametrize("name", COUNTS)
def test_the_sets_of_torch_have_the_sizes_of_its_lists(name):
    assert collections.Counter(row.action for row in Rules.named(name).rows) == COUNTS[name]


@pytest.mark.parametrize("name", DISPATCHER_KEYS)
def test_the_sets_of_torch_hold_exactly_what_its_dispatcher_registers(name):
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the set is that of PyTorch 2.13")
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(DISPATCHER_KEYS[name])
    ours = {row.target.removesuffix(".default") for row in Rules.named(name).rows}
    assert {entry for entry in registered if entry.startswith("aten::")} == ours


def test_the_default_set_speaks_of_every_family():
    everywhere = {row.target for row in Rules().rows if row.key[1:] == ("", "", "")}
    assert set(FAMILIES) <= everywhere


def test_a_set_is_read_once():
    assert _rulesets.load("halfstep-1") is _rulesets.load("halfstep-1")


@pytest.mark.parametrize("name", ["halfstep1", None, "../halfstep-1"])
def test_unknown_names_are_refused(name):
    with pytest.raises(RuleError) as caught:
        _rulesets.load(name)
    assert f"Rules needs a rule set among {', '.join(Rules.names())}, got {name!r}." in str(
        caught.value
    )


def test_a_similar_name_is_suggested():
    with pytest.raises(RuleError, match=r"Did you mean 'torch-2\.13'"):
        Rules("torch-213")
