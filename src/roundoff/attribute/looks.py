"""What the difference of two tensors looks like: rounding, a constant, an axis, a buffer, a kernel that stopped early...

Each classifier is a few lines over the expected and the actual values; the first that fits gives the label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundoff.attribute.findings import Finding
from roundoff.attribute.replayed import SAME

Row = Mapping[str, Any]

#: A fit is one that leaves this share of the squared difference.
FIT = 1e-4
#: More wrong elements than this share are no part of a result.
MOST = 0.75
#: Elements that are looked at where all of them would take long.
LOOKED_AT = 2**22


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
    "constant factor": "look for a missing or doubled scale: mean against sum, 1/sqrt(d), gradient averaging",
    "noise": "run both again: if this changes from run to run it is a race or an unseeded random operator",
    "wrong kernel": "run the operator alone on another backend or device: 'roundoff replay' does on the recorded inputs",
    "difference": "run both with --keep tensors to see what it looks like",
}


def looks_like(
    finding: Finding, row: Row, twin: Row, *, expected: Tensor | None, actual: Tensor | None, missing: Row | None,
    cut: Row | None, ours: Mapping[int, Row], theirs: Mapping[int, Row],
) -> Looks:  # fmt: skip
    """The first description that fits a row which made an error itself.

    ``expected`` and ``actual`` are what it should have given on its inputs, and what it gave; None where nothing was kept.
    """
    if cut is not None:
        here = "only the reference detaches" if cut is missing else "the reference does not detach"
        return Looks("gradient cut", f"{here} at {cut['site']}{_at(cut)}", ADVICE["gradient cut"])
    label, evidence = _label(finding, row, twin, expected, actual, missing, ours, theirs)
    return Looks(label, evidence, ADVICE[label])


def _label(
    finding: Finding, row: Row, twin: Row, expected: Tensor | None, actual: Tensor | None, missing: Row | None,
    ours: Mapping[int, Row], theirs: Mapping[int, Row],
) -> tuple[str, str]:  # fmt: skip
    again = finding.replayed
    if missing is not None:
        what = f"{missing['site']}{_at(missing)} is in the reference only, and its result is not read here"
        return "missing operator", what
    if finding.read is not None:
        there, here = ours[finding.read[0]], theirs[finding.read[1]]
        what = f"reads {here['site']}{_at(here)} where the reference reads {there['site']}{_at(there)}"
        return "stale or shared buffer", what
    if finding.arguments and (again is None or again.semantic is None or again.semantic > SAME):
        return "wrong constant", "; ".join(finding.arguments)
    if again is not None and (again.semantic or 0.0) > SAME and row["operator"] != twin["operator"]:
        return "other operator", f"{row['operator']} where the reference has {twin['operator']}"
    specials = _specials(row, twin)
    if specials is not None:
        return specials
    if actual is not None and expected is not None:
        found = _of_tensors(expected, actual, row, twin)
        if found is not None:
            return found
    narrow = _narrow(row, twin)
    if narrow is not None:
        return narrow
    if not row["inputs"] and row["call"] < 0:
        return "other values", "it differs before anything ran"
    if row["operator"] != twin["operator"] or finding.region:
        return ("extra operator" if finding.region or twin["call"] < 0 else "other operator"), (
            f"{row['operator']} where the reference has {twin['operator']}"
        )
    if again is not None and (again.excess or 0.0) > 1.0:
        return "wrong kernel", f"{again.excess:.3g} times what rounding explains on the inputs it had"
    if actual is not None and expected is not None:
        return "noise", "no structure in the difference"
    return "difference", "its inputs agree with the reference's, its result does not"


def _at(row: Row) -> str:
    return f" ({row['line']})" if row["line"] else ""


def _specials(row: Row, twin: Row) -> tuple[str, str] | None:
    """NaN or Inf that the reference does not have."""
    kinds = (("NaN", "nan"), ("+Inf", "posinf"), ("-Inf", "neginf"))
    counts = {name: ((twin[key] or 0), (row[key] or 0)) for name, key in kinds}
    more = {name: (a, b) for name, (a, b) in counts.items() if a != b}
    if not more:
        return None
    text = ", ".join(f"{b:,} {name} where the reference has {a:,}" for name, (a, b) in more.items())
    if any(b > a for name, (a, b) in more.items() if name != "NaN"):
        return "overflow", f"{text}, in {row['dtype']}"
    if more.get("NaN", (0, 0))[1] > more.get("NaN", (0, 0))[0]:
        return "NaN", text
    return "wrong constant", text


def _narrow(row: Row, twin: Row) -> tuple[str, str] | None:
    one, other = getattr(torch, twin["dtype"] or "", None), getattr(torch, row["dtype"] or "", None)
    if not isinstance(one, torch.dtype) or not isinstance(other, torch.dtype) or one == other:
        return None
    if one.is_floating_point and other.is_floating_point and torch.finfo(other).eps > torch.finfo(one).eps:
        return "narrower format", f"{row['dtype']} where the reference has {twin['dtype']}"
    if other.itemsize < one.itemsize and not one.is_floating_point and not other.is_floating_point:
        return "overflow", f"{row['dtype']} where the reference has {twin['dtype']}"
    return None


def _of_tensors(expected: Tensor, actual: Tensor, row: Row, twin: Row) -> tuple[str, str] | None:
    want, got = _flat(expected), _flat(actual)
    if want is None or got is None or not want.numel():
        return None
    fine = want.isfinite() & got.isfinite()
    want, got = torch.where(fine, want, 0.0), torch.where(fine, got, 0.0)
    off = got - want
    scale = float(want.abs().max())
    rounding = 4 * _unit(row["dtype"]) * want.abs() + _unit(row["dtype"]) * scale / 16
    differ = off.abs() > rounding
    count, size = int(differ.sum()), want.numel()
    if not count:
        return _narrow(row, twin)
    return (
        _partly(got, differ, count, actual)
        or _clipped(want, got, differ)
        or _few(differ, count, size, actual)
        or _permuted(expected, want, got)
        or _scaled(want, got, off)
        or _rounded_values(got, row, twin)
    )


def _unit(dtype: str | None) -> float:
    found = getattr(torch, dtype or "", None)
    if isinstance(found, torch.dtype) and (found.is_floating_point or found.is_complex):
        return float(torch.finfo(found).eps) / 2
    return 0.0


def _flat(tensor: Tensor) -> Tensor | None:
    try:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        return tensor.detach().to(torch.float64).reshape(-1)[:LOOKED_AT]
    except (RuntimeError, NotImplementedError):
        return None


def _partly(got: Tensor, differ: Tensor, count: int, actual: Tensor) -> tuple[str, str] | None:
    """One block at the end (or the last indices of an axis) is wrong, and all before it is right."""
    if count < 2 or count > MOST * len(got):
        return None
    places = differ.nonzero()[:, 0]
    first = int(places[0])
    values = got[places]
    held = "not right"
    if float(values.max()) == float(values.min()):
        held = "one constant" if bool(values.any()) else "zero"
    if count >= 0.8 * (len(got) - first):
        return "partly written output", f"{count:,} of {len(got):,} elements are {held}, from {_index(first, actual)} on"
    for axis, length in enumerate(actual.shape):
        hit = torch.unravel_index(places, actual.shape)[axis].unique()  # type: ignore[no-untyped-call]
        last = int(hit[-1]) == length - 1 and len(hit) == length - int(hit[0])
        if last and len(hit) <= length // 2 and count >= 0.8 * len(hit) * len(got) / length:
            return "partly written output", f"elements are {held} from {int(hit[0])} of axis {axis} ({length} long) on"
    return None


def _clipped(want: Tensor, got: Tensor, differ: Tensor) -> tuple[str, str] | None:
    """What differs stands at one magnitude, and should be larger."""
    size = got[differ].abs()
    if len(size) < 2 or float(size.max()) != float(size.min()) or not float(size.max()):
        return None
    if bool((want[differ].abs() < size).any()):
        return None
    return "overflow", f"{len(size):,} values stand at ±{float(size.max()):.6g} and should be larger: saturated"


def _few(differ: Tensor, count: int, size: int, actual: Tensor) -> tuple[str, str] | None:
    if count > max(4, size // 1000) or size < 16:
        return None
    first = _index(int(differ.nonzero()[0, 0]), actual)
    return "corrupted elements", f"{count:,} of {size:,} elements differ, the first at {first}"


def _permuted(expected: Tensor, want: Tensor, got: Tensor) -> tuple[str, str] | None:
    """The same values in other places."""
    a, b = want.sort().values, got.sort().values
    scale = float(a.abs().max())
    if not scale or float((a - b).abs().max()) > 1e-3 * scale or float((want - got).abs().max()) < 0.05 * scale:
        return None
    if float((a - b).norm()) > 0.02 * float((want - got).norm()):
        return None
    shape = list(expected.shape)
    for first in range(len(shape)):
        for second in range(first + 1, len(shape)):
            other = expected.transpose(first, second)
            for turned in (other.reshape(-1), other.contiguous().view(-1)):
                if torch.allclose(turned.to(torch.float64), got, rtol=1e-3, atol=1e-3 * scale):
                    return "wrong axis or layout", f"axes {first} and {second} of {shape} are exchanged"
    return "wrong axis or layout", "the same values in other places"


def _scaled(want: Tensor, got: Tensor, off: Tensor) -> tuple[str, str] | None:
    square = float(want @ want)
    total = float(off @ off)
    if not square or not total:
        return None
    factor = float(want @ got) / square
    rest = got - factor * want
    if float(rest @ rest) < FIT * total and factor:
        return "constant factor", f"{factor:.6g} times what it should be"
    shift = float(off.mean())
    rest = off - shift
    if float(rest @ rest) < FIT * total:
        return "wrong constant", f"{shift:+.6g} everywhere"
    return None


def _rounded_values(got: Tensor, row: Row, twin: Row) -> tuple[str, str] | None:
    """All values have fewer digits than the format."""
    unit = _unit(row["dtype"])
    for dtype in (torch.float16, torch.bfloat16):
        if unit < torch.finfo(dtype).eps / 2 and torch.equal(got.to(dtype).to(torch.float64), got) and bool(got.any()):
            return "narrower format", f"every value is one of {str(dtype).removeprefix('torch.')}, in {row['dtype']}"
    return _narrow(row, twin)


def _index(flat: int, tensor: Tensor) -> str:
    if tensor.is_complex():
        flat //= 2
    where = torch.unravel_index(torch.tensor(flat), tensor.shape) if tensor.dim() else ()
    return "[" + ", ".join(str(int(i)) for i in where) + "]"
