"""A run in the terminal: every site of a step, or one in full. Numbers keep their width; names are cut in the middle."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from roundoff.report.figures import NONE, count, percent, ratio
from roundoff.report.names import elide
from roundoff.report.terminal import SITE_LEAST
from roundoff.report.terminal import heading as _heading
from roundoff.report.terminal import print_table as _print_table
from roundoff.report.terminal import say as _say
from roundoff.report.terminal import table_width as _width

Row = Mapping[str, Any]
Columns = dict[str, list[str]]
BAR = 40
EIGHTHS = " ▏▎▍▌▋▊▉█"


def print_show(data: Row, console: Console, *, limit: int = 50) -> None:
    """What ``roundoff show`` prints of the data of ``store.sites.show``: coverage first, then rows or one site.

    At most ``limit`` rows; a line says how many are left out, and which columns where the console is narrow.
    """
    for line in headline(data):
        _say(console, line)
    if "site" in data:
        for entry in data["site"]:
            _print_site(entry, console)
        return
    rows = data["rows"]
    _heading(
        console,
        f"Sites, {_SORTED.get(data['sort'], 'largest ' + data['sort'] + ' first')}",
    )
    if not rows:
        _say(console, "No tensor matches.")
        return
    shown = rows[:limit]
    columns = {
        "site": [_label(r) for r in shown],
        "phase": [r["phase"] for r in shown],
        "dtype": [r["dtype"] or NONE for r in shown],
        "shape": [shape(r["shape"]) for r in shown],
        "min": [number(r["min"]) for r in shown],
        "max": [number(r["max"]) for r in shown],
        "mean": [number(r["mean"]) for r in shown],
        "l2": [number(r["l2"]) for r in shown],
        "NaN": [whole(r["nan"]) for r in shown],
        "Inf": [whole(_infinite(r)) for r in shown],
        "zero": [percent(ratio(r["zero"], r["numel"])) for r in shown],
        "line": [r["line"] or "" for r in shown],
    }
    if any(r["own_l2"] is not None for r in shown):
        columns["own error"] = [number(ratio(r["own_l2"], r["l2"])) for r in shown]
    styles = ["bold red" if r["nan"] or _infinite(r) else "" for r in shown]
    print_fitting(
        columns, console, ("line", "mean", "shape", "zero", "min", "phase"), styles
    )
    for row in shown:
        if row["reason"]:
            _say(console, f"! {row['site']}: {row['reason']}", style="yellow")
    if len(rows) > len(shown):
        _say(
            console,
            f"{count(len(rows) - len(shown), 'more row')} below: --limit {len(rows)}.",
            style="dim",
        )


def print_captured(summary: Row, console: Console) -> None:
    """What ``roundoff capture`` says at its end: how much was recorded, what was left out and why, and what to type next.

    ``summary`` has ``path``, ``steps``, ``ranks`` and ``coverage``: ``run.json``'s, with the ``tensors`` and the
    ``reasons`` of ``store.sites.coverage`` where they are known, ``noise`` and ``repeats`` (folders).

    >>> covered = {"calls": 1200, "operators": {"aten.mm.default": 900, "aten.add.Tensor": 300}, "stopped": None}
    >>> summary = {"path": "runs/a", "steps": [0, 1], "ranks": [0], "coverage": covered}
    >>> print_captured(summary, Console(width=80))
    Recorded steps 0 to 1 in runs/a: 1,200 calls of 2 operators.
    Next: roundoff show runs/a
          roundoff overflow runs/a
    """
    covered = summary["coverage"]
    steps, ranks, operators = (
        summary["steps"],
        summary["ranks"],
        covered.get("operators") or {},
    )
    where = f"{span('step', steps)} in {summary['path']}"
    where += f", {span('rank', ranks)}" if len(ranks) > 1 else ""
    parts = (
        [f"{count(covered['calls'], 'call')} of {count(len(operators), 'operator')}"]
        if covered.get("calls")
        else []
    )
    if covered.get("tensors"):
        parts.append(count(covered["tensors"], "tensor"))
    _say(
        console, f"Recorded {where}" + (f": {', '.join(parts)}" if parts else "") + "."
    )
    if covered.get("stopped"):
        _say(
            console,
            f"! The recording stopped early, the program did not: {covered['stopped']}",
            style="yellow",
        )
    for entry in covered.get("reasons") or ():
        _say(
            console,
            f"! {count(entry['count'], 'tensor')} without statistics: {entry['reason']}",
            style="yellow",
        )
    for kind, what in (
        ("noise", "With random last bits"),
        ("repeats", "Repeated, unchanged"),
    ):
        if summary.get(kind):
            _say(console, f"{what}: {', '.join(summary[kind])}.")
    path = shlex.quote(str(summary["path"]))
    _say(console, f"Next: roundoff show {path}\n      roundoff overflow {path}")


def span(noun: str, numbers: Sequence[int]) -> str:
    """Numbers in words; the ends of a range without gaps.

    >>> span("step", [3]), span("step", [3, 4, 5]), span("step", [0, 7])
    ('step 3', 'steps 3 to 5', 'steps 0, 7')
    """
    if len(numbers) < 2:
        return f"{noun} {numbers[0]}" if numbers else f"no {noun}"
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"{noun}s {numbers[0]} to {numbers[-1]}"
    listed = ", ".join(map(str, numbers[:6])) + (
        f", ... {numbers[-1]}" if len(numbers) > 6 else ""
    )
    return f"{noun}s {listed}"


_SORTED = {"order": "in the order in which they ran", "nan": "most NaN and Inf first"}


def headline(data: Row) -> list[str]:
    """Which step this is, and how much of it was measured."""
    covered = data["coverage"]
    parts = [
        f"{count(covered['tensors'], 'tensor')} of {count(covered['sites'], 'site')}"
    ]
    if covered["views"]:
        parts.append(f"{covered['views']:,} of them views")
    bad = covered["not_finite"]
    parts.append(
        f"{count(bad, 'tensor')} with NaN or Inf"
        if bad
        else "all that was measured is finite"
    )
    steps, ranks = data["steps"], data["ranks"]
    of = f"step {data['step']}" + (
        f" of {steps[0]} to {steps[-1]}" if len(steps) > 1 else ""
    )
    of += f", rank {data['rank']} of {len(ranks)}" if len(ranks) > 1 else ""
    lines = [f"{of[0].upper()}{of[1:]}: {', '.join(parts)}."]
    if covered["without"]:
        why = "; ".join(f"{r['count']:,}: {r['reason']}" for r in covered["reasons"])
        lines.append(
            f"{count(covered['without'], 'tensor')} without statistics ({why})."
        )
    return lines


def _print_site(entry: Row, console: Console) -> None:
    place = f", output {entry['place']}" if entry["place"] else ""
    _heading(
        console,
        f"{entry['site']} ({entry['phase']}{place})"
        + (f": {entry['name']}" if entry["name"] else ""),
    )
    about = [
        f"{entry['dtype']} {shape(entry['shape'])}" if entry["dtype"] else "",
        f"on {entry['device']}" if entry["device"] else "",
    ]
    view = "" if entry["view_of"] is None else f"a view of record {entry['view_of']}"
    group = f"ranks {entry['group']}" if entry["group"] else ""
    about += [
        "in place" if entry["inplace"] else "",
        view,
        group,
        entry["overload"] or "",
    ]
    _say(console, ", ".join(filter(None, about)))
    _say(console, f"Source line: {entry['line'] or 'none recorded'}")
    if entry["reason"]:
        _say(console, f"! {entry['reason']}", style="yellow")
    console.print()
    finite = {key: [number(entry[key])] for key in ("min", "max", "mean", "l2", "std")}
    counts = {
        "NaN": "nan",
        "+Inf": "posinf",
        "-Inf": "neginf",
        "zero": "zero",
        "subnormal": "subnormal",
    }
    _print_table(console, finite)
    console.print()
    _print_table(
        console,
        {
            "of": [whole(entry["numel"])],
            **{name: [whole(entry[key])] for name, key in counts.items()},
        },
    )
    if entry["own_l2"] is not None or entry["own_reason"]:
        own = number(ratio(entry["own_l2"], entry["l2"]))
        _say(
            console,
            f"Own error: {own} of its l2, at most {number(entry['own_max'])}"
            + (f" ({entry['own_reason']})" if entry["own_reason"] else ""),
        )
    if entry["histogram"]:
        some = (
            ""
            if entry["sampled"] in (None, entry["numel"])
            else f" of {whole(entry['numel'])}"
        )
        _heading(console, f"Magnitudes, of {whole(entry['sampled'])}{some} elements")
        for line in histogram(entry["histogram"]):
            _say(console, line)
    _print_sources(entry, console)


def _print_sources(entry: Row, console: Console) -> None:
    if entry["inputs"]:
        _heading(console, "Inputs")
        inputs = entry["inputs"]
        print_fitting(
            {
                "site": [_source(i) for i in inputs],
                "dtype": [i.get("dtype") or NONE for i in inputs],
                "shape": [shape(i.get("shape")) for i in inputs],
                "min": [number(i.get("min")) for i in inputs],
                "max": [number(i.get("max")) for i in inputs],
                "NaN": [whole(i.get("nan")) for i in inputs],
                "Inf": [whole(_infinite(i)) for i in inputs],
                "line": [i.get("line") or "" for i in inputs],
            },
            console,
            ("shape", "line", "min"),
        )
    if entry["used_by"]:
        _heading(console, "Used by")
        for user in entry["used_by"][:10]:
            _say(
                console,
                f"{user['site']} ({user['phase']}{', ' + user['line'] if user['line'] else ''})",
            )
        if len(entry["used_by"]) > 10:
            _say(console, f"and {len(entry['used_by']) - 10:,} more")
    history = entry["history"]
    if len(history) > 1:
        _heading(console, "In other steps")
        last = history[-20:]
        columns = {key: [number(h[key]) for h in last] for key in ("min", "max", "l2")}
        bad = {
            "NaN": [whole(h["nan"]) for h in last],
            "Inf": [whole(_infinite(h)) for h in last],
        }
        _print_table(
            console, {"step": [str(h["step"]) for h in last], **columns, **bad}
        )
        if len(history) > len(last):
            _say(
                console,
                f"and {count(len(history) - len(last), 'earlier step')}",
                style="dim",
            )


def histogram(bins: Sequence[Row]) -> list[str]:
    """Bars of an exponent histogram, one line for each power of two, largest magnitudes first.

    >>> histogram([{"exponent": -1, "count": 1}, {"exponent": 0, "count": 4}])
    ['2^0  ████████████████████████████████████████ 4', '2^-1 ██████████ 1']
    """
    top = max(b["count"] for b in bins)
    width = max(len(f"2^{b['exponent']}") for b in bins)
    lines = []
    for entry in reversed(bins):
        eighths = max(round(BAR * 8 * entry["count"] / top), 1 if entry["count"] else 0)
        bar = EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()
        power = f"2^{entry['exponent']}"
        lines.append(f"{power:<{width}} {bar}{' ' if bar else ''}{entry['count']:,}")
    return lines


def print_fitting(
    columns: Columns,
    console: Console,
    spare: Sequence[str],
    styles: Sequence[str] | None = None,
) -> None:
    """A table with a column ``site``, which is cut in the middle, without those of ``spare`` that it has no room for."""
    left_out = []
    for name in spare:
        if console.width - _width({**columns, "site": []}, 1) >= SITE_LEAST:
            break
        if columns.pop(name, None) is not None:
            left_out.append(name)
    room = max(console.width - _width({**columns, "site": []}, 1), 3)
    names = set(columns["site"])
    columns["site"] = [elide(name, room, names) for name in columns["site"]]
    _print_table(console, columns, styles=styles)
    if left_out:
        _say(
            console,
            f"Left out at {console.width} columns: {', '.join(left_out)}.",
            style="dim",
        )


def number(value: float | None) -> str:
    """A statistic to four digits.

    >>> number(0.000123456), number(65504.0), number(None)
    ('0.0001235', '6.55e+04', '–')
    """
    return (
        NONE
        if value is None
        else f"{value + 0.0:.4g}"
        if abs(value) < 1e4
        else f"{value:.3g}"
    )


def whole(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def shape(sizes: Sequence[int] | None) -> str:
    """Sizes as text.

    >>> shape([8, 128]), shape([]), shape(None)
    ('8×128', 'scalar', '–')
    """
    if sizes is None:
        return NONE
    return "×".join(map(str, sizes)) if sizes else "scalar"


def _infinite(row: Row) -> int | None:
    if row.get("posinf") is None:
        return None
    return int(row["posinf"]) + int(row["neginf"])


def _label(row: Row) -> str:
    """A parameter or buffer as it was before has its name alone, what a call has written its site too."""
    if not row.get("name"):
        return str(row["site"])
    return (
        str(row["name"])
        if row.get("operator") in ("parameter", "buffer")
        else f"{row['site']} {row['name']}"
    )


def _source(entry: Row) -> str:
    if entry["site"] is None:
        return f"record {entry['record']}, which was not recorded"
    return _label(entry)
