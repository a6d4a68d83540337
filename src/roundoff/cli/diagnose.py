"""``roundoff diagnose``: budget, plan, verify and report in one command.

With a candidate, compare and explain too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o

if TYPE_CHECKING:
    from roundoff.report import CandidateSummary, DiagnosisSummary, TradeoffPoint
    from roundoff.verbs.diagnose import Diagnosis
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
    pin: o.Pins = None,
    allow: o.Allow = None,
    of: o.Part = None,
    probes: o.Probes = None,
    precision: o.Precision = None,
    memory: o.Memory = None,
    seed: o.Seed = 0,
    candidate: Annotated[
        str | None,
        kinds.option(
            "--candidate",
            "-c",
            parse=kinds.candidate,
            help="What differs: bf16, fp16, compile, cuda (any device), channels_last, "
            "threads=N, mkldnn=off, float64, or another workload file.",
            metavar="CANDIDATE",
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
        kinds.option(
            "--backend",
            parse=kinds.backend,
            help="Backend of the candidate compile, such as aot_eager.",
            metavar="BACKEND",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Folder for the report, budget, plan and summary."
        ),
    ] = Path("out"),
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto/--no-pareto",
            help="Also solve for ten other targets, to show what accuracy costs.",
        ),
    ] = True,
    checks: Annotated[
        int,
        typer.Option(
            "--checks",
            min=0,
            help="Sites to round alone, to check their predictions.",
        ),
    ] = 16,
    rows: o.Rows = 20,
    json: o.Json = False,
) -> int:
    """Say which operators' rounding costs the output most, write the cheapest plan that
    meets the target, and prove it.

    Writes report.html, budget.parquet, plan.toml and summary.json into the output
    folder.

    With --candidate: record the workload as it is and as the candidate, and name the
    operator that makes them differ, bug or rounding. Writes the runs reference and
    candidate, comparison, report.html and summary.json, and for a number format
    budget.parquet, plan.toml and their page, plan.html.
    """
    import roundoff
    from roundoff.errors import RunError
    from roundoff.files import check_folder
    from roundoff.verbs.diagnose import Sampling, diagnose_workload

    if candidate is None and (noise or backend is not None or steps != 1):
        raise RunError(
            "only used with --candidate",
            where="--steps, --noise and --backend",
            do="say what the workload is compared with, such as --candidate bf16",
        )
    folder = check_folder(output)
    goal = o.goal(target, metric_drop, cost, cost_table, pin, allow, formats)
    sampling = Sampling(
        of=of,
        probes=probes,
        precision=precision,
        memory=memory,
        seed=seed,
        pareto=pareto,
        checks=checks,
    )
    if candidate is None:
        with o.progress(json) as progress:
            loaded = roundoff.Workload.load(workload)
            on_point = None if progress is None else _show_point
            diagnosis = diagnose_workload(
                loaded, formats, goal, sampling, progress, on_point
            )
        return _finish(diagnosis, folder, json, rows)
    from roundoff.verbs.diagnose_candidate import diagnose_candidate

    with o.progress(json) as progress:
        compared = diagnose_candidate(
            roundoff.Workload.load(workload),
            candidate,
            goal,
            sampling,
            output=folder,
            steps=steps,
            noise=noise,
            backend=backend,
            progress=progress,
        )
    return _finish_candidate(compared, folder, json, rows)


def _show_point(point: TradeoffPoint) -> None:
    """Print a point of the curve on standard error, above the bars of progress."""
    cost = f"{100 * point.relative_cost:.0f} % of the cost of fp32"
    sys.stderr.write(f"{point.target_db:.0f} dB: {cost}\n")


def _finish(diagnosis: Diagnosis, folder: Path, json: bool, rows: int) -> int:
    """Write and print a diagnosis; return the exit code."""
    from roundoff.report import print_summary, write_html

    diagnosis.budget.save(folder / "budget.parquet")
    diagnosis.plan.save(folder / "plan.toml")
    write_html(diagnosis.summary, folder / "report.html")
    _write_summary(diagnosis.summary, folder, json)
    if not json:
        console = o.console()
        print_summary(diagnosis.summary, console, top=rows)
        written = "report.html, budget.parquet, plan.toml, summary.json"
        console.print(f"Written to {folder}: {written}", markup=False)
    return 0 if diagnosis.verification.met else 1


def _finish_candidate(
    compared: CandidateDiagnosis, folder: Path, json: bool, rows: int
) -> int:
    """Write and print the diagnosis of a candidate; return the exit code."""
    from roundoff.report import print_candidate, write_html

    written = ["reference", "candidate", "comparison", "report.html", "summary.json"]
    compared.comparison.report(folder / "report.html")
    diagnosis = compared.diagnosis
    if diagnosis is not None:
        diagnosis.budget.save(folder / "budget.parquet")
        diagnosis.plan.save(folder / "plan.toml")
        write_html(diagnosis.summary, folder / "plan.html")
        written += ["plan.html", "budget.parquet", "plan.toml"]
    _write_summary(compared.summary, folder, json)
    if not json:
        console = o.console()
        print_candidate(compared.summary, console, rows)
        console.print(f"Written to {folder}: {', '.join(written)}", markup=False)
    return 0 if compared.agrees else 1


def _write_summary(
    summary: DiagnosisSummary | CandidateSummary, folder: Path, json: bool
) -> None:
    """Write ``summary.json``, and print it too if JSON was asked for."""
    from roundoff.report import write_json

    write_json(summary, folder / "summary.json")
    if json:
        print((folder / "summary.json").read_text())
