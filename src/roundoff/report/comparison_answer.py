"""What a comparison says, in sentences: the paragraph above the table.

The same stands in the terminal, in HTML and in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from roundoff.report.figures import NONE, count, finite, listing, percent, ratio

if TYPE_CHECKING:
    from roundoff.compare import (
        About,
        ComparisonCoverage,
        ComparisonSummary,
        Culprit,
        RoundingContribution,
    )

#: How many culprits are named after the first.
MORE = 3
#: The label of a difference of which nothing is known.
UNKNOWN = "difference"
#: Kinds of causes that stand before all operators: data, loaded weights, the loop.
_BEFORE_OPERATORS = ("data", "parameter", "loop")
#: Where an operator runs, in a sentence.
PASSES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer",
    "collective": "in a collective",
}
#: How many reasons are told, the most common first.
_REASONS_TOLD = 3
#: Reasons that the counts of status tell already, and those where there is nothing to
#: measure.
_TOLD = (
    "the reference has no",
    "the candidate has no",
    "the other run has no",
    "hands values on",
    "no tensor among",
    "memory that nothing",
)


class Labelled(Protocol):
    """A value or an operator by its names."""

    @property
    def site(self) -> str | None: ...
    @property
    def reference_site(self) -> str | None: ...
    @property
    def name(self) -> str | None: ...
    @property
    def call(self) -> int | None: ...
    @property
    def line(self) -> str | None: ...


def answer_comparison(summary: ComparisonSummary) -> list[str]:
    """The sentences, first the verdict.

    Then what does not repeat itself; which step and operator the runs part at, how far
    beyond rounding, what the difference looks like and why, its share of the error at
    the end of the step; what else was tried; further culprits, what only inherits, what
    to try, coverage, damage, notes.
    """
    about = summary.about
    first = summary.divergence
    sentences = _against_limits(summary)
    sentences += [_agreed(summary)] if first is None else _parted(summary, first)
    before_blame = [*about.programs, *about.repeats]
    sentences[1:1] = map(_stop, before_blame)
    sentences += map(_stop, about.verified)
    if first is not None:
        sentences += _other_culprits(first, summary.culprits)
        sentences += _inheriting(summary)
        sentences += _advice(first, summary.culprits)
        sentences += _set_up(first)
    elif not summary.culprits:
        sentences += _rounding(summary.rounding)
    sentences += _statistics_alone(summary)
    sentences.append(coverage_sentence(summary.coverage))
    sentences += [f"Damaged and left out: {line}." for line in about.damage]
    return [*sentences, *map(_stop, about.notes)]


def _set_up(first: Culprit) -> list[str]:
    """Name the verb for set-ups, where the runs part before any operator does."""
    if first.kind not in _BEFORE_OPERATORS:
        return []
    return ["'roundoff check' of the two runs lists what differs in their set-ups."]


def _stop(sentence: str) -> str:
    return sentence if sentence.endswith(".") else f"{sentence}."


# -- names and numbers -----------------------------------------------------------------


def called(value: Labelled, *, line: bool = True) -> str:
    """A value as a sentence names it, with the source line."""
    site = value.site or value.reference_site or "an operator"
    name = None if value.name == value.site else value.name
    return call_name(site, name, value.call, value.line if line else None)


def call_name(
    site: str, name: str | None, call: int | None, line: str | None = None
) -> str:
    """A parameter or an input by its name, else the operator, and the source line.

    >>> call_name("a/mm", None, 3, "net.py:7"), call_name("a/parameter", "a.w", -1)
    ('a/mm (net.py:7)', 'a.w')
    """
    text = site
    if name:
        text = name if (call or 0) < 0 else f"{site} of {name}"
    return f"{text} ({line})" if line else text


def size(error: float | None) -> str:
    """A relative error as text.

    >>> size(0.0312), size(0.0), size(float("inf")), size(None)
    ('3.1e-02', '0', 'NaN or Inf', '–')
    """
    if error is None or math.isnan(error):
        return NONE
    if math.isinf(error):
        return "NaN or Inf"
    return f"{error:.1e}" if error else "0"


def times(error: float | None, tolerance: float | None) -> str:
    """How many times what rounding explains an error is; empty without a meaning.

    >>> times(0.031, 2e-6), times(3e-6, 2e-6), times(0.1, 0.0)
    ('1.6e+04', '1.5', '')
    >>> times(float("inf"), 1e-6)
    ''
    """
    factor = ratio(error, tolerance)
    if not finite(factor):
        return ""
    if factor >= 1000:
        return f"{factor:.1e}"
    return f"{factor:.3g}" if factor >= 10 else f"{factor:.2g}"


def article(label: str) -> str:
    """A label of ``looks_like`` with its article.

    >>> article("wrong constant"), article("other values")
    ('a wrong constant', 'other values')
    >>> article("other operator"), article("corrupted elements")
    ('another operator', 'corrupted elements')
    """
    uncountable = label in ("rounding", "noise", "overflow")
    if uncountable or label.endswith(("values", "elements")):
        return label
    if label.startswith("other "):
        return f"an{label}"
    return f"an {label}" if label[0] in "aeio" else f"a {label}"


def bounds(about: About) -> list[str]:
    """The user's limits in words: ``cosine at least 0.98``."""
    return [
        f"{metric} {'at least' if about.is_lower_limit(metric) else 'at most'} {limit:g}"
        for metric, limit in about.limits.items()
    ]


# -- the verdict -----------------------------------------------------------------------


def _agreed(summary: ComparisonSummary) -> str:
    """The verdict where no operator made an error of its own."""
    measured = summary.coverage.measured
    equal = summary.coverage.equal
    if not measured:
        return (
            "Nothing could be compared: no value of the two runs has both a "
            "counterpart and statistics."
        )
    if summary.open:
        return _left_open(summary)
    if any(sentence.startswith("A bug") for sentence in summary.about.verified):
        return "No single operator explains the difference of the two runs."
    if not summary.agrees:  # by the user's limits
        return "No operator makes an error that rounding does not explain."
    if equal == measured:
        means = "bit for bit" if summary.tensors else "by their statistics"
        return f"The runs agree: all {count(measured, 'value')} are equal, {means}."
    text = "The runs agree: "
    if equal:
        text += f"{equal:,} of {count(measured, 'value')} are equal, and "
    explained = "what rounding explains"
    if summary.about.repeats:
        explained = "what rounding, or another run of the same program, explains"
    return f"{text}every difference is within {explained}."


def _left_open(summary: ComparisonSummary) -> str:
    """The verdict where nothing is blamed, and not every value could be judged."""
    passing = summary.verdicts.get("pass", 0)
    measured = count(passing + summary.open, "value")
    first = summary.first_open
    where = ""
    if first is not None:
        off = "" if first.error is None else f", {size(first.error)} off"
        where = f" (first {called(first)}{off})"
    can = f"{summary.open:,} cannot be decided"
    if not summary.tensors:
        can += " from statistics"
    return (
        f"Nothing is found wrong, and it is not decided that the runs agree: "
        f"{passing:,} of {measured} agree, {can}{where}."
    )


def _against_limits(summary: ComparisonSummary) -> list[str]:
    """How many values keep to the user's own limits."""
    limits = summary.about.limits
    margin = summary.about.margin
    if not limits and margin == 1:
        return []
    asked = listing(bounds(summary.about))
    if not limits:
        asked = f"at most {margin:g} times what rounding explains"
    failing = summary.verdicts.get("fail", 0)
    judged = count(failing + summary.verdicts.get("pass", 0), "value")
    if not failing:
        return [f"Asked for {asked}: all {judged} that could be judged keep to it."]
    where = f"; the first is {called(summary.first)}" if summary.first else ""
    do = "does" if failing == 1 else "do"
    return [f"Asked for {asked}: {failing:,} of {judged} {do} not keep to it{where}."]


def _parted(summary: ComparisonSummary, first: Culprit) -> list[str]:
    """Where the first error was made, its size, what it looks like, how it matters."""
    if not first.is_operator:
        return [_behind_the_operators(summary, first)]
    sentences = [_where_the_runs_part(summary, first)]
    other = first.reference_site
    if other and other != first.site and first.call >= 0:
        line = f" ({first.reference_line})" if first.reference_line else ""
        sentences.append(f"In the reference this is {other}{line}.")
    if first.looks_like not in (None, UNKNOWN):
        evidence = f": {first.evidence}" if first.evidence else ""
        sentences.append(f"It looks like {article(first.looks_like)}{evidence}.")
    if first.contribution:
        share = percent(first.contribution)
        sentences.append(f"It makes {share} of the error at the end of the step.")
    return sentences


def _behind_the_operators(summary: ComparisonSummary, first: Culprit) -> str:
    """The sentence about data, a parameter, an update or the loop."""
    evidence = first.evidence or "the programs differ"
    where = f" from step {first.step} on" if len(summary.steps) > 1 else ""
    if len(summary.ranks) > 1:
        where += f", rank {first.rank}"
    return f"The runs differ{where}: {evidence}."


def _where_the_runs_part(summary: ComparisonSummary, first: Culprit) -> str:
    name = called(first)
    where = f"step {first.step}"
    if len(summary.ranks) > 1:
        where += f", rank {first.rank}"
    run_in = PASSES.get(str(first.phase), "")
    if first.call < 0 and first.looks_like == "gradient cut":
        return f"The runs part in the gradient of {name}, {where}: it is {_off(first)}."
    if first.call < 0 and first.phase == "optimizer":
        return f"The runs part in the update of {name}, {where}."
    if first.call < 0:
        before = f"The runs differ before anything ran: {name}, {where}"
        return f"{before}, is {_off(first)}."
    if (first.error or 0.0) <= first.tolerance and summary.agrees:
        return (
            "The values agree within what rounding explains, the programs do not: "
            f"{name}, {where}, {run_in}, is another calculation "
            f"({size(first.error)} off)."
        )
    if first.looks_like == "gradient cut":
        # named for the forward pass, found in the backward one
        part = f"The runs part in the gradient that passes {name}, {where}"
        return f"{part}: it is {_off(first)}."
    part = f"The runs part at {name}, {where}, {run_in}"
    return f"{part}: {_inputs(first)}, its output is {_off(first)}."


def _inputs(first: Culprit) -> str:
    off = first.inputs_error
    if not off:
        return "its inputs are equal to the reference's"
    if off <= first.tolerance:
        return "its inputs agree with the reference's"
    return f"its inputs are {size(off)} off already"


def _off(first: Culprit) -> str:
    if first.error is not None and math.isinf(first.error):
        return "not finite where the reference's is, or of another shape"
    if first.error is not None and 0 < first.error <= first.tolerance:
        return f"{size(first.error)} off, which rounding alone could be"
    factor = times(first.error, first.tolerance)
    beyond = f", {factor} times what rounding explains" if factor else ""
    return f"{size(first.error)} off{beyond}"


# -- what follows ----------------------------------------------------------------------


def _other_culprits(first: Culprit, culprits: Sequence[Culprit]) -> list[str]:
    """The culprits that the first sentence does not name."""
    others = [culprit for culprit in culprits if _key(culprit) != _key(first)]
    if not others:
        return []
    shown = listing([f"{called(other)}{_share(other)}" for other in others[:MORE]])
    more = f" and {len(others) - MORE:,} more" if len(others) > MORE else ""
    if len(others) == 1:
        return [f"{shown} makes an error of its own too."]
    return [f"{shown}{more} make errors of their own too."]


def _key(culprit: Culprit) -> tuple[object, ...]:
    return culprit.site, culprit.phase, culprit.record


def _share(culprit: Culprit) -> str:
    parts = []
    if culprit.contribution:
        parts.append(percent(culprit.contribution))
    if culprit.looks_like is not None and culprit.looks_like != UNKNOWN:
        parts.append(culprit.looks_like)
    return f" [{', '.join(parts)}]" if parts else ""


def _inheriting(summary: ComparisonSummary) -> list[str]:
    inherited = summary.inherited
    if not inherited:
        return []
    source = "it" if len(summary.culprits) < 2 else "them"
    verb = "inherits" if inherited == 1 else "inherit"
    return [f"{count(inherited, 'other value')} only {verb} {source}."]


def _advice(first: Culprit, culprits: Sequence[Culprit]) -> list[str]:
    likeliest = culprits[0] if culprits else first
    return [f"Try: {likeliest.advice}."] if likeliest.advice else []


def _rounding(shares: Sequence[RoundingContribution]) -> list[str]:
    """Which operators' rounding contributes most, where nothing fails."""
    if not shares:
        return []
    texts = []
    for share in shares[:MORE]:
        site = share.site or share.reference_site or "an operator"
        name = call_name(site, None, None, share.line)
        texts.append(f"{name} ({percent(share.contribution)})")
    return [f"Most of the difference comes from the rounding of {listing(texts)}."]


def _statistics_alone(summary: ComparisonSummary) -> list[str]:
    """Where tensors are missing: what that leaves open."""
    kept = summary.about.kept
    lacking = [
        side
        for side in ("reference", "candidate")
        if kept.get(side, "tensors") != "tensors"
    ]
    if not lacking:
        return []
    if summary.tensors:
        text = (
            "Tensors that were not kept were computed again from what the steps began "
            "with, and have the recorded statistics."
        )
        return [text]
    who = "neither run kept" if len(lacking) == 2 else f"the {lacking[0]} did not keep"
    if summary.open:
        return [
            (
                f"Record both runs with --keep tensors to decide it ({who} tensors): every "
                "operator is run again on the inputs it had then."
            )
        ]
    text = (
        f"This is from statistics alone ({who} tensors). With --keep tensors on both "
        "sides every operator is run again on the inputs it had, which tells the error "
        "it made from the error it passed on, and what the difference looks like."
    )
    return [text]


def coverage_sentence(coverage: ComparisonCoverage) -> str:
    """How many values have a counterpart, how many were not measured, and why.

    Of the reasons the commonest is named.
    """
    if not coverage.rows:
        return "Neither run has a value to compare."
    parts = [_counterparts(coverage)]
    for side in ("reference", "candidate"):
        lonely = coverage.status.get(f"only in {side}")
        if lonely:
            verb = "is" if lonely == 1 else "are"
            parts.append(f"{lonely:,} {verb} only in the {side}")
    damaged = coverage.status.get("damaged")
    if damaged:
        parts.append(f"{count(damaged, 'step')} could not be read")
    reasons = [r for r in coverage.reasons if not r.reason.startswith(_TOLD)]
    if reasons:
        unknown = sum(reason.count for reason in reasons)
        why = reasons[0].reason
        if len(reasons) > 1:
            told = reasons[:_REASONS_TOLD]
            why = ", ".join(f"{reason.reason} ({reason.count:,})" for reason in told)
        parts.append(f"{unknown:,} could not be measured: {why}")
    return "; ".join(parts) + "."


def _counterparts(coverage: ComparisonCoverage) -> str:
    by_name = coverage.status.get("matched", 0)
    by_use = coverage.status.get("by use", 0)
    values = count(coverage.rows, "value")
    if by_name < coverage.rows:
        text = f"{by_name:,} of {values} have a counterpart by name or structure"
        return f"{text}, {by_use:,} by use" if by_use else text
    if coverage.rows > 1:
        return f"All {values} have a counterpart"
    return "The one value has a counterpart"
