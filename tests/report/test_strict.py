"""summary.json: strict, whole or not there."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from roundoff.errors import OutputError
from roundoff.report import DiagnosisSummary, json_text, plain, strict
from roundoff.report.html import write_html
from roundoff.report.strict import from_plain, write_json


def read(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_bytes().decode("ascii"), parse_constant=refuse)


def test_a_finite_summary_comes_back_equal_with_its_keys_in_order(summary, tmp_path):
    write_json(summary, tmp_path / "summary.json")
    back = read(tmp_path / "summary.json")
    assert back == summary
    assert json.dumps(back) == json.dumps(
        summary
    )  # equality of dicts ignores the order of keys
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_summary_comes_back_as_the_record_that_was_written(summary, tmp_path):
    record = DiagnosisSummary.from_dict(summary)
    assert plain(record) == summary
    write_json(record, tmp_path / "summary.json")
    assert DiagnosisSummary.from_dict(read(tmp_path / "summary.json")) == record


def test_not_finite_numbers_become_null_with_a_note(summary, tmp_path):
    summary["result"]["measured_db"] = math.inf
    summary["rounds"][1]["predicted_db"] = -math.inf
    summary["scatter"] = [{"site": "a", "predicted_db": math.nan}]
    write_json(summary, tmp_path / "s.json")
    back = read(tmp_path / "s.json")
    assert back["result"]["measured_db"] is None
    assert back["rounds"][1]["predicted_db"] is None
    assert back["scatter"] == [{"site": "a", "predicted_db": None}]
    assert back["not_finite"] == {
        "rounds[1].predicted_db": "-inf",
        "result.measured_db": "inf",
        "scatter[0].predicted_db": "nan",
    }
    assert summary["result"]["measured_db"] == math.inf  # the argument is left alone
    assert "not_finite" not in summary


def test_what_is_not_plain_data_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(TypeError):
        write_json({"site": object()}, tmp_path / "s.json")
    assert list(tmp_path.iterdir()) == []
    assert strict({"a": (1, 2.5, None, True, "x")}) == {"a": [1, 2.5, None, True, "x"]}


@dataclass(frozen=True)
class Size:
    width: int
    label: str = field(default="", metadata={"omit": "empty"})
    cache: tuple[int, ...] = field(default=(), metadata={"omit": "always"})


@dataclass(frozen=True)
class Picture:
    name: str
    size: Size = field(metadata={"inline": True})


def test_fields_that_metadata_places():
    picture = Picture("a", Size(3, cache=(1, 2)))
    assert plain(picture) == {"name": "a", "width": 3}
    assert plain(Picture("a", Size(3, "wide"))) == {
        "name": "a",
        "width": 3,
        "label": "wide",
    }
    assert from_plain(Picture, plain(picture)) == Picture("a", Size(3))


@pytest.fixture(params=[write_html, write_json])
def write(request, summary):
    record = DiagnosisSummary.from_dict(summary)
    return lambda path: request.param(record, path)


def test_an_interrupt_at_the_rename_leaves_the_old_file(write, tmp_path, monkeypatch):
    path = tmp_path / "report"
    path.write_text("old")

    def interrupted(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(path)
    assert [p.name for p in tmp_path.iterdir()] == ["report"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), OutputError),
    ],
)
def test_an_error_in_the_middle_of_writing_leaves_no_file(
    write, tmp_path, monkeypatch, error, raised
):
    def half(self, text, **options):
        with open(self, "w", encoding="utf-8") as file:
            file.write(text[: len(text) // 2])
        raise error

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(raised):
        write(tmp_path / "report")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_says_where_and_what_to_do(write, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as caught:
        write(tmp_path / "file" / "report")
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'file'}: ")
    assert [line.split(":")[0] for line in text.splitlines()[1:]] == [
        "  expected",
        "  got",
        "  do",
    ]


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0,
    reason="root may write to read-only folders",
)
def test_a_read_only_folder(write, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        write(tmp_path / "report")


class Kind(Enum):
    BUG = "bug"


@dataclass(frozen=True)
class Entry:
    site: str
    error: float
    kind: Kind
    attempt: str = field(default="", metadata={"json": "try"})
    files: tuple[Path, ...] = ()


def test_records_become_their_fields_in_order():
    entry = Entry("a/linear", 0.5, Kind.BUG, "fp32", (Path("out/plan.toml"),))
    assert json.dumps(strict({"found": [entry]})) == json.dumps(
        {
            "found": [
                {
                    "site": "a/linear",
                    "error": 0.5,
                    "kind": "bug",
                    "try": "fp32",
                    "files": ["out/plan.toml"],
                }
            ]
        }
    )


def test_a_number_of_a_record_that_is_not_finite_is_named_by_its_place():
    text = json_text({"rows": [Entry("a", math.nan, Kind.BUG)]}, indent=None)
    assert json.loads(text)["not_finite"] == {"rows[0].error": "nan"}


def test_a_class_is_no_record():
    with pytest.raises(TypeError):
        json_text({"entry": Entry})
