"""``run.json``: what a run says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import xxhash

from roundoff.errors import RunError
from roundoff.foreign import fault_of
from roundoff.record.disk.checked_reading import damaged, read_checked, read_json
from roundoff.record.disk.place import no_run_at
from roundoff.record.disk.schema import ABOUT, SCHEMA
from roundoff.record.setting import Setting, settings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCoverage:
    """How much a recording saw of the program.

    Attributes:
        steps: steps that were recorded.
        calls: operator calls in them; 0 at module level.
        operators: overload -> number of its calls.
        other_threads: kind of thread -> number of its calls that are not among these,
            since it ran beside the recorded one.
        stopped: why the recording stopped before the program; None if it did not.
    """

    steps: int | None = None
    calls: int | None = None
    operators: dict[str, int] | None = None
    other_threads: dict[str, int] | None = None
    stopped: str | None = None
    failed: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """The fields of ``run.json``; None where the recording has not written one.

    Attributes:
        schema: version of the layout of the run's files.
        version: of roundoff.
        complete: the program came to its end and was recorded to it.
        id: the same for all ranks of one launch.
        ranks: number of processes.
        level: ``op`` or ``module``.
        keep: ``stats``, ``tensors``, ``sample`` or ``hash``.
        shadow: ``fp64`` where every operator ran again in it.
        steps: the steps to record, ``0-1``, ``3-5,100`` or ``all``.
        sites: patterns of the calls to record; empty for all.
        seed: of the samples.
        noise: seed of the noise in the last bits; None for an unchanged run.
        of: id of the run that this one repeats.
        environment: the settings that change numbers.
        model: name of the model's class.
        command: the script and its arguments.
        sources: hashes of the script and of what it imports from its folder, by path.
        framework: name and version.
        coverage: what was seen; written when the recording ends.
        unfinished: the step in which the program failed.
        stopped: why the recording stopped.
        failed: the program or its recording failed, so the run may be replaced.
        tool: which wrote the run, where it is not roundoff.
    """

    schema: int | None = None
    version: str | None = None
    complete: bool | None = None
    id: str | None = None
    ranks: int | None = None
    level: str | None = None
    keep: str | None = None
    shadow: str | None = None
    steps: str | None = None
    sites: list[str] | None = None
    seed: int | None = None
    noise: int | None = None
    of: str | None = None
    environment: tuple[Setting, ...] | None = None
    model: str | None = None
    command: list[str] | None = None
    sources: dict[str, str] | None = None
    framework: str | None = None
    coverage: CallCoverage | None = None
    unfinished: int | None = None
    stopped: str | None = None
    failed: bool | None = None
    tool: str | None = None

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> RunDescription:
        """Read the object in the file; keys that are no field are left out.

        Raises ``ValueError`` naming a field that is not of its type.
        """
        values = {name: content[name] for name in _FIELDS if name in content}
        if values.get("environment") is not None:
            values["environment"] = settings_of(values["environment"])
        coverage = content.get("coverage")
        if isinstance(coverage, Mapping):
            values["coverage"] = CallCoverage(
                **{name: coverage.get(name) for name in _COVERAGE_FIELDS}
            )
        description = RunDescription(**values)
        fault = fault_of(description)
        if fault is not None:
            raise ValueError(fault)
        return description


_FIELDS = tuple(f.name for f in fields(RunDescription))
_COVERAGE_FIELDS = tuple(f.name for f in fields(CallCoverage))


def read_description(path: Path) -> RunDescription:
    """Read ``run.json`` of the run in this folder, its schema checked.

    Raises ``RunError`` where there is none, it is damaged, or of a later version.
    """
    file = path / ABOUT
    if not file.is_file():
        raise no_run_at(path)
    content = read_checked(file, read_json, file)
    _check_schema(file, content)
    check_checksum(file, content)
    return read_checked(file, RunDescription.from_dict, content)


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object of ``run.json`` with the checksum of its other keys."""
    others = {name: value for name, value in content.items() if name != _CHECKSUM}
    text = json.dumps(others, sort_keys=True, separators=(",", ":"))
    return {**others, _CHECKSUM: xxhash.xxh3_128_hexdigest(text.encode())}


def check_checksum(file: Path, content: Mapping[str, Any]) -> None:
    """Raise ``RunError`` where the file says another checksum than it has; earlier versions said none."""
    if _CHECKSUM in content and content != with_checksum(content):
        raise damaged(file, "other content than was written, by its checksum")


#: The key of ``run.json`` that has it.
_CHECKSUM = "checksum"


def _check_schema(file: Path, content: Any) -> None:
    if not isinstance(content, dict):
        raise _not_a_description(file, type(content).__name__)
    schema = content.get("schema")
    if type(schema) is not int or schema < 1:
        raise _not_a_description(file, f'"schema": {schema!r}')
    if schema > SCHEMA:
        version = str(content.get("version"))[:80]
        raise RunError(
            "this run was recorded by a later version of roundoff",
            where=str(file),
            expected=f"schema {SCHEMA} or lower",
            got=f"schema {schema}, written by roundoff {version}",
            do="upgrade roundoff",
        )


def _not_a_description(file: Path, got: str) -> RunError:
    return RunError(
        "not the description of a roundoff run",
        where=str(file),
        expected='an object with "schema": 1',
        got=got,
    )
