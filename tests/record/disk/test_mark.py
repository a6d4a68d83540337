"""Which recordings are this user's own."""

import json
import shutil
import stat

import pytest
import torch

from roundoff.errors import RunError
from roundoff.record.disk.loading import load
from roundoff.record.disk.schema import CHECKSUMS, MARK, OPERATORS
from roundoff.record.disk.writer import Writer


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return record(tmp_path / "run")


def record(folder):
    with Writer(folder, about={"keep": "tensors"}) as writer:
        writer.add(0, "0", torch.arange(6.0))
        writer.write_step(0, {"record": [0], "operator": ["relu"], "blob": ["0"]})
    return load(folder)


def test_what_this_user_records_is_their_own(run, tmp_path):
    assert run.is_own(0, 0)
    key = tmp_path / "state" / "roundoff" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    shutil.copytree(run.path, tmp_path / "copied")
    assert load(tmp_path / "copied").is_own(0, 0)


def test_what_others_record_or_change_is_not(run, tmp_path, monkeypatch):
    step = run.path / "rank0" / "step000000"
    for name in (OPERATORS, CHECKSUMS, MARK):
        whole = (step / name).read_bytes()
        (step / name).write_bytes(whole + b" ")
        assert not run.is_own(0, 0)
        (step / name).write_bytes(whole)
    assert run.is_own(0, 0)
    (step / MARK).unlink()
    assert not run.is_own(0, 0)
    other = record(tmp_path / "other")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert not other.is_own(0, 0)
    record(tmp_path / "third")  # makes the other user's key
    assert not other.is_own(0, 0)


def test_a_key_that_others_can_read_marks_nothing(run, tmp_path):
    (tmp_path / "state" / "roundoff" / "key").chmod(0o644)
    assert not run.is_own(0, 0)


def test_a_recording_is_made_where_no_key_can_be_kept(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    run = record(tmp_path / "run")
    assert not run.is_own(0, 0)
    assert run.verify() == []


def test_another_description_than_was_written_is_damage(run):
    file = run.path / "run.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content, indent=4))  # laid out otherwise
    assert load(run.path).about.keep == "tensors"
    file.write_text(json.dumps({**content, "keep": "stats"}))
    with pytest.raises(RunError, match="by its checksum"):
        load(run.path)
    del content["checksum"]  # an earlier version wrote none
    file.write_text(json.dumps({**content, "keep": "stats"}))
    assert load(run.path).about.keep == "stats"
