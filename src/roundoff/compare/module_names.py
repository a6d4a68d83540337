"""A mapping of modules whose names differ: read from a file, and checked against the two runs."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping

import polars as pl

from roundoff.errors import RunError, examples
from roundoff.files import masked
from roundoff.record import Run


def read_modules(path: str | os.PathLike[str]) -> dict[str, str]:
    """Module of the reference -> module of the candidate, from a TOML file with lines ``"encoder.layers" = "blocks"``.

    Raises ``RunError`` when the file cannot be read, is empty, or has anything but names in it.
    """
    where, example = (
        masked(os.fspath(path)),
        'lines such as "encoder.layers" = "blocks": reference, then candidate',
    )
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except (OSError, ValueError) as error:  # TOML and UTF-8 errors are ValueErrors
        raise RunError(
            "the mapping of modules cannot be read",
            where=where,
            expected=example,
            got=f"{type(error).__name__}: {error}",
        ) from error
    if not found:
        raise RunError("the mapping of modules is empty", where=where, expected=example)
    for name, other in found.items():
        if not isinstance(other, str):
            got = f"{name} = {type(other).__name__}" + (
                " (names with dots need quotes)" if isinstance(other, dict) else ""
            )
            raise RunError(
                "the mapping of modules has something that is no name",
                where=where,
                expected=example,
                got=got,
            )
    return found


def check_modules(
    reference: Run, candidate: Run, rank: int, step: int, modules: Mapping[str, str]
) -> None:
    """Raises ``RunError`` with the nearest names where no module of its run begins with a name of the mapping."""
    for side, run, wanted in (
        ("reference", reference, modules.keys()),
        ("candidate", candidate, modules.values()),
    ):
        table = (
            run.part(rank, step)
            .select(
                "module", pl.col("name").str.replace(r"\.?[^.]*$", "").alias("owner")
            )
            .collect()
        )
        names = {
            _plain(n)
            for column in ("module", "owner")
            for n in table[column].drop_nulls().unique()
            if n
        }
        every = {
            ".".join(parts[: i + 1])
            for parts in (n.split(".") for n in names)
            for i in range(len(parts))
        }
        for prefix in wanted:
            if prefix and prefix not in every:
                near = examples(prefix, sorted(every))
                raise RunError(
                    f"the mapping of modules matches nothing: the {side} has no module {prefix!r}",
                    where=run.location,
                    expected="such as " + near if near else "a run with modules",
                    got=prefix,
                    do="the names of the reference stand left, those of the candidate right",
                )


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
