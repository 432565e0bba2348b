import os
import subprocess
import sys
import threading

import pytest

from halfstep.launch._stdin import SharedInput

READS = "import sys; print(sys.stdin.read(), end='')"
IGNORES = "print('done', end='')"


def run(shared, code):
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=shared.for_process(), stdout=subprocess.PIPE
    )
    shared.feed(process.stdin)
    with process.stdout:
        text = process.stdout.read().decode()
    assert process.wait() == 0
    return text


def test_a_file_is_read_from_where_it_stands_by_each_run(tmp_path):
    (tmp_path / "data").write_text("header\nrows\n")
    descriptor = os.open(tmp_path / "data", os.O_RDONLY)
    os.lseek(descriptor, len("header\n"), os.SEEK_SET)
    shared = SharedInput(descriptor)
    assert [run(shared, READS) for _ in range(2)] == ["rows\n", "rows\n"]
    os.close(descriptor)


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def test_a_pipe_is_read_whole_by_each_run(pipe):
    reader, writer = pipe
    shared, data = SharedInput(reader), b"x" * 300_000

    def fill():
        with open(writer, "wb") as sink:
            sink.write(data)

    filler = threading.Thread(target=fill)
    filler.start()
    assert [len(run(shared, READS)) for _ in range(2)] == [len(data), len(data)]
    filler.join()


def test_a_pipe_that_never_ends_stops_nobody_who_does_not_read(pipe):
    reader, writer = pipe
    shared = SharedInput(reader)
    os.write(writer, b"more to come")
    assert run(shared, IGNORES) == "done"
    os.close(writer)


def test_no_input_at_all():
    with open(os.devnull) as nothing:
        assert run(SharedInput(nothing.fileno()), READS) == ""
    assert SharedInput(10_000).for_process() == subprocess.DEVNULL
