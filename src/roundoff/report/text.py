"""What the terminal shows, at any width: names are cut in the middle where they must be, numbers never."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from roundoff.report import figures
from roundoff.report.answer import REFERENCE, agreement, answer, totals, totals_sentence
from roundoff.report.figures import amount, count, db, listing, metric, percent, ratio
from roundoff.report.names import elide

Row = Mapping[str, Any]
Columns = dict[str, list[str]]

#: From this many columns on, headings are spelled out.
WIDE = 110
SITE_LEAST = 16
PROSE_LEAST = 12
EXAMPLES = 10
LEFT_ALIGNED = frozenset(
    "site|format|plan|operator|plan runs|reason|for example|then|phase|dtype|line|event|verdict|looks like|status|from|"
    "counterpart|configuration|note|file|what|step|observer|formats".split("|")
)


def print_summary(summary: Row, console: Console, *, top: int = 20) -> None:
    """What ``roundoff diagnose`` shows: the answer, environment, ranked table, plan, verification and coverage.

    ``summary`` is the dict of ``roundoff.diagnose`` (``summary.json``), ``top`` the number of ranked rows. Fits the
    console's width; names may contain brackets. Where there is no site, a sentence says so above the environment
    and the coverage. ``roundoff.report`` has an example.
    """
    work = f"{count(summary['probes'], 'probe')}, {count(summary['samples'], 'sample')}"
    _say(
        console,
        f"roundoff {summary['version']}: {summary['workload']} in {listing(summary['formats'])} ({work})",
    )
    console.print()
    some = bool(summary["coverage"]["sites"])
    verdict, *rest = answer(summary)
    colour = ("green" if summary["result"]["met"] else "red") if some else ""
    _print(console, Text.assemble((verdict, f"bold {colour}"), " ", " ".join(rest)))
    if some and summary["target"]["note"]:
        _say(console, f"About the target: {summary['target']['note']}.")
    _print_environment(summary["environment"], console)
    if some:
        print_ranking(summary["ranking"], console, top=top)
        _say(console, totals_sentence(totals(summary)))
        _print_plan(summary["plan"], console)
        print_verify(summary, console)
        _say(console, agreement(summary["scatter"]))
    _print_coverage(summary["coverage"], console)
    console.print()
    times = ", ".join(
        f"{name} {value:.1f}" for name, value in summary["seconds"].items()
    )
    _say(console, f"Seconds: {times}", style="dim")


def print_ranking(rows: Sequence[Row], console: Console, *, top: int = 20) -> None:
    """The ranked table, site by format, worst first: SQNR in dB with standard error, share of the noise, own parts.

    ``share`` is of the noise with every site in that format. A part shown as ``–`` does not apply or makes no error;
    SQNR is ``exact`` where rounding changes nothing and ``lost`` where the result is not finite. Where the console
    is too narrow, own parts and then the plan's format are left out, and a line says so.

    >>> row = {"rank": 1, "site": "head/linear", "format": "int8", "sqnr_db": 31.26, "stderr_db": 0.4, "share": 0.5,
    ...        "activation_db": 33.1, "weight_db": 35.9, "output_db": None, "chosen": "int8", "note": ""}
    >>> print_ranking([row], Console(width=80))
    <BLANKLINE>
    Ranking: what rounding each site costs the output (dB)
    #   site          format   SQNR     ±   noise   act.    wt.   out.   plan
    ─────────────────────────────────────────────────────────────────────────
    1   head/linear   int8     31.3   0.4   50.0%   33.1   35.9      –   int8
    """
    _heading(console, "Ranking: what rounding each site costs the output (dB)")
    if not rows:
        _say(console, "No site was measured in any format.")
        return
    shown = rows[:top]
    left_out = _print_rows(shown, {row["site"] for row in rows}, console)
    for row in shown:
        if _noted(row):
            _say(
                console,
                f"! {row['rank']}: {row['site']} in {row['format']}: {row['note']}",
                style="yellow",
            )
    if left_out:
        _say(
            console,
            f"Left out at {console.width} columns: {listing(left_out)}.",
            style="dim",
        )
    if len(rows) > len(shown):
        _say(
            console, f"{count(len(rows) - len(shown), 'more row')} below.", style="dim"
        )


def print_plan(plan: Row, console: Console) -> None:
    """The chosen plan: sites in each format, and its cost beside all-fp32 and everything in its cheapest format.

    ``plan`` is ``summary["plan"]`` or what ``roundoff plan --json`` prints.

    >>> cost = {"model": "bytes", "unit": "MB", "plan": 3.0, "fp32": 8.0, "lowest": 2.0, "lowest_format": "int8"}
    >>> print_plan({"sites": {"int8": 9, "fp32": 3}, "rules": 4, "cost": cost}, Console(width=80))
    <BLANKLINE>
    Plan: 12 sites by 4 rules
    format   sites   share
    ──────────────────────
    int8         9   75.0%
    fp32         3   25.0%
    <BLANKLINE>
    plan runs                    cost (bytes)   of fp32
    ───────────────────────────────────────────────────
    this plan                            3 MB     37.5%
    all fp32                             8 MB      100%
    all cheapest (mostly int8)           2 MB     25.0%
    """
    _print_plan(plan, console)
    if plan.get("predicted_db") is not None or plan.get("target_db") is not None:
        _say(
            console,
            f"Predicted {db(plan.get('predicted_db'))} dB, target {db(plan.get('target_db'))} dB.",
        )
    if plan.get("note"):
        _say(console, f"About the target: {plan['note']}.")


def _print_plan(plan: Row, console: Console) -> None:
    sites = sum(plan["sites"].values())
    _heading(console, f"Plan: {count(sites, 'site')} by {count(plan['rules'], 'rule')}")
    used = {f: n for f, n in plan["sites"].items() if n}
    shares = [percent(ratio(n, sites)) for n in used.values()]
    _print_table(
        console,
        {
            "format": list(used),
            "sites": [f"{n:,}" for n in used.values()],
            "share": shares,
        },
    )
    console.print()
    cost = plan["cost"]
    cheapest = f"all cheapest (mostly {cost['lowest_format']})"
    names = {"plan": "this plan", "fp32": f"all {REFERENCE}", "lowest": cheapest}
    _print_table(
        console,
        {
            "plan runs": list(names.values()),
            f"cost ({cost['model']})": [
                amount(cost[key], cost["unit"]) for key in names
            ],
            f"of {REFERENCE}": [
                percent(ratio(cost[key], cost["fp32"])) for key in names
            ],
        },
    )


def print_verify(verification: Row, console: Console) -> None:
    """Predicted beside measured SQNR (dB) and metric, for every round of verification, and the result.

    ``verification`` has the keys ``rounds`` and ``result`` of a summary. ``added up`` is the prediction without the
    correlations between sites. ``–`` stands where nothing was predicted or there is no metric, ``∞`` for an output
    without any error.
    """
    rounds, result = verification["rounds"], verification["result"]
    _heading(console, "Verification: predicted beside measured")
    if not rounds:
        _say(console, "Nothing was run.")
    else:
        columns = {
            "round": [str(r["round"]) for r in rounds],
            "predicted": [db(r["predicted_db"]) for r in rounds],
            "measured": [db(r["measured_db"]) for r in rounds],
            "added up": [db(r["additive_db"]) for r in rounds],
        }
        if any(
            r["metric_predicted"] is not None or r["metric_measured"] is not None
            for r in rounds
        ):
            columns["metric pred."] = [metric(r["metric_predicted"]) for r in rounds]
            columns["meas."] = [metric(r["metric_measured"]) for r in rounds]
        _print_table(
            console, {**columns, "then": [r["action"] for r in rounds]}, prose={"then"}
        )
    target = (
        ""
        if result.get("target_db") is None
        else f" (target {db(result['target_db'])} dB)"
    )
    met = "met" if result["met"] else "missed"
    predicted, measured = db(result["predicted_db"]), db(result["measured_db"])
    line = (
        f"Target {met}: SQNR {predicted} dB predicted, {measured} dB measured{target}."
    )
    _say(console, line, style="bold green" if result["met"] else "bold red")
    if result["metric_name"] is not None:
        std = result["metric_predicted_std"]
        _say(
            console,
            f"{result['metric_name']}: {metric(result['metric_reference'])} before rounding, "
            f"{metric(result['metric_predicted'])}{'' if std is None else f' ± {std:.1g}'} predicted, "
            f"{metric(result['metric_measured'])} measured.",
        )
    native = "" if result["native_db"] is None else f"{db(result['native_db'])} dB; "
    if native or result["native_note"]:
        _say(console, f"With real casts: {native}{result['native_note']}.")


def _print_environment(rows: Sequence[Row], console: Console) -> None:
    _heading(console, "Environment that changes numbers")
    for row in rows:
        if row["note"]:
            _say(console, f"{row['name']}: {row['value']} ({row['note']})")
    plain = [f"{row['name']}: {row['value']}" for row in rows if not row["note"]]
    if plain:
        _say(console, "; ".join(plain))


def _print_coverage(coverage: Row, console: Console) -> None:
    sites, calls = count(coverage["sites"], "site"), count(coverage["calls"], "call")
    _heading(
        console,
        f"Coverage: {sites} from {calls}, {count(coverage['params'], 'parameter')}",
    )
    left_out = coverage["excluded"]
    if left_out:
        _print_table(
            console,
            {
                "count": [f"{e['count']:,}" for e in left_out],
                "operator": [e["operator"] for e in left_out],
                "reason": [_reason(e) for e in left_out],
                "for example": [
                    e["examples"][0] if e["examples"] else "" for e in left_out
                ],
            },
            prose={"operator", "reason", "for example"},
        )
    else:
        _say(console, "Every call became a site that runs in some format.")
    if coverage["no_path"]:
        _say(
            console,
            f"Without a path to the output, so in {REFERENCE}: {count(len(coverage['no_path']), 'site')}",
        )
        for line in coverage["no_path"][:EXAMPLES]:
            _say(console, f"  {line}")
        if len(coverage["no_path"]) > EXAMPLES:
            _say(console, f"  and {len(coverage['no_path']) - EXAMPLES:,} more")


def _reason(excluded: Row) -> str:
    where = excluded.get("where")
    return f"{where}: {excluded['reason']}" if where else str(excluded["reason"])


def _print_rows(
    rows: Sequence[Row], sites: Collection[str], console: Console
) -> list[str]:
    """The ranked rows, the site column as wide as the numbers leave it; returns what had to be left out."""
    wide = console.width >= WIDE
    parts = ("activation", "weight", "output") if wide else ("act.", "wt.", "out.")
    keys = ("activation_db", "weight_db", "output_db")
    columns = {
        "#": [f"{row['rank']}{'!' if _noted(row) else ''}" for row in rows],
        "site": [row["site"] for row in rows],
        "format": [row["format"] for row in rows],
        "SQNR": [figures.sqnr(row) for row in rows],
        "±": [figures.stderr(row["stderr_db"]) for row in rows],
        "share of noise" if wide else "noise": [percent(row["share"]) for row in rows],
        **{
            name: [db(row[key]) for row in rows]
            for name, key in zip(parts, keys, strict=True)
        },
        "plan": [row["chosen"] for row in rows],
    }
    left_out = []
    groups = (
        (parts, "own parts (activation, weight, output)"),
        (("plan",), "the format in the plan"),
    )
    for names, label in groups:
        if console.width - _width({**columns, "site": []}, 1) < SITE_LEAST:
            columns = {
                name: cells for name, cells in columns.items() if name not in names
            }
            left_out.append(label)
    room = max(console.width - _width({**columns, "site": []}, 1), 3)
    columns["site"] = [elide(name, room, sites) for name in columns["site"]]
    styles = ["bold" if row["format"] == row["chosen"] else "" for row in rows]
    _print_table(console, columns, styles=styles)
    return left_out


def _noted(row: Row) -> bool:
    return row["note"] not in ("", "exact")  # that one stands in the SQNR column


def _width(columns: Columns, gap: int) -> int:
    """Columns of the terminal that a table takes; a heading without cells, the site's, takes nothing itself."""
    cells = (
        max(map(cell_len, [name, *cells])) for name, cells in columns.items() if cells
    )
    return sum(cells) + gap * (len(columns) - 1)


def _print_table(
    console: Console,
    columns: Columns,
    *,
    prose: Collection[str] = (),
    styles: Sequence[str] | None = None,
) -> None:
    """A table whose numbers keep their width whatever the console's; only ``prose`` columns wrap."""
    fixed = {
        name: ["x" * PROSE_LEAST] if name in prose else cells
        for name, cells in columns.items()
    }
    gap = (
        3 if _width(fixed, 3) <= console.width else 1
    )  # rich's divider, and a space on either side
    needed = _width(fixed, gap)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, gap // 2),
        pad_edge=False,
        show_edge=False,
        header_style="bold" if prose or styles is None else "",
        width=None if needed <= console.width else needed,
    )
    for name in columns:
        table.add_column(
            Text(name),
            justify="left" if name in LEFT_ALIGNED else "right",
            no_wrap=name not in prose,
            overflow="fold",
            min_width=max(map(cell_len, [name, *fixed[name]])),
        )
    for index, values in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(*map(Text, values), style=styles[index] if styles else None)
    console.print(table, crop=False, highlight=False)


def _heading(console: Console, text: str) -> None:
    console.print()
    _say(console, text, style="bold")


def _say(console: Console, text: str, style: str = "") -> None:
    _print(console, Text(text, style=style))


def _print(console: Console, text: Text) -> None:
    console.print(text, highlight=False, overflow="fold")
