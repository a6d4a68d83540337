"""``roundoff compare``: two recorded runs, and the operator that makes them differ."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from roundoff.cli import options as o
from roundoff.errors import RunError

if TYPE_CHECKING:
    from roundoff.verbs.compare import Comparison

Advance = Callable[[int, int], None]


def command(
    reference: Annotated[
        str,
        typer.Argument(
            help="The run to trust, its folder or URL; or a saved comparison.",
            metavar="REF",
        ),
    ],
    candidate: Annotated[
        str | None, typer.Argument(help="The run to judge.", metavar="CAND")
    ] = None,
    cosine: Annotated[
        float | None,
        typer.Option(
            "--cosine", "-c", min=-1, max=1, help="Fail values below this cosine."
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option("--rows", "-l", min=1, help="Rows to list.")
    ] = 10,
    html: Annotated[
        str | None, typer.Option("--html", help="Write a report to this file or URL.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option("--engine", help="local, ray, ray://host:port or ray:host:port."),
    ] = "local",
    modules: Annotated[
        str | None,
        typer.Option(
            "--map",
            help='TOML file: lines "module.of.reference" = "module.of.candidate".',
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            "--limit",
            help="METRIC=VALUE: a limit instead of what rounding explains. Repeatable.",
        ),
    ] = None,
    margin: Annotated[
        float,
        typer.Option(
            "--margin", min=0, help="Allow so many times what rounding explains."
        ),
    ] = 1.0,
    rank: Annotated[int | None, typer.Option("--rank", help="Only this rank.")] = None,
    step: Annotated[int | None, typer.Option("--step", help="Only this step.")] = None,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats", help="Compare statistics alone, though tensors were kept."
        ),
    ] = False,
    save: Annotated[
        str | None,
        typer.Option(
            "--save", help="Keep the comparison in this folder, to judge it again."
        ),
    ] = None,
    json: o.Json = False,
) -> int:
    """Compare two runs: where they part, which operator is at fault, what it looks like, and what to try.

    The exit code is 0 when the runs agree, 1 when a value fails, 2 for bad input, damaged files among it. In place of the
    two runs, the folder of a comparison that --save wrote is judged again without computing it again.
    """
    from roundoff.report import print_comparison

    limits = _limits(limit) | ({} if cosine is None else {"cosine": cosine})
    if candidate is None:
        found = _saved(
            reference,
            given={
                "--map": modules,
                "--rank": rank,
                "--step": step,
                "--stats": stats or None,
            },
        )
    else:
        found = _compared(
            reference, candidate, engine, modules, rank, step, stats=stats, quiet=json
        )
    found = found.judge(margin=margin, **limits)
    if save is not None:
        found.save(save)
    if html is not None:
        found.report(html)
    data = found.to_dict(rows)
    if json:
        keys = (
            "reference",
            "candidate",
            "answer",
            "agrees",
            "verdicts",
            "limits",
            "margin",
            "divergence",
            "culprits",
            "coverage",
            "damage",
            "notes",
            "rows",
        )
        o.print_json({key: data.get(key) for key in keys})
    else:
        console = o.console(False)
        print_comparison(data, console, rows)
        for what, place in (("Report", html), ("Comparison", save)):
            if place is not None:
                console.print(f"{what} written to {o.said(place)}", markup=False)
    return 1 if not found.agrees else 2 if found.about.get("damage") else 0


def _compared(
    reference: str,
    candidate: str,
    engine: str,
    modules: str | None,
    rank: int | None,
    step: int | None,
    *,
    stats: bool,
    quiet: bool,
) -> Comparison:
    with _not_collected():
        from roundoff.compare import read_modules
        from roundoff.verbs.compare import compare

    renamed = None if modules is None else read_modules(modules)
    with _progress(quiet) as progress:
        return compare(
            reference=reference,
            candidate=candidate,
            modules=renamed,
            engine=engine,
            tensors=not stats,
            rank=rank,
            step=step,
            progress=progress,
        )


def _saved(path: str, given: dict[str, object]) -> Comparison:
    from roundoff.verbs.compare import Comparison, is_saved

    if not is_saved(path):
        raise RunError(
            "one run is not enough",
            where=path,
            expected="REF and CAND, or a folder that --save wrote",
            got="no candidate, and no saved comparison",
        )
    if wrong := [name for name, value in given.items() if value is not None]:
        raise RunError(
            "a saved comparison is only judged again",
            where=", ".join(wrong),
            do="give the two runs to compare them differently",
        )
    return Comparison.load(path)


def _limits(options: list[str] | None) -> dict[str, float]:
    """``METRIC=VALUE`` options. Raises ``RunError`` for what is no number; the metrics are checked by ``judge``."""
    found = {}
    for option in options or []:
        name, _, value = option.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise RunError(
                "a limit needs a metric and a number",
                where="--limit",
                expected="METRIC=VALUE, such as max_abs=1e-3",
                got=repr(option),
            ) from None
    return found


@contextmanager
def _not_collected() -> Iterator[None]:
    """Imports: walking through what torch's leaves, while it grows and ever after, takes longer than comparing a step."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def _progress(quiet: bool) -> Iterator[Advance | None]:
    """A bar on standard error over the ranks, where there are several."""
    with o.progress(quiet) as shown:
        yield (
            None
            if shown is None
            else lambda done, every: shown("ranks", done, every) if every > 1 else None
        )
