"""What a fault looks like: rounding, a constant, an axis, a buffer, a kernel that stopped early...

The first description that fits gives the label: of the calls, of what they read, and of the values (``structure``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundoff.compare.findings import Finding
from roundoff.compare.replayed import SAME
from roundoff.compare.structure import fewer_digits, structure, usual_error
from roundoff.errors import RunError
from roundoff.ops import operators_that, overload_of

Row = Mapping[str, Any]

#: What says how a value that was there before anything ran was loaded or made.
OF_VALUES = (
    "wrong axis or layout",
    "constant factor",
    "constant offset",
    "corrupted elements",
)


@dataclass(frozen=True)
class Looks:
    """``label`` is one of a short list, ``evidence`` what was seen, ``advice`` what to try."""

    label: str
    evidence: str
    advice: str


ADVICE = {
    "rounding": "keep this operator in a wider format (roundoff diagnose finds the cheapest plan that does)",
    "wrong constant": "compare this argument in the two programs",
    "other operator": "compare the code of the two programs at these lines",
    "other input": "compare what the two programs hand to this operator",
    "other shape": "compare what is sliced, padded or reshaped before it",
    "missing operator": "the reference computes this before; look for the line that the candidate lacks",
    "gradient cut": "look for detach(), no_grad() or .data in one of the two programs",
    "extra operator": "the reference has no such operator here; look for what inserts it (a mode, a hook, dropout left on)",
    "wrong axis or layout": "compare dim, view and transpose arguments, and the layout the weights were saved in",
    "stale or shared buffer": "look for a buffer that is written before it is read, reused, or was not updated or loaded",
    "other values": "check how it was loaded or made: checkpoint, seed, preprocessing",
    "overflow": "keep it in a format with more range, or scale it; 'roundoff overflow' shows where it comes from",
    "NaN": "'roundoff overflow' shows where it is born",
    "narrower format": "cast it up, or keep it out of autocast: the reference computes this in a wider format",
    "partly written output": "suspect the kernel: its tail is not written; try another shape, backend or library version",
    "corrupted elements": "run the step again: if it moves, suspect memory or a race; if not, the kernel's indexing",
    "constant offset": "look for a bias, a mean or a zero point that is missing or counted twice",
    "constant factor": "look for a missing or doubled scale: mean against sum, 1/sqrt(d), gradient averaging",
    "noise": "run both again: if this changes from run to run it is a race or an unseeded random operator",
    "wrong kernel": "run the operator alone on another backend or device: 'roundoff replay' does on the recorded inputs",
    "difference": "run both with --keep tensors to see what it looks like",
}


def looks_like(
    finding: Finding,
    row: Row,
    twin: Row,
    *,
    expected: Tensor | None,
    actual: Tensor | None,
    missing: Row | None,
    cut: Row | None,
    ours: Mapping[int, Row],
    theirs: Mapping[int, Row],
    counterpart: Mapping[int, int],
) -> Looks:
    """The first description that fits a row which made an error itself.

    ``expected`` and ``actual`` are what it should have given on its inputs, and what it gave; None where nothing was kept.
    ``counterpart`` has the reference record of each candidate record. Unknown statistics (None) count as no NaN and no Inf.
    """
    if cut is not None:
        here = (
            "only the reference detaches"
            if cut is missing
            else "the reference does not detach"
        )
        return Looks(
            "gradient cut", f"{here} at {cut['site']}{_at(cut)}", ADVICE["gradient cut"]
        )
    label, evidence = _label(
        finding, row, twin, expected, actual, missing, ours, theirs, counterpart
    )
    return Looks(label, evidence, ADVICE[label])


def _label(
    finding: Finding,
    row: Row,
    twin: Row,
    expected: Tensor | None,
    actual: Tensor | None,
    missing: Row | None,
    ours: Mapping[int, Row],
    theirs: Mapping[int, Row],
    counterpart: Mapping[int, int],
) -> tuple[str, str]:
    again = finding.replayed
    if missing is not None:
        what = f"{missing['site']}{_at(missing)} is in the reference only, and its result is not read here"
        return "missing operator", what
    if finding.read is not None:
        there, here = ours[finding.read[0]], theirs[finding.read[1]]
        what = f"reads {here['site']}{_at(here)} where the reference reads {there['site']}{_at(there)}"
        return (
            "stale or shared buffer"
            if _overwritten(finding.read, theirs, counterpart)
            else "other input"
        ), what
    if finding.arguments and (
        again is None or again.semantic is None or again.semantic > SAME
    ):
        return "wrong constant", "; ".join(finding.arguments)
    if (
        again is not None
        and (again.semantic or 0.0) > SAME
        and row["operator"] != twin["operator"]
    ):
        return (
            "other operator",
            f"{row['operator']} where the reference has {twin['operator']}",
        )
    specials = _specials(row, twin)
    if specials is not None:
        return specials
    if row["call"] < 0 and not row["inputs"]:
        found = (
            None
            if actual is None or expected is None
            else structure(expected, actual, _unit(row["dtype"]))
        )
        if found is not None and found[0] in OF_VALUES:
            return found
        return _narrow(row, twin) or _before(
            row, twin, "" if found is None else f": {found[1]}"
        )
    if row["shape"] != twin["shape"] and row["operator"] == twin["operator"]:
        return "other shape", f"{row['shape']} where the reference has {twin['shape']}"
    if row["operator"] == twin["operator"] and _draws(row):
        return (
            "noise",
            f"{row['operator']} draws random numbers: other ones than in the reference",
        )
    narrow = _narrow(row, twin) or _narrow_region(finding, row, twin, theirs)
    other = row["operator"] != twin["operator"] or bool(finding.region)
    if other and row["numel"] == 1:  # one value has no structure
        return narrow or _other(finding, row, twin, ours, theirs, counterpart)
    if actual is not None and expected is not None:
        found = structure(expected, actual, _unit(row["dtype"]))
        if (
            found is None
            and (few := fewer_digits(expected, actual, _unit(row["dtype"]))) is not None
        ):
            found = "narrower format", f"every value is one of {few}, in {row['dtype']}"
        if found is not None:
            return found
    if narrow is not None:
        return narrow
    if other:
        return _other(finding, row, twin, ours, theirs, counterpart)
    if again is not None and (again.excess or 0.0) > 1.0:
        far = f"{again.excess:.3g} times what rounding explains on the inputs it had"
        return "wrong kernel", far + _usual(expected, actual)
    if actual is not None and expected is not None:
        return "noise", f"no structure in the difference{_usual(expected, actual)}"
    return "difference", "its inputs agree with the reference's, its result does not"


def _at(row: Row) -> str:
    return f" ({row['line']})" if row["line"] else ""


def _usual(expected: Tensor | None, actual: Tensor | None) -> str:
    usual = (
        None if expected is None or actual is None else usual_error(expected, actual)
    )
    return (
        ""
        if usual is None
        else f"; half of the values that differ are off by more than {100 * usual:.2g} %"
    )


def _overwritten(
    read: tuple[int, int], theirs: Mapping[int, Row], counterpart: Mapping[int, int]
) -> bool:
    """Whether what is read was written in place over what the reference reads, or is from before the step."""
    proper, record = read
    seen: set[int] = set()
    while record in theirs and record not in seen:
        seen.add(record)
        row = theirs[record]
        if row["call"] < 0 or counterpart.get(record) == proper:
            return True
        if not row["inplace"] or not row["inputs"]:
            return False
        record = row["inputs"][0]
    return False


def _draws(row: Row) -> bool:
    try:
        return (
            torch.Tag.nondeterministic_seeded in overload_of(row["overload"] or "").tags
        )
    except RunError:
        return False


def _before(row: Row, twin: Row, seen: str) -> tuple[str, str]:
    """A value that was there before anything ran."""
    if twin["call"] >= 0:
        return (
            "stale or shared buffer",
            f"left from before, where the reference makes it by {twin['site']}{_at(twin)}",
        )
    if row["operator"] == "buffer":
        return (
            "stale or shared buffer",
            f"a buffer that differs before anything ran{seen}",
        )
    return "other values", f"it differs before anything ran{seen}"


def _other(
    finding: Finding,
    row: Row,
    twin: Row,
    ours: Mapping[int, Row],
    theirs: Mapping[int, Row],
    counterpart: Mapping[int, int],
) -> tuple[str, str]:
    """An operator in the place of another one, or one that works on what the reference hands on as it is."""
    if twin["call"] < 0:
        name = twin["name"] or twin["site"]
        return (
            "extra operator",
            f"{row['operator']} changes {name}, which the reference leaves as it is",
        )
    same, made = {twin["record"]}, twin
    while (
        made["operator"] in operators_that("hand on in order")
        and len(made["inputs"] or ()) == 1
        and made["inputs"][0] in ours
    ):
        made = ours[made["inputs"][0]]
        same.add(made["record"])
    for record in [row["record"], *finding.region]:
        if any(
            counterpart.get(read) in same for read in theirs[record]["inputs"] or ()
        ):
            what = f"{row['operator']} works on what the reference's {twin['operator']} hands on as it is"
            return "extra operator", what
    return (
        "other operator",
        f"{row['operator']} where the reference has {twin['operator']}",
    )


def _narrow_region(
    finding: Finding, row: Row, twin: Row, theirs: Mapping[int, Row]
) -> tuple[str, str] | None:
    """What leads here was computed in fewer digits than the result has."""
    for record in finding.region:
        inner = theirs[record]
        if _unit(inner["dtype"]) > max(_unit(row["dtype"]), _unit(twin["dtype"])) > 0:
            return (
                "narrower format",
                f"{inner['site']}{_at(inner)} is in {inner['dtype']}, the result in {row['dtype']}",
            )
    return None


def _specials(row: Row, twin: Row) -> tuple[str, str] | None:
    """NaN or Inf that the reference does not have."""
    kinds = (("NaN", "nan"), ("+Inf", "posinf"), ("-Inf", "neginf"))
    counts = {name: ((twin[key] or 0), (row[key] or 0)) for name, key in kinds}
    more = {name: (a, b) for name, (a, b) in counts.items() if a != b}
    if not more:
        return None
    text = ", ".join(
        f"{b:,} {name} where the reference has {a:,}" for name, (a, b) in more.items()
    )
    if any(b > a for name, (a, b) in more.items() if name != "NaN"):
        return "overflow", f"{text}, in {row['dtype']}"
    if more.get("NaN", (0, 0))[1] > more.get("NaN", (0, 0))[0]:
        return "NaN", text
    if row["operator"] != twin["operator"]:
        return (
            "other operator",
            f"{row['operator']} where the reference has {twin['operator']}: {text}",
        )
    return "wrong constant", text


def _narrow(row: Row, twin: Row) -> tuple[str, str] | None:
    one, other = (
        getattr(torch, twin["dtype"] or "", None),
        getattr(torch, row["dtype"] or "", None),
    )
    if (
        not isinstance(one, torch.dtype)
        or not isinstance(other, torch.dtype)
        or one == other
    ):
        return None
    if (
        one.is_floating_point
        and other.is_floating_point
        and torch.finfo(other).eps > torch.finfo(one).eps
    ):
        return (
            "narrower format",
            f"{row['dtype']} where the reference has {twin['dtype']}",
        )
    if (
        other.itemsize < one.itemsize
        and not one.is_floating_point
        and not other.is_floating_point
    ):
        return "overflow", f"{row['dtype']} where the reference has {twin['dtype']}"
    return None


def _unit(dtype: str | None) -> float:
    found = getattr(torch, dtype or "", None)
    if isinstance(found, torch.dtype) and (found.is_floating_point or found.is_complex):
        return float(torch.finfo(found).eps) / 2
    return 0.0
