import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core import _text


@given(st.lists(st.text("ab =[]()", max_size=5).map(str.strip), min_size=1))
def test_split_undoes_join_where_brackets_match(pieces):
    pieces = [piece for piece in pieces if not set(piece) & set("[]()")] or [""]
    assert _text.split(",".join(pieces)) == pieces


@given(st.text())
def test_split_loses_nothing_but_separators_and_blanks(text):
    kept = "".join("".join(_text.split(text)).split()).replace(",", "")
    assert kept == "".join(text.split()).replace(",", "")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a, b", ["a", "b"]),
        ("f(a, b), c", ["f(a, b)", "c"]),
        ("[a, (b, c)], d", ["[a, (b, c)]", "d"]),
        ('"a, b", c', ['"a, b"', "c"]),
        (r'"a\", b", c', [r'"a\", b"', "c"]),
        ('"(", a', ['"("', "a"]),
        ("a), b", ["a)", "b"]),
        ("a), (b, c)", ["a)", "(b, c)"]),
        ('"open, a', ['"open, a']),
        ("", [""]),
    ],
)
def test_split(text, pieces):
    assert _text.split(text) == pieces


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", ("none", [])),
        (" f ( 1 , x=2 ) ", ("f", ["1", "x=2"])),
        ("f()", ("f", [])),
        ("f(1) 2", None),
        ("f(1", None),
        ("(1)", None),
        ("", None),
    ],
)
def test_call(text, expected):
    assert _text.call(text) == expected


def test_suggestion_is_silent_about_words_that_are_like_nothing():
    assert _text.suggestion("zzz", ["float16"]) == ""
    assert _text.suggestion(None, ["float16"]) == ""


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (["colour"], "Thing needs key=value, got 'colour'. Write for example color=..."),
        (["color="], "Thing needs key=value, got 'color='. Write for example color=..."),
        (
            ["colour=red"],
            "Thing needs a key among color, size, got 'colour'. Did you mean 'color'?",
        ),
        (["size=1", "size=2"], "Thing needs each key once, got 'size' twice. Remove one of them."),
    ],
)
def test_errors_of_pairs(pieces, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        _text.pairs(pieces, ["color", "size"], ValueError, "Thing")
    assert str(caught.value) == message
