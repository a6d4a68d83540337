"""A mapping of modules whose names differ: read from a file, checked against two runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import polars as pl

from roundoff.compare.pairing.alignment import uncompiled
from roundoff.errors import RunError, examples
from roundoff.files import masked
from roundoff.foreign import parse_toml, read_text
from roundoff.record import Run

_EXAMPLE = 'lines such as "encoder.layers" = "blocks": reference, then candidate'


def read_modules(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read module of the reference -> module of the candidate from a TOML file.

    Its lines are ``"encoder.layers" = "blocks"``. Raises ``RunError`` when the file
    cannot be read, is empty, or has anything but names in it.
    """
    where = masked(os.fspath(path))
    try:
        modules = parse_toml(read_text(Path(path)))
    except (OSError, ValueError) as error:  # TOML and UTF-8 errors are ValueErrors
        raise RunError(
            "the mapping of modules cannot be read",
            where=where,
            expected=_EXAMPLE,
            got=f"{type(error).__name__}: {error}",
        ) from error
    if not modules:
        raise RunError(
            "the mapping of modules is empty", where=where, expected=_EXAMPLE
        )
    for name, other in modules.items():
        if not isinstance(other, str):
            raise _not_a_name(where, name, other)
    return modules


def _not_a_name(where: str, name: str, value: object) -> RunError:
    hint = " (names with dots need quotes)" if isinstance(value, dict) else ""
    return RunError(
        "the mapping of modules has something that is no name",
        where=where,
        expected=_EXAMPLE,
        got=f"{name} = {type(value).__name__}{hint}",
    )


def check_modules(
    reference: Run, candidate: Run, rank: int, step: int, modules: Mapping[str, str]
) -> None:
    """Check that each name of the mapping begins a module of its run.

    Raises ``RunError`` with the nearest names where one does not.
    """
    _check_side("reference", reference, rank, step, modules.keys())
    _check_side("candidate", candidate, rank, step, modules.values())


def _check_side(
    side: str, run: Run, rank: int, step: int, prefixes: Iterable[str]
) -> None:
    modules = _modules(run, rank, step)
    for prefix in prefixes:
        if not prefix or prefix in modules:
            continue
        near = examples(prefix, sorted(modules))
        raise RunError(
            "the mapping of modules matches nothing: "
            f"the {side} has no module {prefix!r}",
            where=run.location,
            expected=f"such as {near}" if near else "a run with modules",
            got=prefix,
            do="the names of the reference stand left, those of the candidate right",
        )


def _modules(run: Run, rank: int, step: int) -> set[str]:
    """Return the modules of a step, those that hold others and parameters included."""
    owner = pl.col("name").str.replace(r"\.?[^.]*$", "").alias("owner")
    table = run.part(rank, step).select("module", owner).collect()
    modules = set()
    for name in {*table["module"].drop_nulls(), *table["owner"].drop_nulls()}:
        parts = uncompiled(name).split(".")
        modules |= {".".join(parts[: i + 1]) for i in range(len(parts))}
    return modules - {""}
