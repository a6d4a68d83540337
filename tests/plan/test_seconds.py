"""roundoff.plan.seconds: files in three notations, their faults."""

from __future__ import annotations

import json
import re

import pytest

from roundoff.errors import FormatError, OutputError, PlanError
from roundoff.plan.seconds import (
    SecondsRow,
    SecondsTable,
    read_seconds,
)

ROWS = (
    SecondsRow("linear", "fp32", "small", 2.5e-11),
    SecondsRow(
        "elementwise", "bf16", "any", 1e-10, 'a "quoted" note, with ünicode \\ and\ttab'
    ),
)


def test_toml_written_is_read_back(tmp_path):
    path = tmp_path / "seconds.toml"
    SecondsTable(ROWS).write(path)
    assert read_seconds(path).rows == ROWS
    with pytest.raises(OutputError):
        SecondsTable(ROWS).write(path / "under a file.toml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "t.toml",
            '[[seconds]]\nkind = "linear"\nformat = "fp32"\nsize = "small"\nseconds = 2.5e-11\n',
        ),
        (
            "t.json",
            json.dumps(
                {
                    "seconds": [
                        {
                            "kind": "linear",
                            "format": "fp32",
                            "size": "small",
                            "seconds": 2.5e-11,
                        }
                    ]
                }
            ),
        ),
        ("t.csv", "kind,format,size,seconds\nlinear,fp32,small,2.5e-11\n"),
        ("t.csv", "note,seconds,size,format,kind\n,2.5e-11,small,fp32,linear\n"),
    ],
)
def test_three_notations(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert read_seconds(path).rows == ROWS[:1]


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        (
            "t.yaml",
            "",
            PlanError,
            "t.yaml: unknown ending of a table of seconds\n  expected: .toml, .json, .csv",
        ),
        ("t.toml", "[[seconds]\n", PlanError, "cannot read the table of seconds"),
        ("t.json", "{", PlanError, "cannot read the table of seconds"),
        ("t.json", "[]", PlanError, "cannot read the table of seconds"),
        (
            "t.toml",
            "",
            PlanError,
            "no rows in the table of seconds\n  expected: an array named seconds",
        ),
        ("t.csv", "kind,format,size,seconds\n", PlanError, "no rows"),
        (
            "t.csv",
            "kind,format,seconds\nlinear,fp32,1\n",
            PlanError,
            "row 1: bad row\n  expected: kind, format, size",
        ),
        (
            "t.csv",
            "kind,format,size,seconds\nlinear,fp32,any,1,2\n",
            PlanError,
            "row 1: bad row",
        ),
        (
            "t.csv",
            "kind,format,size,seconds\nlinear,fp32,any,fast\n",
            PlanError,
            "expected: a number\n  got: 'fast'",
        ),
        (
            "t.csv",
            "kind,format,size,seconds\nlinear,fp32,any,inf\n",
            PlanError,
            "row 1: bad seconds",
        ),
        (
            "t.csv",
            "kind,format,size,seconds\nlinear,fp32,any,0\n",
            PlanError,
            "a finite number above 0\n  got: 0.0",
        ),
        (
            "t.csv",
            "kind,format,size,seconds\nlinaer,fp32,any,1\n",
            PlanError,
            "row 1: unknown kind",
        ),
        (
            "t.csv",
            "kind,format,size,seconds\nlinear,fp32,tiny,1\n",
            PlanError,
            "expected: small, medium, large, any",
        ),
        ("t.csv", "kind,format,size,seconds\nlinear,fp33,any,1\n", FormatError, "fp33"),
        (
            "t.csv",
            "kind,format,size,seconds\nlinear,fp32,any,1\nlinear,fp32,any,2\n",
            PlanError,
            "row 2: a second row for the same case\n  got: linear, fp32, any",
        ),
        ("t.json", '{"seconds": [3]}', PlanError, "row 1: bad row"),
    ],
)
def test_faults_are_named(tmp_path, name, text, error, message):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=re.escape(message)) as caught:
        read_seconds(path)
    assert name in str(caught.value) or error is FormatError


def test_missing_file(tmp_path):
    with pytest.raises(PlanError, match=r"none.toml: cannot read the table of seconds"):
        read_seconds(tmp_path / "none.toml")
