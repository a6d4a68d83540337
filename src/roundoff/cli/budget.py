"""``roundoff budget``: measure, and keep the result in one parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roundoff.cli import options as o


def command(
    workload: Annotated[
        Path, typer.Argument(help="A Python file with model() and batches().")
    ],
    formats: o.Formats = o.DEFAULT_FORMATS,
    of: o.Part = None,
    probes: o.Probes = None,
    precision: o.Precision = None,
    memory: o.Memory = None,
    seed: o.Seed = 0,
    trials: o.Trials = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The parquet file to write.")
    ] = Path("budget.parquet"),
    rows: o.Rows = 20,
    json: o.Json = False,
) -> int:
    """Measure what rounding each operator costs the output in each format."""
    import roundoff
    from roundoff.files import check_folder
    from roundoff.report import print_ranking
    from roundoff.verbs.diagnose import coverage, ranked

    check_folder(output.parent)
    with o.progress(json) as progress:
        measured = roundoff.budget(
            roundoff.Workload.load(workload),
            formats,
            of=of,
            probes=probes,
            precision=precision,
            memory=memory,
            seed=seed,
            trials=trials,
            progress=progress,
        )
    measured.save(output)
    ranking = ranked(measured, {})
    if json:
        about = measured.about
        o.print_json(
            {
                "workload": about.workload,
                "formats": about.formats,
                "probes": about.probes,
                "samples": about.samples,
                "trials": about.trials,
                "of": about.target,
                "outputs": [output.name for output in measured.outputs],
                "not_measured": about.not_measured,
                "coverage": coverage(measured),
                "ranking": ranking,
                "output": str(output),
            }
        )
    else:
        console = o.console()
        print_ranking(ranking, console, top=rows, is_planned=False)
        for name, reason in measured.about.not_measured.items():
            console.print(f"Not measured: {name}: {reason}.", markup=False)
        for sentence in coverage(measured).sampling:
            console.print(sentence, markup=False)
        console.print(f"Written to {output}", markup=False)
    return 0
