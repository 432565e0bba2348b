import pytest

from halfstep.report._visible import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.0/Dense_1", "layers.0/Dense_1"),
        ("层 ✓ é <b>", "层 ✓ é <b>"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\u202e\u200b\u2028\u2029", r"\u202e\u200b\u2028\u2029"),
        ("\ud800", r"\ud800"),
        ("", ""),
    ],
)
def test_what_is_not_seen_is_written_as_its_code(text, shown):
    assert visible(text) == shown


def test_lines_stay_where_they_may():
    assert visible("a\nb\rc", lines=True) == "a\nb\\rc"
