"""``roundoff compare``: two recorded runs, and the operator that makes them differ."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o
from roundoff.errors import RunError

if TYPE_CHECKING:
    from roundoff.verbs.compare import Comparison

Advance = Callable[[int, int], None]

#: The exit code where nothing fails, and not every value could be judged.
UNDECIDED = 4

#: What ``--json`` prints of ``Comparison.to_dict``.
JSON_KEYS = (
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


def command(
    reference: Annotated[
        str,
        typer.Argument(
            parser=kinds.run,
            help="The run to trust, its folder or URL; or a saved comparison.",
            metavar="REF",
        ),
    ],
    candidate: Annotated[
        str | None,
        typer.Argument(parser=kinds.run, help="The run to judge.", metavar="CAND"),
    ] = None,
    cosine: Annotated[
        float | None,
        kinds.option(
            "--cosine",
            parse=kinds.number(-1, 1),
            help="Fail values below this cosine.",
            metavar="NUMBER",
        ),
    ] = None,
    rows: o.Rows = 10,
    html: Annotated[
        str | None, typer.Option("--html", help="Write a report to this file or URL.")
    ] = None,
    engine: Annotated[
        str,
        kinds.option(
            "--engine",
            parse=kinds.engine,
            help="local, ray, ray://host:port or ray:host:port.",
            metavar="ENGINE",
        ),
    ] = "local",
    modules: o.ModuleMap = None,
    limit: Annotated[
        list[kinds.Bound] | None,
        kinds.option(
            "--limit",
            parse=kinds.bound,
            metavar="LIMIT",
            help="METRIC=VALUE: a limit instead of what rounding explains. Repeatable.",
        ),
    ] = None,
    margin: Annotated[
        float,
        kinds.option(
            "--margin",
            parse=kinds.number(0),
            help="Allow this many times what rounding explains.",
            metavar="NUMBER",
        ),
    ] = 1.0,
    rank: o.Rank = None,
    step: o.Step = None,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Compare as if --keep stats had been recorded."),
    ] = False,
    save: Annotated[
        str | None,
        typer.Option(
            "--save", help="Keep the comparison in this folder, to judge it again."
        ),
    ] = None,
    json: o.Json = False,
) -> int:
    """Compare two runs: find where they part, name the operator at fault, and say what to try.

    The exit code is 0 when the runs agree, 1 when a value fails, 2 for bad input or
    damaged files, 4 when nothing fails and statistics cannot decide that they agree.
    Give the folder that --save wrote in place of the two runs to judge that comparison
    again, without the runs.
    """
    if candidate is None:
        unused = {
            "--map": modules,
            "--rank": rank,
            "--step": step,
            "--stats": stats or None,
        }
        comparison = _saved(reference, unused)
    else:
        with _imports_not_collected():
            from roundoff.compare import read_modules
            from roundoff.verbs.compare import compare

        with _progress(quiet=json) as progress:
            comparison = compare(
                reference=reference,
                candidate=candidate,
                modules=None if modules is None else read_modules(modules),
                engine=engine,
                tensors=not stats,
                rank=rank,
                step=step,
                progress=progress,
            )
    limits = {bound.metric: bound.value for bound in limit or ()}
    if cosine is not None:
        limits["cosine"] = cosine
    comparison = comparison.judge(margin=margin, **limits)
    if save is not None:
        comparison.save(save)
    if html is not None:
        comparison.report(html)
    if json:
        data = comparison.to_dict(rows)
        o.print_json({key: data[key] for key in JSON_KEYS})
    else:
        _print(comparison, rows, {"Report": html, "Comparison": save})
    return _exit_code(comparison)


def _print(comparison: Comparison, rows: int, written: dict[str, str | None]) -> None:
    from roundoff.report import print_comparison

    console = o.console()
    print_comparison(comparison.summary(rows), console, rows)
    for kind, place in written.items():
        if place is not None:
            console.print(f"{kind} written to {o.said(place)}", markup=False)


def _exit_code(comparison: Comparison) -> int:
    if comparison.agrees:
        return 2 if comparison.about.damage else 0
    return 1 if comparison.fails else UNDECIDED


def _saved(path: str, unused: Mapping[str, object]) -> Comparison:
    """The comparison that --save wrote. Raises ``RunError`` for options it cannot take."""
    from roundoff.verbs.compare import Comparison, is_saved

    if not is_saved(path):
        raise RunError(
            "one run is not enough",
            where=path,
            expected="REF and CAND, or a folder that --save wrote",
            got="no candidate, and no saved comparison",
        )
    wrong = [name for name, value in unused.items() if value is not None]
    if wrong:
        raise RunError(
            "a saved comparison is only judged again",
            where=", ".join(wrong),
            do="give the two runs to compare them differently",
        )
    return Comparison.load(path)


@contextmanager
def _imports_not_collected() -> Iterator[None]:
    """Import without garbage collection.

    Going through what torch's imports leave, while it grows and ever after, takes
    longer than comparing a step.
    """
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

        def advance(done: int, every: int) -> None:
            if shown is not None and every > 1:
                shown("ranks", done, every)

        yield None if shown is None else advance
