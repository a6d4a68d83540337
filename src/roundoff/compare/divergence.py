"""Where two runs part: for every pair of rows, whether the error was made there or came with the inputs.

A row *diverges* where its distance from the reference is more than rounding explains (its tolerance). A divergent row
whose inputs agree made the error itself; one whose inputs differ may only hand it on, so the call is run again (where
tensors were kept, see ``replayed``) on the inputs it really had. Rows are taken in the order of execution; each hands the
site at fault on to those that read it.

What reads something else than its counterpart does (an operator that was left out, a stale buffer) is found by its
inputs: they agree with *their* counterparts, and not with what the reference reads in this place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roundoff.compare.findings import INHERITED, OWN, Bound, Distance, Finding
from roundoff.compare.replayed import Replayed
from roundoff.ops import base, operators_that, values_read

Row = Mapping[str, Any]

#: Error may grow this much through an operator before it is run again to see (with tensors), or taken for the
#: operator's own (from statistics alone, where a difference of two near values is told from nothing else).
GAIN_REPLAYED, GAIN = 1.25, 32.0
#: Of operators with equal inputs only their own rounding is left: this part of the tolerance.
EQUAL_INPUTS = 0.25
#: A value that is this far off tells nothing any more about what is computed from it.
NOISE = 0.3


@dataclass
class Divergence:
    """One step of both runs. ``counterpart`` is the reference record of a candidate record, ``exact`` those of calls that
    were aligned by name or structure; ``distance(reference record, candidate record)`` measures; ``tolerance(reference
    row, candidate row)`` is what rounding explains; ``replay(reference row, candidate row)`` runs a call again;
    ``slots`` gives the records that two aligned rows read in the same places. ``least`` is the error that a value has where
    statistics differ at all: they average it away; ``apart`` is the distance of two of the candidate's own values."""

    ours: Mapping[int, Row]
    theirs: Mapping[int, Row]
    counterpart: Mapping[int, int]
    exact: frozenset[int]
    distance: Callable[[int, int], Distance]
    tolerance: Callable[[Row, Row], Bound]
    slots: Callable[[Row, Row], Sequence[tuple[int, int]]]
    changed: Callable[[Row, Row], tuple[str, ...]] = lambda _a, _b: ()
    replay: Callable[[Row, Row, bool, bool], Replayed] | None = None
    least: float = 0.0
    carried: Callable[[Row], tuple[float, bool]] = lambda _: (0.0, False)
    apart: Callable[[int, int], Distance] = lambda _a, _b: Distance(None)
    findings: dict[int, Finding] = field(default_factory=dict)

    def run(self) -> dict[int, Finding]:
        """The findings by candidate record, in the order of execution."""
        for record in sorted(self.counterpart):
            self.findings[record] = self._row(record)
        self._heal()
        return self.findings

    def _heal(self) -> None:
        """Gradients of several uses of a value that are added in another order differ in between, and agree again where the
        last of them has come: what is read or inserted there and changes nothing after it is no fault."""
        readers: dict[int, list[int]] = {}
        for row in self.theirs.values():
            for record in row["inputs"] or ():
                readers.setdefault(record, []).append(row["record"])
        gone = {
            r
            for r, f in self.findings.items()
            if f.cause == OWN
            and self.theirs[r]["phase"] == "backward"
            and (f.read is not None or r not in self.exact)
            and self._ends(r, readers)
        }
        for finding in self.findings.values():
            if (
                finding.record in gone
                or finding.cause == INHERITED
                and finding.origin in gone
            ):
                finding.cause = finding.origin = None

    def _ends(self, record: int, readers: Mapping[int, Sequence[int]]) -> bool:
        """Whether every value that is made of this one agrees after some operators as well as their other inputs do."""
        tainted, waiting = {record}, sorted(readers.get(record, ()))
        while waiting:
            reader = waiting.pop(0)
            finding = self.findings.get(reader)
            if finding is not None and finding.error is not None and reader > record:
                fair = [
                    e
                    for r, e in finding.sources
                    if r not in tainted and self.findings[r].cause is None
                ]
                others = max(fair, default=0.0)
                if finding.error <= max(2 * others, EQUAL_INPUTS * finding.tolerance):
                    continue
            if reader not in tainted and reader > record:
                tainted.add(reader)
                waiting = sorted({*waiting, *readers.get(reader, ())})
        return all(r in readers for r in tainted)

    def _row(self, record: int) -> Finding:
        row, twin = self.theirs[record], self.ours[self.counterpart[record]]
        found = self.distance(twin["record"], record)
        bound = self.tolerance(twin, row)
        measured = self.replay is not None and row["call"] >= 0
        tolerance = bound.tolerance if measured else bound.tolerance * bound.condition
        finding = Finding(record, found.error, tolerance=tolerance, gain=bound.gain)
        if (
            found.error is None
            or found.equal
            or base(row["operator"]) in operators_that("leave memory unwritten")
            or opaque(row)
        ):
            finding.own = None if found.error is None else 0.0
            return finding
        read, region = self._read(row, twin)
        finding.region = region
        # a gradient that was there, without a counterpart: of a compiled backward pass, whose calls nobody sees
        sources = (self.theirs[r] for r in region)
        finding.unknown |= any(
            r["phase"] == "backward" and r["call"] < 0 and not r["inputs"]
            for r in sources
        )
        wrong = None
        for ours, theirs in read:
            there = self.distance(ours, theirs)
            if there.error is None or there.equal or there.masked:
                finding.unknown |= not there.equal
                continue
            if self._wrong_input(ours, theirs, there, finding.tolerance):
                wrong = wrong or (ours, theirs)
                continue
            finding.inputs = max(finding.inputs, there.error)
            if theirs in self.findings:
                finding.sources.append((theirs, there.error))
        if not finding.inputs and not finding.unknown and row["inputs"]:
            finding.tolerance *= EQUAL_INPUTS
        finding.own = _difference(found.error, finding.inputs)
        if record in self.exact and row["call"] >= 0:
            finding.arguments = self.changed(twin, row)
        if row["call"] < 0 and not row["inputs"]:
            finding.inputs, finding.carried = self.carried(row)  # from an earlier step
            finding.own = _difference(found.error, finding.inputs)
        if found.error <= 4 * finding.inputs and finding.carried:
            finding.cause = INHERITED if found.error > finding.tolerance else None
        elif wrong is not None and found.error > finding.tolerance:
            self._blame(finding, wrong)
        elif self._suspect(finding, row, found.error):
            self._judge(finding, row, twin)
        if finding.cause is None:
            self._inherit(finding)
        return finding

    def _read(self, row: Row, twin: Row) -> tuple[list[tuple[int, int]], list[int]]:
        """What the row's call read, with what the reference has for it, and the rows without counterpart in between."""
        found: list[tuple[int, int]] = []
        region: list[int] = []
        aligned = (
            self.slots(twin, row)
            if row["record"] in self.exact and row["call"] >= 0
            else ()
        )
        if aligned:
            waiting = []
            for ours, theirs in aligned:
                if theirs in self.counterpart:
                    found.append((ours, theirs))
                else:
                    waiting.append(theirs)
        else:
            waiting = list(
                values_read(row["operator"], row["overload"], row["inputs"])
                if row["call"] >= 0
                else row["inputs"] or ()
            )
        seen: set[int] = set()
        while waiting:
            record = waiting.pop()
            if record in seen or record not in self.theirs:
                continue
            seen.add(record)
            if record in self.counterpart:
                found.append((self.counterpart[record], record))
            else:
                region.append(record)
                waiting += self.theirs[record]["inputs"] or ()
        return found, sorted(region)

    def _wrong_input(
        self, ours: int, theirs: int, there: Distance, tolerance: float
    ) -> bool:
        """Whether the candidate reads a value that is right in itself, and not the one the reference reads here."""
        proper = self.counterpart.get(theirs)
        if (
            proper is None
            or proper == ours
            or there.error is None
            or there.error <= tolerance
        ):
            return False
        itself = self.distance(proper, theirs)
        return itself.error is not None and (
            itself.equal or itself.error * 8 < there.error
        )

    def _blame(self, finding: Finding, wrong: tuple[int, int]) -> None:
        """Something else is read: an operator was left out before it, or it is another tensor."""
        finding.cause, finding.own, finding.origin = OWN, finding.error, finding.record
        finding.read = wrong
        record = wrong[0]
        held = set(self.counterpart.values())
        while record in self.ours and record not in held:
            row = self.ours[record]
            if row["call"] >= 0 and base(row["operator"]) not in operators_that(
                "add no error"
            ):
                finding.missing = record
                return
            if not row["inputs"]:
                break
            record = row["inputs"][0]
        if wrong[0] not in held:
            finding.missing = wrong[0]

    def _suspect(self, finding: Finding, row: Row, error: float) -> bool:
        if finding.arguments:
            return True
        if error <= finding.tolerance / (4 if self.replay else 1):
            return False
        if row["record"] not in self.exact and row["call"] >= 0:
            return True
        if base(row["operator"]) in operators_that("add no error") and math.isfinite(
            error
        ):
            return self._alone(finding)
        if math.isinf(error):
            return not math.isinf(finding.inputs)
        if self.replay is not None:
            return error > GAIN_REPLAYED * finding.inputs + finding.tolerance / 4
        return self._alone(finding) or self._beyond(finding, error)

    def _alone(self, finding: Finding) -> bool:
        """Whether the inputs agree: exactly, where only statistics tell, since those of noise agree nearly."""
        return not finding.unknown and finding.inputs <= (
            finding.tolerance / 8 if self.replay else 0.0
        )

    def _beyond(self, finding: Finding, error: float) -> bool:
        """Whether an error is more than what the inputs bring; of inputs that are all noise nothing can be said."""
        inputs = (
            max(finding.inputs, self.least) if self.replay is None else finding.inputs
        )
        return (
            finding.inputs < NOISE
            and error > GAIN * finding.gain * inputs + finding.tolerance
        )

    def _judge(self, finding: Finding, row: Row, twin: Row) -> None:
        error = finding.error or 0.0
        again = None
        if self.replay is not None and row["call"] >= 0:
            again = finding.replayed = self.replay(
                twin,
                row,
                row["record"] in self.exact,
                not finding.inputs and not finding.unknown,
            )
        if again is not None and again.reason is None:
            finding.own = again.own
            if again.at_fault:
                finding.cause, finding.origin = OWN, finding.record
                return
            if (
                again.region_excess is not None
                or again.semantic is not None
                and not finding.region
            ):
                return  # the same call on the same inputs does give this: what differs came in with them
        alone = self._alone(finding)
        if row["call"] < 0 and not row["inputs"]:
            alone = error > 4 * finding.inputs + finding.tolerance
        if error > finding.tolerance and (
            alone or self._beyond(finding, error) or self._inserted(finding, row, twin)
        ):
            finding.cause, finding.own, finding.origin = OWN, error, finding.record

    def _inserted(self, finding: Finding, row: Row, twin: Row) -> bool:
        """Whether an operator that the reference lacks changes a value which the reference hands on as it is."""
        if row["record"] in self.exact or row["call"] < 0:
            return False
        same = [
            s
            for s, _ in finding.sources
            if self._root(self.counterpart[s]) == self._root(twin["record"])
        ]
        moved = [self.apart(source, row["record"]).error for source in same]
        return any(
            m is not None and m > EQUAL_INPUTS * finding.tolerance for m in moved
        )

    def _root(self, record: int) -> int:
        row = self.ours[record]
        while (
            base(row["operator"]) in operators_that("hand on in order")
            and len(row["inputs"] or ()) == 1
            and row["inputs"][0] in self.ours
        ):
            row = self.ours[row["inputs"][0]]
        return int(row["record"])

    def _inherit(self, finding: Finding) -> None:
        """The fault that the largest divergent input comes from."""
        origins = [
            (error, self.findings[record].origin)
            for record, error in finding.sources
            if self.findings[record].cause is not None
        ]
        if origins and finding.error is not None and finding.error > finding.tolerance:
            finding.cause = INHERITED
            finding.origin = max(origins, key=lambda o: o[0])[1]


def opaque(row: Row) -> bool:
    """Whether this is memory that a kernel leaves for its backward kernel, bytes without a meaning of their own."""
    return (
        row["dtype"] == "uint8"
        and row["place"] > 0
        and row["operator"] in operators_that("return a workspace")
    )


def _difference(error: float, inputs: float) -> float:
    """What of an error cannot have come in, where errors add like independent ones: sqrt(error^2 - inputs^2)."""
    if math.isinf(error):
        return 0.0 if math.isinf(inputs) else math.inf
    return (
        math.sqrt(max(0.0, error * error - inputs * inputs))
        if math.isfinite(inputs)
        else 0.0
    )
