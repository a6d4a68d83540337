"""A run in the terminal: every site of a step, or one in full. Numbers keep their
width; names wrap."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from roundoff.foreign import visible
from roundoff.record import SiteDetails, SiteInput
from roundoff.report.figures import NONE, count, percent, ratio
from roundoff.report.terminal import (
    heading,
    print_table,
    say,
)

if TYPE_CHECKING:
    from roundoff.record import (
        CaptureSummary,
        HistogramBin,
        SiteInFull,
        SiteRow,
        SiteStep,
        SiteTable,
        UnrecordedInput,
    )

Columns = dict[str, list[str]]
BAR = 40
EIGHTHS = " ▏▎▍▌▋▊▉█"
_ORDER_NAMES = {
    "order": "in the order in which they ran",
    "nan": "most NaN and Inf first",
}
#: At most so many users of a tensor, and steps of its history, are printed.
_MOST_USERS = 10
_MOST_STEPS = 20


def print_show(
    shown: SiteTable | SiteDetails, console: Console, *, limit: int = 50
) -> None:
    """Print what ``roundoff.show`` returns: coverage first, then rows or one site.

    At most ``limit`` rows; a line says how many are left out.
    """
    for line in headline(shown):
        say(console, line)
    if isinstance(shown, SiteDetails):
        for entry in shown.site:
            _print_site(entry, console)
    else:
        _print_rows(shown, console, limit)


def _print_rows(table: SiteTable, console: Console, limit: int) -> None:
    order = _ORDER_NAMES.get(table.sort, f"largest {table.sort} first")
    heading(console, f"Sites, {order}")
    if not table.rows:
        say(console, "No tensor matches.")
        return
    rows = table.rows[:limit]
    columns = columns_of([_row_cells(row) for row in rows])
    if all(row.own_l2 is None for row in rows):
        del columns["own error"]
    styles = ["bold red" if row.nan or _infinite(row) else "" for row in rows]
    print_table(console, columns, styles=styles)
    for row in rows:
        if row.reason:
            say(console, f"! {row.site}: {row.reason}", style="yellow")
    hidden = len(table.rows) - len(rows)
    if hidden:
        more = f"{count(hidden, 'more row')} below: --rows {len(table.rows)}."
        say(console, more, style="dim")


def _row_cells(row: SiteRow) -> dict[str, str]:
    return {
        "site": _label(row),
        "phase": row.phase,
        "dtype": row.dtype or NONE,
        "shape": shape(row.shape),
        "min": number(row.min),
        "max": number(row.max),
        "mean": number(row.mean),
        "l2": number(row.l2),
        "NaN": whole(row.nan),
        "Inf": whole(_infinite(row)),
        "zero": percent(ratio(row.zero, row.numel)),
        "line": row.line or "",
        "own error": number(ratio(row.own_l2, row.l2)),
    }


def print_captured(summary: CaptureSummary, console: Console) -> None:
    """Print what ``roundoff capture`` says at its end: how much was recorded, what was
    left out and why, and what to type next.

    >>> from roundoff.record import CallCoverage, CaptureSummary
    >>> overloads = {"aten.mm.default": 900, "aten.add.Tensor": 300}
    >>> calls = CallCoverage(calls=1200, operators=overloads)
    >>> summary = CaptureSummary(path="runs/a", steps=[0, 1], ranks=[0], calls=calls)
    >>> print_captured(summary, Console(width=80))
    Recorded steps 0 to 1 in runs/a: 1,200 calls of 2 operators.
    Next: roundoff show runs/a
          roundoff overflow runs/a
    """
    place = f"{span('step', summary.steps)} in {summary.path}"
    if len(summary.ranks) > 1:
        place += f", {span('rank', summary.ranks)}"
    figures = ", ".join(_recorded_figures(summary))
    say(console, f"Recorded {place}: {figures}." if figures else f"Recorded {place}.")
    stopped = None if summary.calls is None else summary.calls.stopped
    if stopped:
        text = f"! The recording stopped early, the program did not: {stopped}"
        say(console, text, style="yellow")
    threads = None if summary.calls is None else summary.calls.other_threads
    if threads:
        text = f"! {elsewhere(threads)}"
        say(console, text, style="yellow")
    for entry in () if summary.tensors is None else summary.tensors.reasons:
        tensors = count(entry.count, "tensor")
        text = f"! {tensors} without statistics: {entry.reason}"
        say(console, text, style="yellow")
    if summary.noise:
        say(console, f"With random last bits: {', '.join(summary.noise)}.")
    if summary.repeats:
        say(console, f"Repeated, unchanged: {', '.join(summary.repeats)}.")
    path = shlex.quote(summary.path)
    say(console, f"Next: roundoff show {path}\n      roundoff overflow {path}")


def _recorded_figures(summary: CaptureSummary) -> list[str]:
    figures = []
    if summary.calls is not None and summary.calls.calls:
        operators = count(len(summary.calls.operators or {}), "operator")
        figures.append(f"{count(summary.calls.calls, 'call')} of {operators}")
    if summary.tensors is not None and summary.tensors.tensors:
        figures.append(count(summary.tensors.tensors, "tensor"))
    return figures


def elsewhere(threads: Mapping[str, int]) -> str:
    """What threads computed beside the recorded one.

    >>> elsewhere({"ThreadPoolExecutor-*_*": 12, "loader": 1})
    '13 calls are not recorded: they ran in threads beside it (ThreadPoolExecutor-*_*, loader)'
    """
    names = ", ".join(visible(name) for name in threads)
    calls = sum(threads.values())
    verb = "is" if calls == 1 else "are"
    return (
        f"{count(calls, 'call')} {verb} not recorded: they ran in threads beside it "
        f"({names})"
    )


def span(noun: str, numbers: Sequence[int]) -> str:
    """Numbers in words; the ends of a range without gaps.

    >>> span("step", [3]), span("step", [3, 4, 5]), span("step", [0, 7])
    ('step 3', 'steps 3 to 5', 'steps 0, 7')
    """
    if len(numbers) < 2:
        return f"{noun} {numbers[0]}" if numbers else f"no {noun}"
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"{noun}s {numbers[0]} to {numbers[-1]}"
    listed = ", ".join(map(str, numbers[:6]))
    more = f", ... {numbers[-1]}" if len(numbers) > 6 else ""
    return f"{noun}s {listed}{more}"


def headline(shown: SiteTable | SiteDetails) -> list[str]:
    """Which step this is, and how much of it was measured."""
    covered = shown.coverage
    parts = [f"{count(covered.tensors, 'tensor')} of {count(covered.sites, 'site')}"]
    if covered.views:
        parts.append(f"{covered.views:,} of them views")
    if covered.not_finite:
        parts.append(f"{count(covered.not_finite, 'tensor')} with NaN or Inf")
    else:
        parts.append("all that was measured is finite")
    place = f"Step {shown.step}"
    if len(shown.steps) > 1:
        place += f" of {shown.steps[0]} to {shown.steps[-1]}"
    if len(shown.ranks) > 1:
        place += f", rank {shown.rank} of {len(shown.ranks)}"
    lines = [f"{place}: {', '.join(parts)}."]
    if covered.without:
        why = "; ".join(f"{r.count:,}: {r.reason}" for r in covered.reasons)
        tensors = count(covered.without, "tensor")
        lines.append(f"{tensors} without statistics ({why}).")
    return lines


def _print_site(entry: SiteInFull, console: Console) -> None:
    place = f", output {entry.place}" if entry.place else ""
    name = f": {entry.name}" if entry.name else ""
    heading(console, f"{entry.site} ({entry.phase}{place}){name}")
    say(console, ", ".join(filter(None, _properties(entry))))
    say(console, f"Source line: {entry.line or 'none recorded'}")
    if entry.reason:
        say(console, f"! {entry.reason}", style="yellow")
    console.print()
    _print_statistics(entry, console)
    _print_own_error(entry, console)
    if entry.histogram:
        is_sample = entry.sampled not in (None, entry.numel)
        of_all = f" of {whole(entry.numel)}" if is_sample else ""
        sampled = whole(entry.sampled)
        heading(console, f"Magnitudes, of {sampled}{of_all} elements")
        for line in histogram(entry.histogram):
            say(console, line)
    _print_inputs(entry.inputs, console)
    _print_users(entry, console)
    _print_history(entry.history, console)


def _properties(entry: SiteInFull) -> list[str]:
    """What a tensor is, as parts of one line; empty where there is nothing to say."""
    return [
        f"{entry.dtype} {shape(entry.shape)}" if entry.dtype else "",
        f"on {entry.device}" if entry.device else "",
        "in place" if entry.inplace else "",
        "" if entry.view_of is None else f"a view of record {entry.view_of}",
        f"ranks {entry.group}" if entry.group else "",
        entry.overload or "",
    ]


def _print_statistics(entry: SiteInFull, console: Console) -> None:
    finite = {
        "min": [number(entry.min)],
        "max": [number(entry.max)],
        "mean": [number(entry.mean)],
        "l2": [number(entry.l2)],
        "std": [number(entry.std)],
    }
    counts = {
        "of": [whole(entry.numel)],
        "NaN": [whole(entry.nan)],
        "+Inf": [whole(entry.posinf)],
        "-Inf": [whole(entry.neginf)],
        "zero": [whole(entry.zero)],
        "subnormal": [whole(entry.subnormal)],
    }
    print_table(console, finite)
    console.print()
    print_table(console, counts)


def _print_own_error(entry: SiteInFull, console: Console) -> None:
    if entry.own_l2 is None and not entry.own_reason:
        return
    share = number(ratio(entry.own_l2, entry.l2))
    why = f" ({entry.own_reason})" if entry.own_reason else ""
    largest = number(entry.own_max)
    say(console, f"Own error: {share} of its l2, at most {largest}{why}")


def _print_inputs(
    inputs: Sequence[SiteInput | UnrecordedInput], console: Console
) -> None:
    if not inputs:
        return
    heading(console, "Inputs")
    print_table(console, columns_of([_input_cells(entry) for entry in inputs]))


def _input_cells(entry: SiteInput | UnrecordedInput) -> dict[str, str]:
    if not isinstance(entry, SiteInput):
        names = ("dtype", "shape", "min", "max", "NaN", "Inf")
        site = f"record {entry.record}, which was not recorded"
        return {"site": site, **dict.fromkeys(names, NONE), "line": ""}
    return {
        "site": _label(entry),
        "dtype": entry.dtype or NONE,
        "shape": shape(entry.shape),
        "min": number(entry.min),
        "max": number(entry.max),
        "NaN": whole(entry.nan),
        "Inf": whole(_infinite(entry)),
        "line": entry.line or "",
    }


def _print_users(entry: SiteInFull, console: Console) -> None:
    if not entry.used_by:
        return
    heading(console, "Used by")
    for user in entry.used_by[:_MOST_USERS]:
        line = f", {user.line}" if user.line else ""
        say(console, f"{user.site} ({user.phase}{line})")
    if len(entry.used_by) > _MOST_USERS:
        say(console, f"and {len(entry.used_by) - _MOST_USERS:,} more")


def _print_history(history: Sequence[SiteStep], console: Console) -> None:
    if len(history) < 2:
        return
    heading(console, "In other steps")
    steps = history[-_MOST_STEPS:]
    print_table(console, columns_of([_step_cells(step) for step in steps]))
    hidden = len(history) - len(steps)
    if hidden:
        say(console, f"and {count(hidden, 'earlier step')}", style="dim")


def _step_cells(step: SiteStep) -> dict[str, str]:
    return {
        "step": str(step.step),
        "min": number(step.min),
        "max": number(step.max),
        "l2": number(step.l2),
        "NaN": whole(step.nan),
        "Inf": whole(_infinite(step)),
    }


def columns_of(rows: Sequence[dict[str, str]]) -> Columns:
    """The columns of rows of cells that all have the same names.

    >>> columns_of([{"site": "/exp", "max": "1"}, {"site": "/log", "max": "2"}])
    {'site': ['/exp', '/log'], 'max': ['1', '2']}
    """
    return {name: [row[name] for row in rows] for name in rows[0]}


def histogram(bins: Sequence[HistogramBin]) -> list[str]:
    """Bars of an exponent histogram, one line for each power of two, largest magnitudes
    first.

    >>> from roundoff.record import HistogramBin
    >>> lines = histogram(
    ...     [HistogramBin(exponent=-1, count=1), HistogramBin(exponent=0, count=4)]
    ... )
    >>> lines
    ['2^0  ████████████████████████████████████████ 4', '2^-1 ██████████ 1']
    """
    top = max(b.count for b in bins)
    width = max(len(f"2^{b.exponent}") for b in bins)
    lines = []
    for entry in reversed(bins):
        least = 1 if entry.count else 0
        eighths = max(round(BAR * 8 * entry.count / top), least)
        bar = EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()
        power = f"2^{entry.exponent}"
        cells = [f"{power:<{width}}", bar, f"{entry.count:,}"]
        lines.append(" ".join(cell for cell in cells if cell))
    return lines


def number(value: float | None) -> str:
    """A statistic to four digits.

    >>> number(0.000123456), number(65504.0), number(None)
    ('0.0001235', '6.55e+04', '–')
    """
    if value is None:
        return NONE
    if abs(value) < 1e4:
        return f"{value + 0.0:.4g}"  # -0.0 + 0.0 is 0.0
    return f"{value:.3g}"


def whole(value: int | None) -> str:
    """A count with thousands separated."""
    return NONE if value is None else f"{value:,}"


def shape(sizes: Sequence[int] | None) -> str:
    """Sizes as text.

    >>> shape([8, 128]), shape([]), shape(None)
    ('8×128', 'scalar', '–')
    """
    if sizes is None:
        return NONE
    return "×".join(map(str, sizes)) if sizes else "scalar"


def _infinite(row: SiteRow | SiteInput | SiteStep) -> int | None:
    if row.posinf is None or row.neginf is None:
        return None
    return row.posinf + row.neginf


def _label(row: SiteRow | SiteInput) -> str:
    """A parameter or buffer as it was before has its name alone, a call's result its
    site too."""
    if not row.name:
        return row.site
    is_leaf = row.operator in ("parameter", "buffer")
    return row.name if is_leaf else f"{row.site} {row.name}"
