"""Overflow in the terminal: an answer of a few sentences first, then tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from roundoff.report.figures import NONE, count, listing, percent
from roundoff.report.run_text import number, print_fitting, whole
from roundoff.report.terminal import heading as _heading
from roundoff.report.terminal import print_table as _print_table
from roundoff.report.terminal import print_text as _print
from roundoff.report.terminal import say as _say

Row = Mapping[str, Any]
BORN = ("birth", "arrived")
PHASES = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "collective": "a collective",
}


def print_overflow(data: Row, console: Console, *, limit: int = 20) -> None:
    """What ``roundoff overflow`` prints of ``Overflow.to_dict()``; at most ``limit`` rows of each table.

    The answer: what was born where, at which line, what removed it, and what to try; then events, the sites nearest to
    overflow, the shares lost in each format, and the loss scale.
    """
    verdict, *rest = answer(data)
    colour = "red" if data["first"] else "green"
    _print(console, Text.assemble((verdict, f"bold {colour}"), " ", " ".join(rest)))
    allowed = [e for e in data["events"] if e["allowed"]]
    events = [e for e in data["events"] if not e["allowed"]]
    if events:
        _heading(console, "NaN and Inf, in the order of calls")
        _print_events(events, console, limit)
    if allowed:
        sites = list(dict.fromkeys(e["site"] for e in allowed if e["kind"] in BORN))
        named = listing(sites[:5]) + (
            f" and {len(sites) - 5:,} more" if len(sites) > 5 else ""
        )
        _say(
            console,
            f"Allowed: {count(len(allowed), 'event')} that come from {named or 'earlier steps'} "
            "(-inf of a mask, unwritten memory, or a site named with --allow).",
        )
    _print_margins(data, console, limit)
    _print_formats(data["formats"], console)
    _print_scale(data["loss_scale"], console)


def answer(data: Row) -> list[str]:
    """The answer, sentence by sentence; the first is the verdict."""
    first = data["first"]
    unknown = data["unknown"]
    gap = (
        f"{count(unknown, 'tensor')} without statistics could not be judged."
        if unknown
        else ""
    )
    if first is None:
        meant = any(e["allowed"] for e in data["events"])
        masks = (
            "The -inf of masks, or what else is allowed, went no further."
            if meant
            else ""
        )
        verdict = f"No NaN or Inf was born in {count(data['tensors'], 'tensor')}."
        return [verdict, *filter(None, [masks, _nearest(data), gap])]
    what = _what(first)
    where = _place(first)
    sentences = [
        f"{what} arrived with {where}."
        if first["kind"] == "arrived"
        else f"{what} born at {where}.",
        f"{_sentence(first['cause'])}"
        + (f" ({first['note']})" if first["note"] else "")
        + ".",
    ]
    mine = [
        e
        for e in data["events"]
        if _origin(e) == (first["rank"], first["step"], first["record"])
    ]
    if first["reached"]:
        last = [e for e in mine if e["kind"] not in (*BORN, "death")][-1]
        sentences.append(
            f"It passed into {count(first['reached'], 'tensor')}, the last one at {_place(last)}."
        )
    names = list(
        dict.fromkeys(e["name"] for e in mine if e["name"] and e is not mine[0])
    )
    if names:
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        sentences.append(f"It reached {listing(names[:3])}{more}.")
    deaths = [e for e in mine if e["kind"] == "death"]
    if deaths:
        more = (
            f", and {count(len(deaths) - 1, 'time')} after that"
            if len(deaths) > 1
            else ""
        )
        sentences.append(
            f"{deaths[0]['site']}{_at(deaths[0])} silently removed it{more}."
        )
    elif not first["reached"]:
        sentences.append("No recorded operator took it further.")
    sentences.append(f"Try: {first['advice']}.")
    others = [e for e in data["events"] if e["kind"] in BORN and not e["allowed"]][1:]
    if others:
        names = list(dict.fromkeys(e["site"] for e in others))
        shown = listing(names[:3]) + (
            f" and {len(names) - 3:,} more sites" if len(names) > 3 else ""
        )
        sentences.append(f"{count(len(others), 'later birth')}: {shown}.")
    return [*sentences, *filter(None, [gap])]


def _nearest(data: Row) -> str:
    latent = [m for m in data["margins"] if m["latent"]]
    if not latent:
        return f"Every site keeps more than {data['within']:g} powers of two from the largest value of its dtype."
    near = latent[0]
    if near["saturated"]:
        what = f"{near['site']} already reaches the largest {near['dtype']}"
    else:
        what = f"the nearest, {near['site']}, keeps {near['margin']:.1f} in {near['dtype']}"
    return f"{count(len(latent), 'site')} within {data['within']:g} powers of two of overflow: {what}."


def _print_events(events: Sequence[Row], console: Console, limit: int) -> None:
    several = len({(e["rank"], e["step"]) for e in events}) > 1
    shown = _most_telling(events, limit)
    columns = {
        "event": [e["kind"] for e in shown],
        "site": [e["site"] + (f" {e['name']}" if e["name"] else "") for e in shown],
        "phase": [e["phase"] for e in shown],
        "dtype": [e["dtype"] for e in shown],
        "NaN": [whole(e["nan"]) for e in shown],
        "Inf": [whole(e["posinf"] + e["neginf"]) for e in shown],
        "of": [whole(e["numel"]) for e in shown],
        "line": [e["line"] or "" for e in shown],
    }
    if several:
        columns = {"step": [f"{e['step']}.{e['rank']}" for e in shown], **columns}
    styles = [
        {"birth": "bold red", "arrived": "bold red", "death": "yellow"}.get(
            e["kind"], ""
        )
        for e in shown
    ]
    print_fitting(columns, console, ("dtype", "phase", "of"), styles)
    if several:
        _say(console, "step is step.rank.", style="dim")
    if len(events) > len(shown):
        rest = count(len(events) - len(shown), "more event")
        _say(
            console,
            f"{rest}; births and deaths are shown first: --limit {len(events)}.",
            style="dim",
        )


def _most_telling(events: Sequence[Row], limit: int) -> list[Row]:
    """Births, then deaths, then what lies between, as many as fit, in their order."""
    weight = {"birth": 0, "arrived": 0, "death": 1, "received": 1, "carried": 3}
    chosen = sorted(
        range(len(events)), key=lambda i: (weight.get(events[i]["kind"], 2), i)
    )[:limit]
    return [events[i] for i in sorted(chosen)]


def _print_margins(data: Row, console: Console, limit: int) -> None:
    rows = [m for m in data["margins"] if m["latent"]]
    _heading(
        console,
        f"Within {data['within']:g} powers of two of the largest value: {count(len(rows), 'site')}",
    )
    rows = rows or list(data["margins"][:3])
    if not rows:
        _say(console, "No floating-point values were recorded.")
        return
    shown = rows[:limit]
    print_fitting(
        {
            "site": [m["site"] for m in shown],
            "phase": [m["phase"] for m in shown],
            "dtype": [m["dtype"] for m in shown],
            "largest": [number(m["amax"]) for m in shown],
            "limit": [number(m["largest"]) for m in shown],
            "margin": [
                NONE if m["margin"] is None else f"{m['margin']:.1f}" for m in shown
            ],
            "at limit": [whole(m["saturated"]) for m in shown],
            "Inf": [whole(m["infinite"]) for m in shown],
            "line": [m["line"] or "" for m in shown],
        },
        console,
        ("limit", "phase", "line", "largest"),
    )
    if len(rows) > len(shown):
        _say(
            console,
            f"{count(len(rows) - len(shown), 'more row')}: --limit {len(rows)}.",
            style="dim",
        )


def _print_formats(rows: Sequence[Row], console: Console) -> None:
    if not rows:
        return
    _heading(
        console,
        "Share of nonzero values that a format would lose, unscaled (estimated from samples)",
    )
    by: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by.setdefault((row["phase"], row["format"]), {})[row["fate"]] = row
    print_fitting(
        {
            "phase": [phase for phase, _ in by],
            "format": [fmt for _, fmt in by],
            **{
                fate: [_share(fates[fate]) for fates in by.values()]
                for fate in ("overflow", "subnormal", "zero")
            },
            "site": [
                fates["overflow"]["site"] or fates["zero"]["site"] or NONE
                for fates in by.values()
            ],
        },
        console,
        (),
    )
    _say(
        console,
        "site: where overflow is most frequent, or where nothing overflows, underflow to zero.",
        style="dim",
    )


def _share(row: Row) -> str:
    if row["share"] is None:
        return NONE
    error = row["stderr"]
    return percent(row["share"]) + (
        f" ±{percent(error)}" if error and error >= 0.0005 else ""
    )


def _print_scale(scale: Row, console: Console) -> None:
    _heading(console, f"Loss scale for {scale['format']} gradients")
    if scale["scale"] is None:
        _say(console, f"None: {scale['note']}.")
        return
    _print_table(
        console,
        {
            "scale": [
                f"{1:,}",
                f"{scale['scale']:,.0f}"
                if scale["scale"] >= 1
                else f"{scale['scale']:g}",
            ],
            "largest gradient": [
                number(scale["largest"]),
                number(scale["largest"] * scale["scale"]),
            ],
            "gradients that become zero": [
                percent(scale["zero_at_1"]),
                percent(scale["zero_at_scale"]),
            ],
        },
    )
    _say(
        console,
        f"The largest gradient is at {scale['site']} in step {scale['step']}; the scale leaves "
        f"{scale['margin']:g} powers of two free.",
    )
    if scale["note"]:
        _say(console, f"{_sentence(scale['note'])}.")
    if scale["recorded"] is not None:
        lost = (
            f", and {count(scale['overflowed'], 'step')} of it had gradients that are not finite"
            * bool(scale["overflowed"])
        )
        _say(
            console,
            f"The run itself used up to {scale['recorded']:,.0f}, which is divided out{lost}.",
        )


def _what(event: Row) -> str:
    kinds = [
        ("NaN", event["nan"]),
        ("+Inf", event["posinf"]),
        ("-Inf", event["neginf"]),
    ]
    return (
        listing([f"{n:,} {kind}" for kind, n in kinds if n])
        + f" of {count(event['numel'], 'value')}"
    )


def _place(event: Row) -> str:
    """The site with its name, phase, line, step and rank."""
    name = f" {event['name']}" if event["name"] else ""
    rank = f", rank {event['rank']}" if event["rank"] else ""
    return f"{event['site']}{name} in {PHASES.get(event['phase'], event['phase'])}{_at(event)}, step {event['step']}{rank}"


def _at(event: Row) -> str:
    return f" ({event['line']})" if event["line"] else ""


def _origin(event: Row) -> tuple[Any, Any, Any]:
    return event["origin_rank"], event["origin_step"], event["origin"]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
