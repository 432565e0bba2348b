import pytest

from halfstep.launch._process import _Lines


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"o", b"ne\nt", b"wo"], ["one", "two"]),
        (["grüße".encode()[:3], "grüße".encode()[3:]], ["grüße"]),
        ([b"\xff\n"], ["\N{REPLACEMENT CHARACTER}"]),
        ([b"10 %\r20 %\r\n\n"], ["20 %", ""]),
        ([], []),
    ],
)
def test_pieces_become_lines(chunks, lines):
    seen = []
    splitter = _Lines(seen.append)
    for chunk in chunks:
        splitter.feed(chunk)
    splitter.end()
    assert seen == lines
