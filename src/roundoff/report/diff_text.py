"""One value of two runs in the terminal: sides, statistics, metrics, elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from roundoff.report.comparison_answer import call_name, size, times
from roundoff.report.comparison_text import cosine, value_name
from roundoff.report.figures import NONE, db, percent
from roundoff.report.run_text import BAR, Columns, number, shape, whole
from roundoff.report.terminal import heading, print_table, say

if TYPE_CHECKING:
    from roundoff.compare import (
        ElementDifferences,
        ElementPair,
        InputDifference,
        Metrics,
        StatisticDifference,
        ValueDifference,
        ValueLabel,
        ValueSide,
    )

#: Where an index along an axis holds this many times its even share of the squared
#: error, a line says so.
UNEVEN = 2.0
#: Other values of the same name that are listed.
OTHERS = 8


def print_diff(difference: ValueDifference, console: Console) -> None:
    """Print one sentence, then the tables."""
    from roundoff.compare import ElementDifferences

    sides = difference.sides
    runs = f"{difference.reference} against {difference.candidate}"
    where = f"step {difference.step}, rank {difference.rank}"
    say(console, f"{runs}, {where}", style="dim")
    console.print()
    beyond = (difference.error or 0) > (difference.tolerance or 0)
    say(console, sentence(difference), style="bold red" if beyond else "bold")
    _print_side("reference", sides.reference, console)
    _print_side("candidate", sides.candidate, console)
    for line in difference.arguments:
        say(console, f"Argument {line}", style="bold red")
    if difference.note:
        note = difference.note
        say(console, f"{note[0].upper()}{note[1:]}.", style="yellow")
    _print_inputs(difference.inputs, console)
    _print_statistics(difference.statistics, console)
    if difference.metrics is not None:
        _print_metrics(difference.metrics, console)
    some = sides.candidate or sides.reference
    elements = difference.elements
    if some is not None and isinstance(elements, ElementDifferences):
        _print_elements(elements, console, some.shape or ())
    _print_others(difference.others, console)


def sentence(difference: ValueDifference) -> str:
    """The first line."""
    ours = difference.sides.reference
    theirs = difference.sides.candidate
    if ours is None or theirs is None:
        why = difference.reason or "no counterpart was found"
        return f"{_called(ours or theirs)} is {difference.status}: {why}."
    name = _called(theirs)
    error = difference.error
    if error is None:
        why = theirs.reason or ours.reason or "no statistics on both sides"
        return f"{name} could not be measured: {why}."
    if error == 0:
        return f"{name} is equal in both runs."
    if ours.shape != theirs.shape:
        shapes = f"{shape(ours.shape)} in the reference, {shape(theirs.shape)} here"
        return f"{name} has another shape: {shapes}."
    if math.isinf(error):
        return f"{name} is not finite where the reference is, or the reverse."
    factor = times(error, difference.tolerance)
    beyond = f", {factor} times what rounding explains" if factor else ""
    return f"{name} is {size(error)} off (relative){beyond}."


def _called(side: ValueSide | None) -> str:
    if side is None:
        return "an operator"
    return call_name(side.site, side.name, side.call, side.line)


def _print_side(name: str, side: ValueSide | None, console: Console) -> None:
    if side is None:
        return
    label = value_name(side.site, side.name, side.call, side.place)
    value = f"{side.dtype or NONE} {shape(side.shape)}"
    operator = side.overload or side.operator
    line = side.line or "no source line"
    say(console, f"{name}: {label} ({side.phase}), {value}, {operator}, {line}")


def _print_inputs(inputs: Sequence[InputDifference], console: Console) -> None:
    if not inputs:
        return
    heading(console, "Inputs")
    columns: Columns = {
        "site": [value_name(each.site, each.name, each.call) for each in inputs],
        "error": [size(each.error) for each in inputs],
        "counterpart": [_counterpart(each) for each in inputs],
    }
    print_table(console, columns)


def _counterpart(difference: InputDifference) -> str:
    if difference.same:
        return ""
    return f"reads {difference.reference_site} in the reference"


def _print_statistics(
    statistics: Sequence[StatisticDifference], console: Console
) -> None:
    if not statistics:
        return
    heading(console, "Statistics")
    columns: Columns = {
        "": [each.name for each in statistics],
        "reference": [_statistic(each.reference) for each in statistics],
        "candidate": [_statistic(each.candidate) for each in statistics],
        "difference": [_statistic(each.difference) for each in statistics],
    }
    print_table(console, columns)


def _statistic(value: float | None) -> str:
    if value is None:
        return NONE
    return whole(value) if isinstance(value, int) else f"{value + 0.0:.7g}"


def _print_metrics(metrics: Metrics, console: Console) -> None:
    heading(console, "Metrics")
    if metrics.reason:
        say(console, f"{metrics.reason}.")
    if metrics.numel is None:
        return
    texts = {
        "cosine": cosine(metrics.cosine),
        "relative l2": size(metrics.rel_l2),
        "SQNR": f"{db(metrics.sqnr_db)} dB",
        "max abs": number(metrics.max_abs),
        "mean abs": number(metrics.mean_abs),
        "max rel": number(metrics.max_rel),
        "mean rel": number(metrics.mean_rel),
        "ulp max": number(metrics.ulp_max),
        "ulp mean": number(metrics.ulp_mean),
        "ulp > 1": percent(metrics.ulp_share),
        "equal bits": percent(metrics.equal),
    }
    defined = [f"{k} {text}" for k, text in texts.items() if not text.startswith(NONE)]
    say(console, ", ".join(defined))
    specials = _specials(metrics)
    if specials:
        say(console, ", ".join(specials), style="red")


def _specials(metrics: Metrics) -> list[str]:
    """The counts of NaN and infinities, those that are not zero."""
    places = ("in both", "only in the reference", "only in the candidate")
    nan = (metrics.nan_both, metrics.nan_reference, metrics.nan_candidate)
    inf = (metrics.inf_both, metrics.inf_reference, metrics.inf_candidate)
    texts = [f"{n:,} NaN {place}" for n, place in zip(nan, places, strict=True) if n]
    texts += [f"{n:,} Inf {place}" for n, place in zip(inf, places, strict=True) if n]
    return texts


def _print_elements(
    elements: ElementDifferences, console: Console, sizes: Sequence[int]
) -> None:
    every = math.prod(sizes)
    heading(console, f"Elements: {elements.differing:,} of {every:,} differ")
    most = max((decade.count for decade in elements.errors), default=1)
    for decade in reversed(elements.errors):
        bar = "█" * max(1, round(BAR * decade.count / most))
        say(console, f"|error| 1e{decade.low:+03d} {bar} {decade.count:,}")
    for axis in elements.axes:
        length = sizes[axis.axis]
        if axis.share * length >= UNEVEN:
            where = f"index {axis.index} of {length} along axis {axis.axis}"
            share = percent(axis.share)
            say(console, f"{share} of the squared error lies at {where}")
    _print_element_list("First that differ", elements.first, console)
    _print_element_list("Worst", elements.worst, console)


def _print_element_list(
    title: str, pairs: Sequence[ElementPair], console: Console
) -> None:
    if not pairs:
        return
    heading(console, title)
    columns: Columns = {
        "index": [str(pair.index) for pair in pairs],
        "reference": [_element(pair.reference) for pair in pairs],
        "candidate": [_element(pair.candidate) for pair in pairs],
        "error": [size(pair.error) for pair in pairs],
        "ulp": [number(pair.ulp) for pair in pairs],
    }
    print_table(console, columns)


def _element(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.9g}"


def _print_others(others: Sequence[ValueLabel], console: Console) -> None:
    """Print which other values have the name."""
    if not others:
        return
    names = [
        f"{value_name(o.site, o.name, o.call, o.place)} ({o.phase})"
        for o in others[:OTHERS]
    ]
    choose = "Choose with --phase and --place."
    say(console, f"Also of that name: {', '.join(names)}. {choose}", style="dim")
