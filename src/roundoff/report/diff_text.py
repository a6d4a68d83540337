"""One value of two runs in the terminal: both sides, statistics, metrics, where the errors lie, the elements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from roundoff.report.comparison_answer import called, size, times
from roundoff.report.comparison_text import cosine, label
from roundoff.report.figures import NONE, count, db, percent
from roundoff.report.run_text import BAR, Columns, number, print_fitting, shape, whole
from roundoff.report.terminal import heading as _heading
from roundoff.report.terminal import print_table as _print_table
from roundoff.report.terminal import say as _say

Row = Mapping[str, Any]

#: Where an index along an axis holds this many times its even share of the squared error, a line says so.
UNEVEN = 2.0


def print_diff(data: Row, console: Console) -> None:
    """What ``roundoff diff`` prints of ``compare.diff.diff``: one sentence, then the tables."""
    sides = data["sides"]
    some = sides["candidate"] or sides["reference"]
    _say(
        console,
        f"{data['reference']} against {data['candidate']}, step {data['step']}, rank {data['rank']}",
        style="dim",
    )
    console.print()
    style = "bold red" if (data["error"] or 0) > (data["tolerance"] or 0) else "bold"
    _say(console, sentence(data), style=style)
    for name, side in sides.items():
        if side is not None:
            what = f"{side['dtype'] or NONE} {shape(side['shape'])}, {side['overload'] or side['operator']}"
            _say(
                console,
                f"{name}: {label({**side, 'status': ''})} ({side['phase']}), {what}, {side['line'] or 'no source line'}",
            )
    for line in data["arguments"]:
        _say(console, f"Argument {line}", style="bold red")
    if data["note"]:
        _say(console, f"{data['note'][0].upper()}{data['note'][1:]}.", style="yellow")
    _print_inputs(data["inputs"], console)
    if data["statistics"]:
        _heading(console, "Statistics")
        rows = data["statistics"]
        _print_table(
            console,
            {"": [r["name"] for r in rows]}
            | {
                key: [_statistic(r, key) for r in rows]
                for key in ("reference", "candidate", "difference")
            },
        )
    if data["metrics"]:
        _print_metrics(data["metrics"], console)
    if data["elements"]:
        _print_elements(data["elements"], console, some["shape"])
    if data["others"]:
        more = [f"{label(o)} ({o['phase']})" for o in data["others"]]
        _say(
            console,
            f"Also of that name: {', '.join(more[:8])}. Choose with --phase and --place.",
            style="dim",
        )


def sentence(data: Row) -> str:
    """The first line.

    >>> sentence({"sides": {"reference": {"site": "a/mm"}, "candidate": {"site": "a/mm"}}, "error": 0.02, "tolerance": 1e-6,
    ...           "reason": None, "status": "matched"})
    'a/mm is 2.0e-02 off (relative), 2.0e+04 times what rounding explains.'
    """
    ours, theirs = data["sides"]["reference"], data["sides"]["candidate"]
    if ours is None or theirs is None:
        return f"{called(theirs or ours)} is {data['status']}: {data['reason'] or 'no counterpart was found'}."
    error, name = data["error"], called(theirs)
    if error is None:
        why = (
            theirs.get("reason") or ours.get("reason") or "no statistics on both sides"
        )
        return f"{name} could not be measured: {why}."
    if error == 0:
        return f"{name} is equal in both runs."
    if ours.get("shape") != theirs.get("shape"):
        return f"{name} has another shape: {shape(ours['shape'])} in the reference, {shape(theirs['shape'])} here."
    if error == float("inf"):
        return f"{name} is not finite where the reference is, or the reverse."
    factor = times(error, data["tolerance"])
    return f"{name} is {size(error)} off (relative)" + (
        f", {factor} times what rounding explains." if factor else "."
    )


def _print_inputs(inputs: Sequence[Row], console: Console) -> None:
    if not inputs:
        return
    _heading(console, "Inputs")
    print_fitting(
        {
            "site": [label({**i, "place": 0}) for i in inputs],
            "error": [size(i["error"]) for i in inputs],
            "counterpart": [
                "" if i["same"] else f"reads {i['reference_site']} in the reference"
                for i in inputs
            ],
        },
        console,
        ("counterpart",),
    )


def _statistic(row: Row, key: str) -> str:
    value = row[key]
    return (
        whole(value)
        if isinstance(value, int)
        else NONE
        if value is None
        else f"{value + 0.0:.7g}"
    )


def _print_metrics(found: Row, console: Console) -> None:
    _heading(console, "Metrics")
    if found["reason"]:
        _say(console, f"{found['reason']}.")
    if found["numel"] is None:
        return
    shown = {
        "cosine": cosine(found["cosine"]),
        "relative l2": size(found["rel_l2"]),
        "SQNR": f"{db(found['sqnr_db'])} dB",
        "max abs": number(found["max_abs"]),
        "mean abs": number(found["mean_abs"]),
        "max rel": number(found["max_rel"]),
        "mean rel": number(found["mean_rel"]),
        "ulp max": number(found["ulp_max"]),
        "ulp mean": number(found["ulp_mean"]),
        "ulp > 1": percent(found["ulp_share"]),
        "equal bits": percent(found["equal"]),
    }
    _say(
        console,
        ", ".join(
            f"{name} {text}"
            for name, text in shown.items()
            if not text.startswith(NONE)
        ),
    )
    specials = [
        f"{count(found[f'{kind}_{side}'] or 0, name)} {where}"
        for kind, name in (("nan", "NaN"), ("inf", "Inf"))
        for side, where in (
            ("both", "in both"),
            ("reference", "only in the reference"),
            ("candidate", "only in the candidate"),
        )
        if found[f"{kind}_{side}"]
    ]
    if specials:
        _say(
            console,
            ", ".join(specials).replace("NaNs", "NaN").replace("Infs", "Inf"),
            style="red",
        )


def _print_elements(found: Row, console: Console, sizes: Sequence[int]) -> None:
    if "reason" in found:
        return
    _heading(
        console, f"Elements: {found['differing']:,} of {math.prod(sizes):,} differ"
    )
    if found["errors"]:
        most = max(e["count"] for e in found["errors"])
        for entry in reversed(found["errors"]):
            bar = "█" * max(1, round(BAR * entry["count"] / most))
            _say(console, f"|error| 1e{entry['low']:+03d} {bar} {entry['count']:,}")
    for axis in found["axes"]:
        if axis["share"] * sizes[axis["axis"]] >= UNEVEN:
            where = f"index {axis['index']} of {sizes[axis['axis']]} along axis {axis['axis']}"
            _say(
                console,
                f"{percent(axis['share'])} of the squared error lies at {where}",
            )
    for title, key in (("First that differ", "first"), ("Worst", "worst")):
        rows = found[key]
        if not rows:
            continue
        _heading(console, title)
        columns: Columns = {
            "index": [str(r["index"]) for r in rows],
            **{
                side: ["NaN" if r[side] is None else f"{r[side]:.9g}" for r in rows]
                for side in ("reference", "candidate")
            },
            "error": [size(r["error"]) for r in rows],
            "ulp": [number(r["ulp"]) for r in rows],
        }
        _print_table(console, columns)
