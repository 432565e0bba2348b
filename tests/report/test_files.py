import errno
import json
import os
import stat
import threading

import pytest

from halfstep.errors import UsageError
from halfstep.report import check_writable, is_stdout, write_json, write_text


def _full(source, target):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path, monkeypatch):
    target = tmp_path / "out.json"
    target.write_text("before")
    with pytest.raises(ValueError, match="JSON"):
        write_json(str(target), {"value": float("nan")})
    monkeypatch.setattr(os, "replace", _full)
    with pytest.raises(UsageError, match=r"--json needs a file that can be written, .* No space"):
        write_json(str(target), {})
    assert os.listdir(tmp_path) == ["out.json"]
    assert target.read_text() == "before"


def test_the_file_is_as_readable_as_any_other(tmp_path):
    write_json(str(tmp_path / "out.json"), {})
    (tmp_path / "plain").write_text("")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("out.json", "plain")}
    assert len(modes) == 1


@pytest.mark.parametrize("name", ["", "missing/out.json"])
def test_a_bad_path_is_refused_before_anything_runs(tmp_path, name):
    with pytest.raises(UsageError, match="--json needs a file in a folder that exists"):
        check_writable(str(tmp_path / name))
    check_writable(str(tmp_path / "out.json"))


@pytest.mark.parametrize("existing", [True, False])
def test_a_link_stays_a_link(tmp_path, existing):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "real.json", tmp_path / "link.json"
    if existing:
        target.write_text("before")
    link.symlink_to("folder/real.json")
    check_writable(str(link))
    write_json(str(link), {"value": 1})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"value": 1}
    assert os.listdir(tmp_path / "folder") == ["real.json"]


def test_a_link_into_a_missing_folder_is_refused(tmp_path):
    (tmp_path / "link.json").symlink_to("missing/real.json")
    with pytest.raises(UsageError, match="--json needs a file in a folder that exists"):
        check_writable(str(tmp_path / "link.json"))


@pytest.mark.parametrize("through_a_link", [True, False])
def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path, through_a_link):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("pipe")
    path = str(link if through_a_link else pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    check_writable(path)
    write_json(path, {"value": 1})
    reader.join(10)
    assert json.loads(read[0]) == {"value": 1}
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_an_open_file_under_another_name_is_added_to(tmp_path):
    with open(tmp_path / "log", "w+") as file:
        file.write("before\n")
        file.flush()
        write_json(f"/dev/fd/{file.fileno()}", {})
        file.seek(0)
        assert file.read() == "before\n{}\n"
    assert os.listdir(tmp_path) == ["log"]


@pytest.mark.parametrize("path", ["-", "/dev/stdout"])
def test_standard_output(path, capsys):
    check_writable(path)
    write_json(path, {})
    assert is_stdout(path)
    assert capsys.readouterr().out == "{}\n"
    assert not is_stdout("out.json")


def test_the_option_that_named_the_file_is_told(tmp_path):
    with pytest.raises(UsageError, match="--html needs a file in a folder that exists"):
        check_writable(str(tmp_path), "--html")
    with pytest.raises(UsageError, match="--html needs a file that can be written"):
        write_text(str(tmp_path), "text", "--html")


def test_a_file_of_the_same_command_is_kept(tmp_path):
    script, link = tmp_path / "train.py", tmp_path / "link.py"
    script.write_text("print(1)")
    link.symlink_to(script)
    for path in (script, link, tmp_path / "." / "train.py"):
        with pytest.raises(UsageError, match="which would replace"):
            check_writable(str(path), "--json", str(script))
    check_writable(str(tmp_path / "other.json"), "--json", str(script), None)


def test_standard_output_is_given_once():
    with pytest.raises(UsageError, match="--html needs an output of its own, got '-'"):
        check_writable("-", "--html", "train.py", "/dev/stdout")


@pytest.mark.parametrize(
    ("path", "closed", "why"),
    [
        ("missing/out.json", None, "there is no folder .*missing. Create it first"),
        ("out.json", ".", "cannot be written to. Name a file in another folder"),
        ("kept.json", "kept.json", "it is there and must not be changed"),
        (".", None, "this is a folder. Name a file in it"),
        ("/proc/none.json", None, "the system has no such file. Name another one"),
    ],
)
def test_why_a_file_cannot_be_written(tmp_path, monkeypatch, path, closed, why):
    (tmp_path / "kept.json").write_text("{}")
    # Not by its mode: root may write anywhere.
    shut = None if closed is None else os.path.realpath(tmp_path / closed)
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda each, mode: os.path.realpath(each) != shut and access(each, mode)
    )
    with pytest.raises(UsageError, match=why):
        check_writable(str(tmp_path / path))
