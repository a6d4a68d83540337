"""A model's named outputs in a table: SQNR, target, and if it is met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from roundoff.budget import OutputRow
from roundoff.report.figures import NONE, db

HEADING = "Outputs: SQNR (dB)"
_VERDICTS = {True: "met", False: "missed", None: NONE}


def output_columns(
    rows: Sequence[OutputRow], file: Sequence[OutputRow] = ()
) -> dict[str, list[str]]:
    """Return the cells of the table by heading; columns without any number are left out.

    Args:
        rows: measured in PyTorch, or predicted.
        file: the same outputs of an exported file.

    >>> row = OutputRow(output="cls", sqnr_db=20.1, target_db=40.0, met=False)
    >>> output_columns([row])
    {'name': ['cls'], 'measured': ['20.1'], 'target': ['40.0'], 'verdict': ['missed']}
    """
    in_file = {row.output: row for row in file}
    files = [in_file.get(row.output) for row in rows]
    columns = {"name": [row.output for row in rows]}
    columns |= _numbers(rows, files)
    if any(row.met is not None for row in rows):
        columns["verdict"] = list(map(_verdict, rows, files))
    if any(row.note for row in rows):
        columns["note"] = [row.note for row in rows]
    return columns


def _numbers(
    rows: Sequence[OutputRow], files: Sequence[OutputRow | None]
) -> dict[str, list[str]]:
    numbers: Mapping[str, list[float | None]] = {
        "predicted": [row.predicted_db for row in rows],
        "measured": [row.sqnr_db for row in rows],
        "in the file": list(map(_sqnr_db, files)),
        "target": [row.target_db for row in rows],
    }
    return {
        name: list(map(db, values))
        for name, values in numbers.items()
        if any(value is not None for value in values)
    }


def _sqnr_db(row: OutputRow | None) -> float | None:
    return None if row is None else row.sqnr_db


def _verdict(row: OutputRow, file: OutputRow | None) -> str:
    if file is not None and row.met and file.met is False:
        return "missed in the file"
    return _VERDICTS[row.met]


def together(rows: Sequence[OutputRow]) -> list[str]:
    """Return a sentence on each output that stands for several tensors.

    >>> together([OutputRow(output="past.*", worst="past.3", worst_db=31.24)])
    ['The tensors of past.* count alike; past.3 has the least SQNR, 31.2 dB.']
    """
    return [
        f"The tensors of {row.output} count alike; {row.worst} has the least SQNR, {db(row.worst_db)} dB."
        for row in rows
        if row.worst
    ]


def named(output: str) -> str:
    """Return an output's name for the middle of a sentence; empty where it has none."""
    return f" of {output}" if output else ""
