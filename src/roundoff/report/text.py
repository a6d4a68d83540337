"""A diagnosis in the terminal: ranking, plan, verification and coverage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from roundoff.budget import deciding
from roundoff.record import Setting
from roundoff.report import figures
from roundoff.report.answer import (
    REFERENCE,
    agreement,
    answer_diagnosis,
    every_call,
    predicted_metric,
    totals_sentences,
)
from roundoff.report.diagnosis import (
    Coverage,
    DiagnosisSummary,
    LeftOutCalls,
    PlanSummary,
    RankingRow,
    VerificationSummary,
    VerifiedResult,
    VerifiedRound,
)
from roundoff.report.figures import amount, count, db, listing, metric, percent, ratio
from roundoff.report.output_columns import named
from roundoff.report.output_table import print_outputs
from roundoff.report.terminal import (
    Columns,
    heading,
    print_table,
    print_text,
    say,
)

#: From this many columns on, headings are spelled out.
WIDE = 110
#: Sites named in a list, and for each format of a plan.
EXAMPLES = 10
PLANNED = 24


def print_summary(
    summary: DiagnosisSummary, console: Console, *, top: int = 20
) -> None:
    """Print what ``roundoff diagnose`` shows.

    The answer, environment, ranked table, plan, verification and coverage, with ``top``
    ranked rows. Fits the console's width; names may contain brackets. Where there is no
    site, a sentence says so above the environment and the coverage.
    ``roundoff.report`` has an example.
    """
    probes = count(summary.probes, "probe")
    samples = count(summary.samples, "sample")
    formats = listing(list(summary.formats))
    say(
        console,
        f"roundoff {summary.version}: {summary.workload} in {formats} ({probes}, {samples})",
    )
    console.print()
    _print_answer(summary, console)
    if summary.has_sites and summary.target.note:
        say(console, f"About the target: {summary.target.note}.")
    _print_environment(summary.environment, console)
    if summary.has_sites:
        print_ranking(summary.ranking, console, top=top)
        for sentence in totals_sentences(summary):
            say(console, sentence)
        _print_plan(summary.plan, console)
        print_verify(summary.verification, console)
        say(console, agreement(summary.scatter))
    _print_coverage(summary.coverage, console)
    console.print()
    times = [f"{stage} {seconds:.1f}" for stage, seconds in summary.seconds.items()]
    say(console, f"Seconds: {', '.join(times)}", style="dim")


def _print_answer(summary: DiagnosisSummary, console: Console) -> None:
    verdict, *sentences = answer_diagnosis(summary)
    style = "bold "
    if summary.has_sites:
        style += "green" if summary.result.met else "red"
    print_text(console, Text.assemble((verdict, style), " ", " ".join(sentences)))


def print_ranking(
    rows: Sequence[RankingRow],
    console: Console,
    *,
    top: int = 20,
    is_planned: bool = True,
) -> None:
    """Print the ranked table, site by format, worst first.

    SQNR in dB with standard error (``run`` where the model ran with this site rounded,
    which has none), share of the noise with every site in that format,
    own parts. A part shown as ``–`` does not apply or makes no error; SQNR is ``exact``
    where rounding changes nothing and ``lost`` where the result is not finite.
    ``is_planned`` is false before there is a plan: it has no column then.

    >>> from roundoff.report import RankingRow
    >>> row = RankingRow(rank=1, site="head/linear", format="int8", sqnr_db=31.26,
    ...     stderr_db=0.4, share=0.5, activation_db=33.1, weight_db=35.9, chosen="int8")
    >>> print_ranking([row], Console(width=80))
    <BLANKLINE>
    Ranking: what rounding each site costs the output (dB)
    #   site          format   SQNR     ±   noise   act.    wt.   out.   plan
    ─────────────────────────────────────────────────────────────────────────
    1   head/linear   int8     31.3   0.4   50.0%   33.1   35.9      –   int8
    """
    heading(console, "Ranking: what rounding each site costs the output (dB)")
    if not rows:
        say(console, "No site was measured in any format.")
        return
    shown = rows[:top]
    _print_rows(shown, console, is_planned=is_planned)
    for row in shown:
        if row.needs_note:
            note = f"! {row.rank}: {row.site} in {row.format}: {row.note}"
            say(console, note, style="yellow")
    tried = sum(row.measured == "trial" for row in rows)
    if tried:
        rows_tried = count(tried, "row")
        say(console, f"run: {rows_tried} measured by running the model.", style="dim")
    hidden = len(rows) - len(shown)
    if hidden:
        say(console, f"{count(hidden, 'more row')} below.", style="dim")


def _print_rows(
    rows: Sequence[RankingRow],
    console: Console,
    *,
    is_planned: bool,
) -> None:
    """Print ranked rows."""
    is_wide = console.width >= WIDE
    parts = ("activation", "weight", "output") if is_wide else ("act.", "wt.", "out.")
    share = "share of noise" if is_wide else "noise"
    cells: dict[str, Callable[[RankingRow], str]] = {
        "#": _rank,
        "site": lambda row: row.site,
        "format": lambda row: row.format,
        "SQNR": figures.sqnr,
        "±": lambda row: figures.uncertainty(row.stderr_db, row.measured),
        share: lambda row: percent(row.share),
        parts[0]: lambda row: db(row.activation_db),
        parts[1]: lambda row: db(row.weight_db),
        parts[2]: lambda row: db(row.output_db),
    }
    if any(row.output for row in rows):
        cells["at"] = lambda row: row.output
    if is_planned:
        cells["plan"] = lambda row: row.chosen
    columns = {name: list(map(cell, rows)) for name, cell in cells.items()}
    styles = ["bold" if is_planned and row.format == row.chosen else "" for row in rows]
    print_table(console, columns, styles=styles)


def _rank(row: RankingRow) -> str:
    return f"{row.rank}!" if row.needs_note else str(row.rank)


def print_plan(plan: PlanSummary, console: Console) -> None:
    """Print a plan: sites in each format, and its cost.

    Beside it stand all-fp32 and everything in its cheapest format.

    >>> from roundoff.report import PlanCost, PlanSummary
    >>> cost = PlanCost(model="bytes", unit="MB", plan=3.0, fp32=8.0, lowest=2.0,
    ...     lowest_format="int8")
    >>> plan = PlanSummary(sites={"int8": 9, "fp32": 3}, rules=4, cost=cost)
    >>> print_plan(plan, Console(width=80))
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
    is_one = len(plan.outputs) < 2
    if is_one and (plan.predicted_db is not None or plan.target_db is not None):
        predicted = f"Predicted {db(plan.predicted_db)} dB"
        say(console, f"{predicted}, target {db(plan.target_db)} dB.")
    print_outputs(plan.outputs, console)
    if plan.note:
        say(console, f"About the target: {plan.note}.")


def _print_plan(plan: PlanSummary, console: Console) -> None:
    sites = sum(plan.sites.values())
    heading(console, f"Plan: {count(sites, 'site')} by {count(plan.rules, 'rule')}")
    used = {name: number for name, number in plan.sites.items() if number}
    print_table(
        console,
        {
            "format": list(used),
            "sites": [f"{number:,}" for number in used.values()],
            "share": [percent(ratio(number, sites)) for number in used.values()],
        },
    )
    _print_sites(plan.formats, console)
    for site, reason in list(plan.shared.items())[:EXAMPLES]:
        say(console, f"! {site} {reason}", style="yellow")
    more = len(plan.shared) - EXAMPLES
    if more > 0:
        say(console, f"  and {more:,} more that share a weight", style="dim")
    console.print()
    cost = plan.cost
    costs = {
        "this plan": cost.plan,
        f"all {REFERENCE}": cost.fp32,
        f"all cheapest (mostly {cost.lowest_format})": cost.lowest,
    }
    print_table(
        console,
        {
            "plan runs": list(costs),
            f"cost ({cost.model})": [amount(v, cost.unit) for v in costs.values()],
            f"of {REFERENCE}": [percent(ratio(v, cost.fp32)) for v in costs.values()],
        },
    )


def _print_sites(formats: Mapping[str, str], console: Console) -> None:
    """Print which sites run in each format, the first of them by name."""
    by_format: dict[str, list[str]] = {}
    for site, fmt in formats.items():
        by_format.setdefault(fmt, []).append(site)
    if not by_format:
        return
    console.print()
    for fmt, sites in by_format.items():
        named = ", ".join(sites[:PLANNED])
        more = len(sites) - PLANNED
        rest = f" and {more:,} more (plan.toml has all)" if more > 0 else ""
        say(console, f"{fmt}: {named}{rest}")


def print_verify(verification: VerificationSummary, console: Console) -> None:
    """Print predicted beside measured SQNR (dB) and metric of every round.

    The result follows. ``added up`` is the prediction without the correlations between
    sites. ``–`` stands where nothing was predicted or there is no metric, ``∞`` for an
    output without any error.
    """
    result = verification.result
    heading(console, "Verification: predicted beside measured")
    if verification.rounds:
        columns = _round_columns(verification.rounds)
        print_table(console, columns)
    else:
        say(console, "Nothing was run.")
    _print_result(result, console)
    if result.metric_name is not None:
        say(
            console,
            f"{result.metric_name}: {metric(result.metric_reference)} before rounding, "
            f"{predicted_metric(result)} predicted, "
            f"{metric(result.metric_measured)} measured.",
        )
    native = "" if result.native_db is None else f"{db(result.native_db)} dB; "
    if native or result.native_note:
        say(console, f"With real casts: {native}{result.native_note}.")


def _round_columns(rounds: Sequence[VerifiedRound]) -> Columns:
    columns = {
        "round": [str(entry.round) for entry in rounds],
        "predicted": [db(entry.predicted_db) for entry in rounds],
        "measured": [db(entry.measured_db) for entry in rounds],
        "added up": [db(entry.additive_db) for entry in rounds],
    }
    if any(entry.output for entry in rounds):
        columns["at"] = [entry.output for entry in rounds]
    if any(_has_metric(entry) for entry in rounds):
        columns["metric pred."] = [metric(entry.metric_predicted) for entry in rounds]
        columns["meas."] = [metric(entry.metric_measured) for entry in rounds]
    columns["then"] = [entry.action for entry in rounds]
    return columns


def _has_metric(entry: VerifiedRound) -> bool:
    return entry.metric_predicted is not None or entry.metric_measured is not None


def _print_result(result: VerifiedResult, console: Console) -> None:
    target = ""
    if result.target_db is not None:
        target = f" (target {db(result.target_db)} dB)"
    output = ""
    if len(result.outputs) > 1:
        row = deciding(result.outputs)
        output = named(row.output)
        target = "" if row.target_db is None else f" (target {db(row.target_db)} dB)"
    met = "met" if result.met else "missed"
    predicted = db(result.predicted_db)
    measured = db(result.measured_db)
    say(
        console,
        f"Target {met}: SQNR{output} {predicted} dB predicted, {measured} dB measured{target}.",
        style="bold green" if result.met else "bold red",
    )
    print_outputs(result.outputs, console)


def _print_environment(settings: Sequence[Setting], console: Console) -> None:
    heading(console, "Environment that changes numbers")
    for setting in settings:
        if setting.note:
            say(console, f"{setting.name}: {setting.value} ({setting.note})")
    plain = [f"{s.name}: {s.value}" for s in settings if not s.note]
    if plain:
        say(console, "; ".join(plain))


def _print_coverage(coverage: Coverage, console: Console) -> None:
    sites = count(coverage.sites, "site")
    calls = count(coverage.calls, "call")
    parameters = count(coverage.params, "parameter")
    heading(console, f"Coverage: {sites} from {calls}, {parameters}")
    for sentence in coverage.sampling:
        say(console, sentence)
    if coverage.excluded:
        _print_left_out(coverage.excluded, console)
    else:
        say(console, every_call(coverage))
    lost = coverage.no_path
    if lost:
        number = count(len(lost), "site")
        say(console, f"Without a path to the output, so in {REFERENCE}: {number}")
        for line in lost[:EXAMPLES]:
            say(console, f"  {line}")
    if len(lost) > EXAMPLES:
        say(console, f"  and {len(lost) - EXAMPLES:,} more")


def _print_left_out(rows: Sequence[LeftOutCalls], console: Console) -> None:
    print_table(
        console,
        {
            "count": [f"{row.count:,}" for row in rows],
            "operator": [row.operator for row in rows],
            "reason": [_reason(row) for row in rows],
            "for example": [" ".join(row.examples[:1]) for row in rows],
        },
    )


def _reason(row: LeftOutCalls) -> str:
    return f"{row.where}: {row.reason}" if row.where else row.reason
