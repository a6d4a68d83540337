"""roundoff.files: a file is written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from roundoff.errors import OutputError, RoundoffError
from roundoff.files import atomic_path, check_folder


def test_a_file_appears_when_the_block_ends(tmp_path):
    path = tmp_path / "deep" / "er" / "plan.toml"
    with atomic_path(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
        assert (
            temporary.parent == path.parent
        )  # the same file system: renaming is atomic
        assert temporary.suffix == path.suffix  # writers that look at the suffix work
    assert path.read_text() == "whole"
    assert os.listdir(path.parent) == ["plan.toml"]


def test_text_paths_are_taken(tmp_path):
    with atomic_path(str(tmp_path / "a.txt")) as temporary:
        temporary.write_bytes(b"\x00\xff")
    assert (tmp_path / "a.txt").read_bytes() == b"\x00\xff"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, RoundoffError])
def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write():
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise error("stop")

    with pytest.raises(error, match="stop"):
        write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_file_is_replaced_and_readable_as_any_other(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    plain = tmp_path / "plain.txt"
    plain.write_text("")
    with atomic_path(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    # a temporary file is made with 0600; the umask of this user decides, as for an ordinary file
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_full_disk_is_an_output_error_and_leaves_nothing(tmp_path):
    def write():
        with atomic_path(tmp_path / "a.txt"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutputError) as error:
        write()
    assert "No space left on device" in str(error.value)
    assert "a.txt" in str(error.value)
    assert isinstance(error.value.__cause__, OSError)
    assert os.listdir(tmp_path) == []


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "out").write_text("")
    for attempt in (
        lambda: check_folder(tmp_path / "out"),
        lambda: atomic_path(tmp_path / "out" / "a").__enter__(),
    ):
        with pytest.raises(OutputError) as error:
            attempt()
        text = str(error.value)
        assert str(tmp_path / "out") in text
        assert "choose another place" in text


def test_a_folder_in_the_place_of_the_file(tmp_path):
    (tmp_path / "a.txt").mkdir()

    def write():
        with atomic_path(tmp_path / "a.txt") as temporary:
            temporary.write_text("x")

    with pytest.raises(OutputError):
        write()
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_folder_is_made_and_given_back(tmp_path):
    folder = tmp_path / "a" / "b"
    assert check_folder(str(folder)) == folder
    assert folder.is_dir()
    assert os.listdir(folder) == []
    assert check_folder(folder) == folder  # twice is fine


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    # not with chmod: root may write anywhere
    monkeypatch.setattr("roundoff.files.tempfile.TemporaryFile", refuse)
    with pytest.raises(OutputError, match="PermissionError: Permission denied"):
        check_folder(tmp_path)
