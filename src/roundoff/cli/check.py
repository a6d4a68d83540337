"""``roundoff check``: are these two runs, or checkpoints, comparable? Does a script repeat
itself?
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o
from roundoff.errors import RunError

if TYPE_CHECKING:
    from roundoff.check import Baseline, Check, CheckpointCheck

_EXIT_CODES = {"comparable": 0, "differ": 1, "undecided": 4}
#: Runs of a script where nothing else is said.
_RUNS = 3
_REPEAT = "--repeat"


def command(
    places: Annotated[
        list[str],
        typer.Argument(
            help="Two runs or two checkpoints; with --baseline, after --, a script.",
            metavar="REF CAND",
        ),
    ],
    repeats: Annotated[
        list[str] | None,
        kinds.option(
            "--repeats",
            parse=kinds.run,
            help="A recording of REF's program, unchanged. Repeatable.",
            metavar="RUN",
        ),
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option("--baseline", help="Run a script several times: is it the same?"),
    ] = False,
    repeat: Annotated[
        int | None,
        typer.Option(_REPEAT, min=2, help="How often --baseline runs it (3)."),
    ] = None,
    steps: Annotated[
        str,
        kinds.option(
            "--steps",
            parse=kinds.steps,
            help="Steps that --baseline records; the script ends after them.",
            metavar="STEPS",
        ),
    ] = "0-2",
    rows: o.Rows = 20,
    json: o.Json = False,
) -> int:
    """Say how two programs were set up otherwise: seeds, data, weights, settings, losses;
    or which tensors of two checkpoints differ; or, with --baseline, whether a script
    repeats itself bit for bit.

    The exit code is 0 when nothing that changes numbers differs, 1 when something does,
    2 for bad input, 4 when nothing differs and not everything was recorded.
    """
    if baseline:
        return _baseline(places, repeat, steps, rows, json=json)
    if repeat is not None:
        raise RunError("only a script is run", where=_REPEAT, expected="--baseline")
    return _check(places, repeats or (), rows, json=json)


def _check(
    places: Sequence[str], repeats: Sequence[str], rows: int, *, json: bool
) -> int:
    import roundoff
    from roundoff.check import Check
    from roundoff.report import print_check, print_checkpoints

    reference, candidate = _two(places)
    answer = roundoff.check(reference, candidate, repeats=repeats)
    if json:
        o.print_json(_as_json(answer))
    elif isinstance(answer, Check):
        print_check(answer, o.console(), limit=rows)
    else:
        print_checkpoints(answer, o.console(), limit=rows)
    return _EXIT_CODES[answer.verdict]


def _as_json(answer: Check | CheckpointCheck) -> dict[str, Any]:
    """The answer in sentences, the verdict, and all fields."""
    from roundoff.check import Check
    from roundoff.report import check_sentences, checkpoint_sentences, plain

    if isinstance(answer, Check):
        sentences = check_sentences(answer)
    else:
        sentences = checkpoint_sentences(answer)
    head = {"answer": " ".join(sentences), "verdict": answer.verdict}
    return {**head, **plain(answer)}


def _two(places: Sequence[str]) -> tuple[str, str]:
    from roundoff.check import is_checkpoint

    if len(places) != 2:
        raise RunError(
            "two runs or two checkpoints are compared",
            expected="REF and CAND, or --baseline and a script",
            got=" ".join(places),
        )
    for place in places:
        if not is_checkpoint(place):
            kinds.run(place)
    return places[0], places[1]


def _baseline(
    script: Sequence[str], repeat: int | None, steps: str, rows: int, *, json: bool
) -> int:
    from roundoff.report import plain, print_baseline

    words, runs = _repeat_of(script, repeat)
    with tempfile.TemporaryDirectory(prefix="roundoff-") as folder, o.script_aside():
        answer = _recorded(words, Path(folder, "run"), runs, steps)
    if json:
        o.print_json(plain(answer))
    else:
        print_baseline(answer, o.console(), limit=rows)
    return 0 if answer.agrees else 1


def _repeat_of(script: Sequence[str], repeat: int | None) -> tuple[list[str], int]:
    """Return the script and how often it runs; ``--repeat N`` may stand at its end."""
    words = list(script)
    if repeat is not None:
        return words, repeat
    if len(words) > 2 and words[-2] == _REPEAT and words[-1].isdecimal():
        return words[:-2], max(2, int(words[-1]))
    return words, _RUNS


def _recorded(words: list[str], path: Path, runs: int, steps: str) -> Baseline:
    from roundoff.check import check_baseline
    from roundoff.cli.repeats import Repeats
    from roundoff.record import capture_script, load

    options: dict[str, Any] = {"stop": True, "steps": steps, "keep": "hash"}
    further = Repeats(path, 0, runs - 1, overwrite=False, level="op")
    first = capture_script(words, path, **options)
    further.record(words, first.identity, options)
    repeats = [load(place) for place in further.paths("repeat")]
    return check_baseline(load(path), repeats)
