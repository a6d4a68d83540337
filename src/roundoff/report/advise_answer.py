"""The result of ``roundoff advise`` as sentences, and its numbers as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundoff.report.bench_answer import times
from roundoff.report.figures import NONE, count, db, finite, listing, percent

if TYPE_CHECKING:
    from roundoff.advise import AdviceRow, AdviceSummary, Roofline, Speed

#: The names of rules as a person reads them.
_TITLES = {
    "fused_attention": "fused attention",
    "fold_batch_norm": "batch norms folded",
    "drop_bias_before_norm": "no bias before batch norm",
    "channels_last": "channels_last",
    "compile": "torch.compile",
    "inference_mode": "inference_mode",
    "bf16_autocast": "bf16 autocast",
    "no_fp64": "no fp64",
    "fused_optimizer": "fused optimizer",
    "foreach_optimizer": "foreach optimizer",
    "gradients_to_none": "gradients set to None",
    "no_anomaly_mode": "no anomaly mode",
    "flush_subnormals": "subnormals flushed",
    "value_to_python": "values read by Python",
    "elementwise_share": "element-wise share",
}


def title_of(name: str) -> str:
    """Return how a person reads the name of a rule."""
    return _TITLES.get(name, name.replace("_", " "))


def answer(summary: AdviceSummary) -> list[str]:
    """Return the answer, sentence by sentence; the first says what is gained."""
    return [
        _gain(summary),
        *_cost(summary),
        *_work(summary),
        *_slowest(summary),
        *_loading(summary),
    ]


def _gain(summary: AdviceSummary) -> str:
    combination = summary.combination
    if not combination.changes or combination.speed is None:
        tried = sum(row.speed is not None for row in summary.rows)
        return f"Nothing that was tried pays here: {count(tried, 'trial')}."
    names = listing([title_of(change.name) for change in combination.changes])
    return f"{times(combination.speed.median)} the speed with {names}."


def _cost(summary: AdviceSummary) -> list[str]:
    sentences = []
    precision = summary.combination.precision
    if precision is not None and summary.combination.changes:
        of = "loss and gradients" if summary.train else "the outputs"
        least = precision.least_db
        kept = "bit for bit" if least == float("inf") else f"to {db(least)} dB"
        sentences.append(f"They keep {of} {kept}.")
    dropped = summary.combination.dropped
    if dropped:
        names = listing([title_of(name) for name in dropped])
        sentences.append(
            f"Left out, since they gain nothing beside the others: {names}."
        )
    return sentences


def _work(summary: AdviceSummary) -> list[str]:
    counts = summary.counts
    flops = f"{number(counts.flops)}FLOP ({number(counts.macs)}MAC, 1 MAC = 2 FLOP)"
    moved = f"{number(counts.bytes_moved)}B"
    seconds = seconds_of(summary.step_seconds)
    sentences = [f"One step is {flops} and moves {moved} in {seconds}."]
    roofline = summary.roofline
    least = sum(roofline.least_seconds(r.flops, r.bytes_moved) for r in counts.rows)
    if summary.step_seconds:
        flops = f"{number(roofline.flops_per_second)}FLOP/s"
        moved = f"{number(roofline.bytes_per_second)}B/s"
        share = least / summary.step_seconds
        takes = f"it would take {percent(share)} of that"
        if share > 1:
            takes = "it would take longer: caches hold what operators hand on"
        sentences.append(f"At this machine's peaks ({flops}, {moved}) {takes}.")
    shares = [
        f"{percent(share.flops)} {share.dtype}"
        for share in summary.dtypes
        if share.flops >= 0.001
    ]
    if shares:
        sentences.append(f"The operations are {listing(shares)}.")
    return sentences


def _slowest(summary: AdviceSummary) -> list[str]:
    if not summary.profile.rows:
        return []
    first = summary.profile.rows[0]
    place = f" in {first.module}" if first.module else ""
    share = percent(summary.profile.share(first))
    return [f"The slowest is {first.operator}{place} ({first.phase}): {share}."]


def _loading(summary: AdviceSummary) -> list[str]:
    loading = summary.loading
    if loading is None:
        return []
    opened = count(loading.files, "file")
    files = f" and opens {opened}" if loading.files else ""
    seconds = f"{seconds_of(loading.load_seconds)}{files}"
    share = percent(loading.wait_share)
    step = "a step with these" if summary.combination.changes else "a step"
    return [f"{share} of {step} waits for its batch, which takes {seconds}."]


def sentence(row: AdviceRow) -> str:
    """Say what was seen, and why it was not tried or what else to know."""
    parts = [row.seen]
    if row.name == "compile" and row.speed is not None:
        parts.append(f"The first step takes {seconds_of(row.speed.first_seconds)}")
    if row.reason:
        label = "Not tried" if row.speed is None else "Note"
        parts.append(f"{label}: {row.reason}")
    return ". ".join(parts) + "."


def number(value: float | None) -> str:
    """Write an amount with three digits and a prefix.

    >>> number(1814073344.0), number(12.0), number(0), number(None)
    ('1.81 G', '12 ', '0 ', '–')
    """
    if value is None or not finite(value):
        return NONE
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "


def seconds_of(value: float) -> str:
    """Write seconds.

    >>> seconds_of(0.00123), seconds_of(2.5)
    ('1.23 ms', '2.5 s')
    """
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def speed_of(speed: Speed | None) -> str:
    """Write the median ratio of speeds."""
    return NONE if speed is None else times(speed.median)


def spread_of(speed: Speed | None) -> str:
    """Write the quartiles of the ratios."""
    if speed is None:
        return NONE
    low = times(speed.low).removesuffix("×")
    high = times(speed.high).removesuffix("×")
    return f"{low}–{high}"


def decibels(row: AdviceRow) -> str:
    """Write what an advice costs: SQNR in dB, ``equal`` without a difference."""
    if row.precision is None or row.precision.least_db is None:
        return NONE
    least = row.precision.least_db
    return "equal" if least == float("inf") else db(least)


def bound(intensity: float | None, roofline: Roofline) -> str:
    """Say what bounds work of an intensity on a machine."""
    if intensity is None:
        return NONE
    return "arithmetic" if intensity >= roofline.ridge else "memory"
