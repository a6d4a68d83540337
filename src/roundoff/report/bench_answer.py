"""The result of ``roundoff bench`` as sentences, and its numbers as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from roundoff.report.figures import NONE, count, finite, listing

if TYPE_CHECKING:
    from roundoff.train import BenchRow, BenchSummary, Outcome, Ratios

MEBIBYTE = 1 << 20
#: Memory below this share of the reference's is worth a sentence.
LESS_MEMORY = 0.99


def answer(summary: BenchSummary) -> list[str]:
    """Return the answer first, then what is gained and what it costs."""
    first, *others = summary.rows
    sentences = _outcomes(summary, others)
    ran = [row for row in others if not row.worse and _has_speed(row)]
    if ran:
        sentences.append(_fastest(first, ran))
        sentences += _least_memory(first, ran)
    for row in summary.rows:
        sentences += _trouble(summary, row)
    if not sentences:
        sentences.append(f"{first.config} was trained with {_seeds(summary)}.")
    return [*sentences, *(f"{note[0].upper()}{note[1:]}." for note in summary.notes)]


def _outcomes(summary: BenchSummary, others: Sequence[BenchRow]) -> list[str]:
    """Name the configurations of each outcome, the worst first."""
    reference = summary.reference
    seeds = _seeds(summary)
    broken = _names(others, _is_broken)
    worse = _names(others, _is_worse)
    better = _names(others, _is_better)
    alike = _names(others, _is_alike)
    undecided = _names(others, _is_undecided)
    failed = _names(summary.rows, _is_failed)
    explained = f"than {reference}, by more than {seeds} explain."
    decide = "does" if len(summary.seeds) == 1 else "do"
    trains = "trains" if len(undecided) == 1 else "train"
    sentences = (
        (broken, f"{_end(broken)} with a loss that is not finite."),
        (worse, f"{_end(worse)} worse {explained}"),
        (better, f"{_end(better)} better {explained}"),
        (
            alike,
            f"No difference from {reference} beyond the noise between seeds is seen in {listing(alike)}.",
        ),
        (
            undecided,
            f"{seeds} {decide} not decide if {listing(undecided)} {trains} like {reference}.",
        ),
        (failed, f"{listing(failed)} could not be trained."),
    )
    return [sentence for configs, sentence in sentences if configs]


def _names(
    rows: Sequence[BenchRow], condition: Callable[[BenchRow], bool]
) -> list[str]:
    return [row.config for row in rows if condition(row)]


def _is_broken(row: BenchRow) -> bool:
    return row.loss is not None and not finite(row.loss.mean)


def _is_worse(row: BenchRow) -> bool:
    return row.worse and not _is_broken(row)


def _is_alike(row: BenchRow) -> bool:
    return row.verdict == "no difference seen"


def _is_undecided(row: BenchRow) -> bool:
    return row.verdict == "undecided"


def _is_failed(row: BenchRow) -> bool:
    return row.failed is not None


def _is_better(row: BenchRow) -> bool:
    return row.verdict == "different" and not row.worse


def _has_speed(row: BenchRow) -> bool:
    return row.speed is not None and finite(row.speed.median)


def _seeds(summary: BenchSummary) -> str:
    return count(len(summary.seeds), "seed")


def _end(configs: list[str]) -> str:
    return f"{listing(configs)} {'ends' if len(configs) == 1 else 'end'}"


def _fastest(first: BenchRow, rows: Sequence[BenchRow]) -> str:
    speeds = [(row.speed, row.config) for row in rows if row.speed is not None]
    speed, config = max(speeds, key=lambda pair: pair[0].median)
    if speed.low <= 1:
        return f"None is clearly faster than {first.config}."
    return f"Fastest is {config}: {times(speed.median)} the steps a second of {first.config}."


def _least_memory(first: BenchRow, rows: Sequence[BenchRow]) -> list[str]:
    totals = [(row.memory.total, row.config) for row in rows if row.memory is not None]
    if first.memory is None or not totals:
        return []
    total, config = min(totals, key=lambda pair: pair[0])
    share = total / first.memory.total
    if share >= LESS_MEMORY:
        return []
    return [f"{config} takes the least memory, {share:.0%} of {first.config}'s."]


def _trouble(summary: BenchSummary, row: BenchRow) -> list[str]:
    sentences = []
    if row.skips:
        steps = count(summary.steps * len(summary.seeds), "step")
        sentences.append(f"{row.config} skipped {row.skips:,} of {steps} for overflow.")
    if row.nonfinite:
        sentences.append(f"{row.config}: {row.nonfinite}.")
    return sentences


def times(ratio: float | None) -> str:
    """Write a ratio of speeds.

    >>> times(1.348), times(0.0312), times(None)
    ('1.35×', '0.031×', '–')
    """
    if not finite(ratio):
        return NONE
    return f"{ratio:.2f}×" if ratio >= 0.1 else f"{ratio:.2g}×"


def median_ratio(ratios: Ratios | None) -> str:
    """Write the median of ratios of speeds."""
    return times(None if ratios is None else ratios.median)


def quartiles(ratios: Ratios | None) -> str:
    """Write the quartiles of ratios.

    >>> from roundoff.train import Ratios
    >>> quartiles(Ratios(median=1.35, low=1.3, high=1.41, rounds=50))
    '1.30–1.41'
    """
    if ratios is None or not (finite(ratios.low) and finite(ratios.high)):
        return ""
    low = times(ratios.low).removesuffix("×")
    high = times(ratios.high).removesuffix("×")
    return f"{low}–{high}"


def mebibytes(value: int | None) -> str:
    """Write bytes in MiB.

    >>> mebibytes(3 << 20), mebibytes(120000)
    ('3.0 MiB', '0.11 MiB')
    """
    if value is None:
        return NONE
    size = value / MEBIBYTE
    if size >= 100:
        return f"{size:.0f} MiB"
    return f"{size:.1f} MiB" if size >= 1 else f"{size:.2g} MiB"


def mean(outcome: Outcome | None) -> str:
    """Write the mean over seeds, with the spread between them.

    >>> from roundoff.train import Outcome
    >>> mean(Outcome(mean=1.23456, spread=0.0123, seeds=[]))
    '1.235 ± 0.012'
    >>> mean(Outcome(mean=0.5, spread=None, seeds=[0.5]))
    '0.5000'
    """
    if outcome is None:
        return NONE
    text = digits(outcome.mean)
    return f"{text} ± {outcome.spread:.2g}" if finite(outcome.spread) else text


def digits(number: float | None) -> str:
    """Write a loss or metric with four digits."""
    if number is None:
        return NONE
    is_share = finite(number) and 0.1 <= abs(number) < 1
    return f"{number:.4f}" if is_share else f"{number:.4g}"


def difference(outcome: Outcome | None) -> str:
    """Write the mean difference with its 95 % interval.

    >>> from roundoff.train import Outcome
    >>> difference(Outcome(mean=1.0, spread=None, seeds=[], difference=0.0021, low=-0.004, high=0.0082))
    '+0.0021 [-0.004, +0.0082]'
    """
    if outcome is None or outcome.difference is None:
        return ""
    if outcome.low is None or outcome.high is None:
        return f"{outcome.difference:+.2g}"
    if outcome.low == outcome.high == 0:
        return "±0"
    return f"{outcome.difference:+.2g} [{outcome.low:+.2g}, {outcome.high:+.2g}]"


def judgement(outcome: Outcome | None) -> str:
    """Write the verdict on one number with its reason, and what could have been seen."""
    if outcome is None or outcome.verdict is None:
        return ""
    size = difference(outcome)
    text = f"{outcome.verdict}: {outcome.reason}"
    if size:
        text = f"{size}: {text}"
    if outcome.could_see:
        text += f" ({outcome.could_see:.2g} would have shown)"
    return text


def formats(row: BenchRow) -> str:
    """Write the formats that the matrix work of one step ran in.

    >>> from roundoff.train import BenchRow, StepFormats
    >>> matrix = {"forward": {"bf16": 20, "fp32": 1}, "backward": {"bf16": 40}}
    >>> formats(BenchRow(config="bf16", format="bf16", notes=[], findings=[], seen=StepFormats(matrix, 62)))
    'matrix work 60 bf16, 1 fp32; 62 casts'
    """
    if row.seen is None:
        return ""
    total: Counter[str] = Counter()
    for counts in row.seen.matrix.values():
        total.update(counts)
    ordered = sorted(total.items(), key=lambda item: -item[1])
    work = ", ".join(f"{number} {name}" for name, number in ordered)
    return f"matrix work {work or 'none'}; {count(row.seen.casts, 'cast')}"
