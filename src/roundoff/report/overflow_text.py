"""Overflow in the terminal: an answer of a few sentences first, then tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from roundoff.report.figures import NONE, count, listing, percent
from roundoff.report.run_text import columns_of, number, whole
from roundoff.report.terminal import heading, print_table, print_text, say

if TYPE_CHECKING:
    from roundoff.compare import (
        FormatShare,
        LossScale,
        NonfiniteEvent,
        Overflow,
        SiteMargin,
    )

PHASES = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "collective": "a collective",
}
#: Which events are printed first where not all fit; 2 for those not named.
_PRIORITY = {"birth": 0, "arrived": 0, "death": 1, "received": 1, "carried": 3}
_STYLES = {"birth": "bold red", "arrived": "bold red", "death": "yellow"}


def print_overflow(overflow: Overflow, console: Console, *, limit: int = 20) -> None:
    """Print what ``roundoff.overflow`` returns; at most ``limit`` rows of each table.

    The answer: what was born where, at which line, what removed it, and what to try;
    then events, the sites nearest to overflow, the shares lost in each format, and the
    loss scale.
    """
    verdict, *sentences = answer(overflow)
    colour = "red" if overflow.first else "green"
    text = Text.assemble((verdict, f"bold {colour}"), " ", " ".join(sentences))
    print_text(console, text)
    events = [event for event in overflow.events if not event.allowed]
    allowed = [event for event in overflow.events if event.allowed]
    if events:
        heading(console, "NaN and Inf, in the order of calls")
        _print_events(events, console, limit)
    if allowed:
        _print_allowed(allowed, console)
    _print_margins(overflow, console, limit)
    _print_formats(overflow.formats, console)
    _print_scale(overflow.loss_scale, console)


def answer(overflow: Overflow) -> list[str]:
    """The answer, sentence by sentence; the first is the verdict."""
    first = overflow.first
    if first is None:
        sentences = _answer_without_birth(overflow)
    else:
        sentences = _answer_with_birth(overflow, first)
    if overflow.unknown:
        tensors = count(overflow.unknown, "tensor")
        sentences.append(f"{tensors} without statistics could not be judged.")
    return sentences


def _answer_without_birth(overflow: Overflow) -> list[str]:
    sentences = [f"No NaN or Inf was born in {count(overflow.tensors, 'tensor')}."]
    if any(event.allowed for event in overflow.events):
        sentences.append("The -inf of masks, or what else is allowed, went no further.")
    sentences.append(_nearest(overflow))
    return sentences


def _answer_with_birth(overflow: Overflow, first: NonfiniteEvent) -> list[str]:
    verb = "arrived with" if first.kind == "arrived" else "born at"
    note = f" ({first.note})" if first.note else ""
    sentences = [
        f"{_values(first)} {verb} {_place(first)}.",
        f"{_sentence(first.cause or '')}{note}.",
    ]
    origin = (first.rank, first.step, first.record)
    descended = [event for event in overflow.events if _origin(event) == origin]
    sentences += _reach(first, descended)
    sentences.append(f"Try: {first.advice}.")
    sentences += _later_births(overflow)
    return sentences


def _reach(first: NonfiniteEvent, descended: Sequence[NonfiniteEvent]) -> list[str]:
    """Where a birth went: how far, into which parameters, and what removed it."""
    sentences = []
    passed = [e for e in descended if not e.is_birth and e.kind != "death"]
    deaths = [e for e in descended if e.kind == "death"]
    if first.reached:
        tensors = count(first.reached, "tensor")
        last = _place(passed[-1])
        sentences.append(f"It passed into {tensors}, the last one at {last}.")
    names = list(dict.fromkeys(e.name for e in descended[1:] if e.name))
    if names:
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        sentences.append(f"It reached {listing(names[:3])}{more}.")
    if deaths:
        sentences.append(_removal(deaths))
    elif not first.reached:
        sentences.append("No recorded operator took it further.")
    return sentences


def _removal(deaths: Sequence[NonfiniteEvent]) -> str:
    first = deaths[0]
    times = count(len(deaths) - 1, "time")
    more = f", and {times} after that" if len(deaths) > 1 else ""
    return f"{first.site}{_line(first)} silently removed it{more}."


def _later_births(overflow: Overflow) -> list[str]:
    later = overflow.born[1:]
    if not later:
        return []
    sites = list(dict.fromkeys(event.site for event in later))
    more = f" and {len(sites) - 3:,} more sites" if len(sites) > 3 else ""
    return [f"{count(len(later), 'later birth')}: {listing(sites[:3])}{more}."]


def _nearest(overflow: Overflow) -> str:
    latent = [margin for margin in overflow.margins if margin.latent]
    distance = _powers(overflow.within)
    if not latent:
        return (
            f"Every site keeps more than {distance} from the largest value of its "
            "dtype."
        )
    near = latent[0]
    if near.saturated:
        nearest = f"{near.site} already reaches the largest {near.dtype}"
    else:
        nearest = f"the nearest, {near.site}, keeps {near.margin:.1f} in {near.dtype}"
    return f"{count(len(latent), 'site')} within {distance} of overflow: {nearest}."


def _powers(exponent: float) -> str:
    return f"{exponent:g} {'power' if exponent == 1 else 'powers'} of two"


def _print_allowed(events: Sequence[NonfiniteEvent], console: Console) -> None:
    sites = list(dict.fromkeys(event.site for event in events if event.is_birth))
    more = f" and {len(sites) - 5:,} more" if len(sites) > 5 else ""
    named = listing(sites[:5]) + more
    say(
        console,
        f"Allowed: {count(len(events), 'event')} that come from "
        f"{named or 'earlier steps'} "
        "(-inf of a mask, unwritten memory, or a site named with --allow).",
    )


def _print_events(
    events: Sequence[NonfiniteEvent], console: Console, limit: int
) -> None:
    has_several_steps = len({(e.rank, e.step) for e in events}) > 1
    shown = _most_telling(events, limit)
    columns = columns_of([_event_cells(event) for event in shown])
    if not has_several_steps:
        del columns["step"]
    styles = [_STYLES.get(event.kind, "") for event in shown]
    print_table(console, columns, styles=styles)
    if has_several_steps:
        say(console, "step is step.rank.", style="dim")
    hidden = len(events) - len(shown)
    if hidden:
        more = count(hidden, "more event")
        text = f"{more}; births and deaths are shown first: --rows {len(events)}."
        say(console, text, style="dim")


def _event_cells(event: NonfiniteEvent) -> dict[str, str]:
    return {
        "step": f"{event.step}.{event.rank}",
        "event": event.kind,
        "site": f"{event.site} {event.name}" if event.name else event.site,
        "phase": event.phase,
        "dtype": event.dtype or NONE,
        "NaN": whole(event.nan),
        "Inf": whole((event.posinf or 0) + (event.neginf or 0)),
        "of": whole(event.numel),
        "line": event.line or "",
    }


def _most_telling(events: Sequence[NonfiniteEvent], limit: int) -> list[NonfiniteEvent]:
    """Births, then deaths, then what lies between, as many as fit, in their order."""
    places = range(len(events))
    ranked = sorted(places, key=lambda i: (_PRIORITY.get(events[i].kind, 2), i))
    return [events[i] for i in sorted(ranked[:limit])]


def _print_margins(overflow: Overflow, console: Console, limit: int) -> None:
    latent = [margin for margin in overflow.margins if margin.latent]
    sites = count(len(latent), "site") if latent else "none; the nearest are"
    distance = _powers(overflow.within)
    heading(console, f"Within {distance} of the largest value: {sites}")
    rows = latent or overflow.margins[:3]
    if not rows:
        say(console, "No floating-point values were recorded.")
        return
    shown = rows[:limit]
    print_table(console, columns_of([_margin_cells(margin) for margin in shown]))
    hidden = len(rows) - len(shown)
    if hidden:
        more = f"{count(hidden, 'more row')}: --rows {len(rows)}."
        say(console, more, style="dim")


def _margin_cells(row: SiteMargin) -> dict[str, str]:
    return {
        "site": row.site,
        "phase": row.phase,
        "dtype": row.dtype,
        "largest": number(row.amax),
        "limit": number(row.largest),
        "margin": NONE if row.margin is None else f"{row.margin:.1f}",
        "at limit": whole(row.saturated),
        "Inf": whole(row.infinite),
        "line": row.line or "",
    }


def _print_formats(rows: Sequence[FormatShare], console: Console) -> None:
    if not rows:
        return
    heading(
        console,
        "Share of nonzero values that a format would lose, unscaled (estimated from "
        "samples)",
    )
    fates_of: dict[tuple[str, str], dict[str, FormatShare]] = {}
    for row in rows:
        fates_of.setdefault((row.phase, row.format), {})[row.fate] = row
    print_table(
        console, columns_of([_format_cells(fates) for fates in fates_of.values()])
    )
    say(
        console,
        "site: where overflow is most frequent, or where nothing overflows, underflow "
        "to zero.",
        style="dim",
    )


def _format_cells(fates: dict[str, FormatShare]) -> dict[str, str]:
    overflow = fates["overflow"]
    return {
        "phase": overflow.phase,
        "format": overflow.format,
        "overflow": _share(overflow),
        "subnormal": _share(fates["subnormal"]),
        "zero": _share(fates["zero"]),
        "site": overflow.site or fates["zero"].site or NONE,
    }


def _share(row: FormatShare) -> str:
    if row.share is None:
        return NONE
    if row.stderr and row.stderr >= 0.0005:
        return f"{percent(row.share)} ±{percent(row.stderr)}"
    return percent(row.share)


def _print_scale(scale: LossScale, console: Console) -> None:
    heading(console, f"Loss scale for {scale.format} gradients")
    if scale.scale is None or scale.largest is None:
        say(console, f"None: {scale.note}.")
        return
    is_whole = scale.scale >= 1
    recommended = f"{scale.scale:,.0f}" if is_whole else f"{scale.scale:g}"
    largest = [scale.largest, scale.largest * scale.scale]
    zeros = [scale.zero_at_1, scale.zero_at_scale]
    print_table(
        console,
        {
            "scale": ["1", recommended],
            "largest gradient": [number(value) for value in largest],
            "gradients that become zero": [percent(share) for share in zeros],
        },
    )
    say(
        console,
        f"The largest gradient is at {scale.site} in step {scale.step}; the scale "
        f"leaves {_powers(scale.margin)} free.",
    )
    if scale.note:
        say(console, f"{_sentence(scale.note)}.")
    if scale.recorded is not None:
        _print_recorded_scale(scale.recorded, scale.overflowed, console)


def _print_recorded_scale(recorded: float, overflowed: int, console: Console) -> None:
    text = f"The run itself used up to {recorded:,.0f}, which is divided out"
    if overflowed:
        steps = count(overflowed, "step")
        text += f", and {steps} of it had gradients that are not finite"
    say(console, f"{text}.")


def _values(event: NonfiniteEvent) -> str:
    """How many values are not finite, by kind."""
    counts = {"NaN": event.nan, "+Inf": event.posinf, "-Inf": event.neginf}
    kinds = [f"{n:,} {kind}" for kind, n in counts.items() if n]
    return f"{listing(kinds)} of {count(event.numel or 0, 'value')}"


def _place(event: NonfiniteEvent) -> str:
    """The site with its name, phase, line, step and rank."""
    name = f" {event.name}" if event.name else ""
    rank = f", rank {event.rank}" if event.rank else ""
    phase = PHASES.get(event.phase, event.phase)
    place = f"{event.site}{name} in {phase}{_line(event)}"
    return f"{place}, step {event.step}{rank}"


def _line(event: NonfiniteEvent) -> str:
    return f" ({event.line})" if event.line else ""


def _origin(event: NonfiniteEvent) -> tuple[int | None, int | None, int | None]:
    return event.origin_rank, event.origin_step, event.origin


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
