"""What a comparison says, in sentences: the paragraph above the table, the same in the terminal, in HTML and in JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from roundoff.report.figures import count, finite, listing, percent, ratio

Row = Mapping[str, Any]

#: How many culprits are named after the first.
MORE = 3
#: What ``looks_like`` says where it knows nothing.
UNKNOWN = "difference"
#: Where an operator runs, in a sentence.
PASSES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer",
    "collective": "in a collective",
}


def answer(data: Row) -> list[str]:
    """The sentences, first the verdict; ``data`` is ``Comparison.to_dict()``, of which missing keys are taken for empty.

    Which step and operator the runs part at, how far beyond rounding, what the difference looks like and why, its share
    of the error at the end of the step, further culprits, what only inherits, what to try, coverage, damage, notes. After
    the verdict stands what does not repeat itself (``repeats``), before other culprits what else was tried (``verified``).

    >>> answer({"verdicts": {"pass": 3}, "agrees": True, "culprits": [], "coverage": {"rows": 3, "measured": 3, "equal": 3,
    ...         "status": {"matched": 3}}})
    ['The runs agree: all 3 values are equal, bit for bit.', 'All 3 values have a counterpart.']
    """
    named = data.get("culprits") or []
    first = data.get("divergence")
    said = [*_outside(data), *(_parted(data, first) if first else [_agreed(data)])]
    said[1:1] = [
        _stop(line) for line in data.get("repeats") or []
    ]  # before anything is blamed
    said += [_stop(line) for line in data.get("verified") or []]
    if first:
        said += _others(first, named)
        said += _inherited(data)
        said += [
            f"Try: {tried}."
            for tried in [named[0].get("try") if named else first.get("try")]
            if tried
        ]
    elif not named:
        said += _rounding(data.get("rounding") or [])
    said += [*_statistics(data), coverage(data)]
    said += [f"Damaged and left out: {line}." for line in data.get("damage") or []]
    return [*said, *map(_stop, data.get("notes") or [])]


def _stop(sentence: str) -> str:
    return sentence if sentence.endswith(".") else f"{sentence}."


def verdict(data: Row) -> str:
    """The first sentence."""
    return answer(data)[0]


def called(entry: Row, *, line: bool = True) -> str:
    """A site as a sentence names it: a parameter or an input by its name, else the operator, and the source line."""
    site, name = (
        entry.get("site") or entry.get("reference_site") or "an operator",
        entry.get("name"),
    )
    if name:
        site = name if (entry.get("call") or 0) < 0 else f"{site} of {name}"
    return f"{site} ({entry['line']})" if line and entry.get("line") else str(site)


def size(error: float | None) -> str:
    """A relative error as text.

    >>> size(0.0312), size(0.0), size(float("inf")), size(None)
    ('3.1e-02', '0', 'NaN or Inf', '–')
    """
    if error is None or math.isnan(error):
        return "–"
    return "NaN or Inf" if math.isinf(error) else f"{error:.1e}" if error else "0"


def times(error: float | None, tolerance: float | None) -> str:
    """How many times what rounding explains an error is; empty where that has no meaning.

    >>> times(0.031, 2e-6), times(3e-6, 2e-6), times(0.1, 0.0), times(float("inf"), 1e-6)
    ('1.6e+04', '1.5', '', '')
    """
    factor = ratio(error, tolerance)
    if not finite(factor):
        return ""
    return (
        f"{factor:.1e}"
        if factor >= 1000
        else f"{factor:.3g}"
        if factor >= 10
        else f"{factor:.2g}"
    )


def coverage(data: Row) -> str:
    """How many values have a counterpart, and how; how many were not measured, and the commonest reason."""
    covered = data.get("coverage") or {}
    rows, status = covered.get("rows", 0), covered.get("status") or {}
    if not rows:
        return "Neither run has a value to compare."
    by_name, by_use = status.get("matched", 0), status.get("by use", 0)
    if by_name == rows:
        parts = [
            f"All {count(rows, 'value')} have a counterpart"
            if rows > 1
            else "The one value has a counterpart"
        ]
    else:
        parts = [
            f"{by_name:,} of {count(rows, 'value')} have a counterpart by name or structure"
        ]
        parts[0] += f", {by_use:,} by use" if by_use else ""
    for side in ("reference", "candidate"):
        if lonely := status.get(f"only in {side}"):
            parts.append(
                f"{lonely:,} {'is' if lonely == 1 else 'are'} only in the {side}"
            )
    if status.get("damaged"):
        parts.append(f"{count(status['damaged'], 'step')} could not be read")
    reasons = [
        r
        for r in covered.get("reasons") or ()
        if not str(r["reason"]).startswith(_SAID)
    ]
    unknown = sum(r["count"] for r in reasons)
    if unknown:
        why = reasons[0]["reason"] + (
            f" ({reasons[0]['count']:,})" if len(reasons) > 1 else ""
        )
        parts.append(f"{unknown:,} could not be measured: {why}")
    return "; ".join(parts) + "."


#: Reasons that the counts of status tell already, and those where there is nothing to measure.
_SAID = (
    "the reference has no",
    "the candidate has no",
    "the other run has no",
    "hands values on",
    "no tensor among",
    "memory that nothing",
)


def _agreed(data: Row) -> str:
    """The verdict where no operator made an error of its own."""
    covered, largest = data.get("coverage") or {}, data.get("largest")
    measured, equal = covered.get("measured", 0), covered.get("equal", 0)
    if not measured:
        return "Nothing could be compared: no value of the two runs has both a counterpart and statistics."
    if not data.get("agrees", True):  # by the limits of the user, see _outside
        return "No operator makes an error that rounding does not explain."
    if equal == measured:
        how = "bit for bit" if data.get("tensors", True) else "by their statistics"
        return f"The runs agree: all {count(measured, 'value')} are equal, {how}."
    text = (
        f"The runs agree: {equal:,} of {count(measured, 'value')} are equal, and "
        if equal
        else "The runs agree: "
    )
    explained = "what rounding explains"
    if data.get("repeats"):
        explained = "what rounding, or another run of the same program, explains"
    text += f"every difference is within {explained}"
    return (
        f"{text} (largest {size(largest['error'])} at {called(largest)})."
        if largest
        else f"{text}."
    )


def _outside(data: Row) -> list[str]:
    """What the user's own limits say."""
    limits, verdicts, margin = (
        data.get("limits") or {},
        data.get("verdicts") or {},
        data.get("margin", 1),
    )
    if not limits and margin == 1:
        return []
    asked = listing(
        [f"{name} {bound} {value:g}" for name, (bound, value) in bounds(limits).items()]
    )
    asked = asked or f"at most {margin:g} times what rounding explains"
    failing, judged = (
        verdicts.get("fail", 0),
        verdicts.get("fail", 0) + verdicts.get("pass", 0),
    )
    if not failing:
        return [
            f"Asked for {asked}: all {count(judged, 'value')} that could be judged keep to it."
        ]
    first = data.get("first")
    where = f"; the first is {called(first)}" if first else ""
    do = "does" if failing == 1 else "do"
    return [
        f"Asked for {asked}: {failing:,} of {count(judged, 'value')} {do} not keep to it{where}."
    ]


def bounds(limits: Row) -> dict[str, tuple[str, float]]:
    """The limits with their direction in words: cosine and the like are better when larger."""
    better = ("cosine", "sqnr_db", "share_equal")
    return {
        name: ("at least" if name in better else "at most", value)
        for name, value in limits.items()
    }


def _parted(data: Row, first: Row) -> list[str]:
    """Where the first error was made, how large it is, what it looks like, and how much it matters."""
    where = f"step {first.get('step')}" + (
        f", rank {first['rank']}" if len(data.get("ranks") or ()) > 1 else ""
    )
    small = (first.get("error") or 0.0) <= (first.get("tolerance") or 0.0)
    passes = PASSES.get(str(first.get("phase")), "")
    if (first.get("call") or 0) < 0:
        text = f"The runs differ before anything ran: {called(first)}, {where}, is {_off(first)}."
    elif small and data.get("agrees", True):
        text = (
            f"The values agree within what rounding explains, the programs do not: {called(first)}, {where}, {passes}, "
            f"is another calculation ({size(first.get('error'))} off)."
        )
    elif (
        first.get("looks_like") == "gradient cut"
    ):  # named for the forward pass, found in the backward one
        text = f"The runs part in the gradient that passes {called(first)}, {where}: it is {_off(first)}."
    else:
        text = f"The runs part at {called(first)}, {where}, {passes}: {_inputs(first)}, its output is {_off(first)}."
    said = [text]
    other = first.get("reference_site")
    if other and other != first.get("site") and (first.get("call") or 0) >= 0:
        line = f" ({first['reference_line']})" if first.get("reference_line") else ""
        said.append(f"In the reference this is {other}{line}.")
    if first.get("looks_like") not in (None, UNKNOWN):
        evidence = f": {first['evidence']}" if first.get("evidence") else ""
        said.append(f"It looks like {article(first['looks_like'])}{evidence}.")
    if first.get("contribution"):
        said.append(
            f"It makes {percent(first['contribution'])} of the error at the end of the step."
        )
    return said


def _inputs(first: Row) -> str:
    off = first.get("inputs_error")
    if off is None or (
        first.get("tolerance") is not None and 0 < off <= first["tolerance"]
    ):
        return "its inputs agree with the reference's"
    return (
        f"its inputs are {size(off)} off already"
        if off
        else "its inputs are equal to the reference's"
    )


def _off(first: Row) -> str:
    error, tolerance = first.get("error"), first.get("tolerance")
    if error is not None and math.isinf(error):
        return "not finite where the reference's is, or of another shape"
    factor = times(error, tolerance)
    return f"{size(error)} off" + (
        f", {factor} times what rounding explains" if factor else ""
    )


def article(label: str) -> str:
    """A label of ``looks_like`` with its article.

    >>> article("wrong constant"), article("other values"), article("other operator"), article("corrupted elements")
    ('a wrong constant', 'other values', 'another operator', 'corrupted elements')
    """
    if label in ("rounding", "noise", "overflow") or label.endswith(
        ("values", "elements")
    ):
        return label
    return (
        "an" + label
        if label.startswith("other ")
        else f"{'an' if label[0] in 'aeio' else 'a'} {label}"
    )


def _others(first: Row, named: Sequence[Row]) -> list[str]:
    """The culprits after, or before, the one that the first sentence names."""
    rest = [
        c
        for c in named
        if (c.get("site"), c.get("phase"), c.get("record"))
        != (first.get("site"), first.get("phase"), first.get("record"))
    ]
    if not rest:
        return []
    shown = listing([f"{called(c)}{_share(c)}" for c in rest[:MORE]])
    more = f" and {len(rest) - MORE:,} more" if len(rest) > MORE else ""
    verb = "makes an error" if len(rest) == 1 else "make errors"
    return [f"{shown}{more} {verb} of {'its' if len(rest) == 1 else 'their'} own too."]


def _share(entry: Row) -> str:
    parts = [percent(entry["contribution"])] if entry.get("contribution") else []
    parts += (
        [str(entry["looks_like"])]
        if entry.get("looks_like") not in (None, UNKNOWN)
        else []
    )
    return f" [{', '.join(parts)}]" if parts else ""


def _inherited(data: Row) -> list[str]:
    inherited = data.get("inherited") or 0
    if not inherited:
        return []
    what = "it" if len(data.get("culprits") or ()) < 2 else "them"
    return [
        f"{count(inherited, 'other value')} only {'inherits' if inherited == 1 else 'inherit'} {what}."
    ]


def _rounding(rows: Sequence[Row]) -> list[str]:
    """Which operators' rounding contributes most, where nothing fails and formats differ."""
    if not rows:
        return []
    shown = listing(
        [
            called(r)
            + (f" ({percent(r['contribution'])})" if r.get("contribution") else "")
            for r in rows[:MORE]
        ]
    )
    return [f"Most of what there is comes from the rounding of {shown}."]


def _statistics(data: Row) -> list[str]:
    """Where tensors are missing: what that leaves open."""
    kept = data.get("kept") or {}
    lacking = [
        side
        for side in ("reference", "candidate")
        if kept.get(side, "tensors") != "tensors"
    ]
    if data.get("tensors", True) or not lacking:
        return []
    who = "neither run kept" if len(lacking) == 2 else f"the {lacking[0]} did not keep"
    text = (
        f"This is from statistics alone ({who} tensors). With --keep tensors on both sides every operator is run again on "
        "the inputs it had, which tells what it made from what it passed on, and what the difference looks like."
    )
    return [text]
