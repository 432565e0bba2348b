"""A file that cannot be loaded says what it is."""

import os
import pickle
import re
import warnings
import zipfile

import pytest
import torch
from torch import nn

from halfstep.errors import CheckpointError
from halfstep.torch import load, save

STATE = {"weight": torch.arange(1000.0), "step": 3}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "last.pt"


def whole(path):
    save(STATE, path)
    return path.read_bytes()


def legacy(path):
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    return path.read_bytes()


def archive(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/b.txt", "text")
    return path.read_bytes()


def damaged(path, record, marker):
    """Returns a checkpoint of which one byte in a record has changed."""
    content = bytearray(whole(path))
    content[content.index(marker, content.index(record.encode())) + 1] ^= 0x01
    return bytes(content)


def beyond_data(path):
    torch.save({"function": len}, path)
    return path.read_bytes()


FAULTS = {
    "empty": (lambda path: b"", "which is empty. Load an earlier one."),
    "zeros": (lambda path: bytes(4096), "which is empty. Load an earlier one."),
    "cut off": (lambda path: whole(path)[:2000], "which is cut off. Load an earlier one."),
    "cut early": (lambda path: whole(path)[:20], "which is cut off. Load an earlier one."),
    "cut late": (lambda path: whole(path)[:-1], "which is cut off. Load an earlier one."),
    "legacy cut off": (lambda path: legacy(path)[:-50], "which is cut off. Load an earlier one."),
    "legacy cut early": (lambda path: legacy(path)[:60], "which is cut off. Load an earlier one."),
    "damaged pickle": (
        lambda path: damaged(path, "data.pkl", b"ctorch"),
        "which is damaged. Load an earlier one.",
    ),
    "text": (lambda path: b"hello\n", "which is not one. Pass a file that"),
    "noise": (lambda path: bytes(range(1, 256)), "which is not one. Pass a file that"),
    "pickle": (lambda path: pickle.dumps(Ellipsis), "which is not one. Pass a file that"),
    "archive": (archive, "which is not one. Pass a file that"),
    "not data": (beyond_data, "which holds more than data. Save it anew with halfstep.torch.save"),
}


@pytest.mark.parametrize(("content", "fault"), FAULTS.values(), ids=FAULTS.keys())
def test_a_bad_file_says_what_it_is(path, content, fault):
    path.write_bytes(content(path))
    with pytest.raises(CheckpointError) as caught:
        load(path)
    expected = f"load needs a whole checkpoint, got {os.fspath(path)!r}, {fault}"
    assert str(caught.value).startswith(expected)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("name", ["empty", "cut off", "cut late", "text", "archive", "not data"])
def test_a_bad_file_that_is_mapped_says_the_same(path, name):
    content, fault = FAULTS[name]
    path.write_bytes(content(path))
    with pytest.raises(Exception, match=re.escape(fault)) as caught:
        load(path, mmap=True)
    assert isinstance(caught.value, CheckpointError)


def test_a_program_says_so(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and torch.load says its part
        torch.jit.save(torch.jit.script(nn.Linear(1, 1)), path)
        with pytest.raises(
            CheckpointError, match=r"a TorchScript program\. Load it with torch.jit"
        ):
            load(path)


def test_a_directory_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"which is a directory\. Name a file in it\."):
        load(tmp_path)


def test_an_error_that_is_not_the_files_stays_what_it_is(path):
    save(STATE, path)
    with pytest.raises(RuntimeError) as caught:
        load(path, map_location="nonsense")
    assert not isinstance(caught.value, CheckpointError)
    legacy(path)
    with pytest.raises(RuntimeError, match="mmap can only be used") as caught:
        load(path, mmap=True)
    assert not isinstance(caught.value, CheckpointError)
