"""``roundoff diagnose``: budget, plan, verify and report in one command; with a candidate, compare and explain too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundoff.cli import options as o

if TYPE_CHECKING:
    from roundoff.verbs.diagnose_candidate import CandidateDiagnosis


def command(
    workload: Annotated[
        Path, typer.Argument(help="A Python file with model() and batches().")
    ],
    formats: o.Formats = o.DEFAULT_FORMATS,
    target: o.Target = None,
    metric_drop: o.MetricDrop = None,
    cost: o.Cost = "bytes",
    cost_table: o.CostTable = None,
    pin: o.Pin = None,
    allow: o.Allow = None,
    of: o.Part = None,
    probes: o.Probes = None,
    seed: o.Seed = 0,
    candidate: Annotated[
        str | None,
        typer.Option(
            "--candidate",
            "-c",
            help="What differs: bf16, fp16, compile, cuda (any device), channels_last, "
            "threads=N, mkldnn=off, float64, or another workload file.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Steps to compare, a batch each.")
    ] = 1,
    noise: Annotated[
        int,
        typer.Option(
            "--noise",
            min=0,
            help="Record the reference N more times with random last bits.",
        ),
    ] = 0,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", help="Backend of the candidate compile, such as aot_eager."
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Folder for the report, budget, plan and summary."
        ),
    ] = Path("out"),
    top: o.Top = 20,
    json: o.Json = False,
) -> int:
    """Say which operators' rounding costs the output most, write the cheapest plan that meets the target, and prove it.

    Writes report.html, budget.parquet, plan.toml and summary.json into the output folder.

    With --candidate: record the workload as it is and as the candidate, and name the operator that makes them differ, bug
    or rounding. Writes the runs reference and candidate, comparison, report.html and summary.json, and for a number format
    budget.parquet, plan.toml and their page, plan.html.
    """
    import roundoff
    from roundoff.errors import RunError
    from roundoff.files import check_folder
    from roundoff.report import print_summary, write_html, write_json

    if candidate is None and (noise or backend is not None or steps != 1):
        raise RunError(
            "only used with --candidate",
            where="--steps, --noise and --backend",
            do="say what the workload is compared with, such as --candidate bf16",
        )
    folder = check_folder(output)
    names = o.split(formats)
    table = o.cost_table(cost, cost_table, names)
    options: dict[str, Any] = {
        "target": target,
        "metric_drop": metric_drop,
        "cost": cost,
        "cost_table": table,
        "pin": o.pairs(pin, "pin"),
        "allow": o.allowed(allow),
        "part": of,
        "probes": probes,
        "seed": seed,
    }
    with o.progress(json) as progress:
        loaded = roundoff.Workload.load(workload)
        if candidate is not None:
            both = roundoff.diagnose(
                loaded,
                candidate=candidate,
                output=folder,
                steps=steps,
                noise=noise,
                backend=backend,
                progress=progress,
                **options,
            )
        else:
            found = roundoff.diagnose(loaded, names, progress=progress, **options)
    if candidate is not None:
        return _against(both, folder, json, top)
    found.budget.save(folder / "budget.parquet")
    found.plan.save(folder / "plan.toml")
    write_html(found.summary, folder / "report.html")
    write_json(found.summary, folder / "summary.json")
    if json:
        print((folder / "summary.json").read_text())
    else:
        console = o.console(False)
        print_summary(found.summary, console, top=top)
        names_written = "report.html, budget.parquet, plan.toml, summary.json"
        console.print(f"Written to {folder}: {names_written}", markup=False)
    return 0 if found.verification.met else 1


def _against(found: CandidateDiagnosis, folder: Path, json: bool, top: int) -> int:
    """Write and print what a candidate's diagnosis found; the exit code."""
    from roundoff.report import print_candidate, write_html, write_json

    written = ["reference", "candidate", "comparison", "report.html", "summary.json"]
    found.comparison.report(folder / "report.html")
    if found.diagnosis is not None:
        found.diagnosis.budget.save(folder / "budget.parquet")
        found.diagnosis.plan.save(folder / "plan.toml")
        write_html(found.diagnosis.summary, folder / "plan.html")
        written += ["plan.html", "budget.parquet", "plan.toml"]
    write_json(found.summary, folder / "summary.json")
    if json:
        print((folder / "summary.json").read_text())
    else:
        console = o.console(False)
        print_candidate(found.summary, found.comparison.summary(20), console, top)
        console.print(f"Written to {folder}: {', '.join(written)}", markup=False)
    return 0 if found.agrees else 1
