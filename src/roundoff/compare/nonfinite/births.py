"""Every NaN and Inf of one step of one rank: where it was born, what passed it on, and what silently removed it.

Operators are read in the order in which they ran. One whose inputs are all finite and whose output is not gave
**birth**; one with an input that is not finite, and such an output, is **propagation**; one whose outputs are all
finite although an input isn't is **death**. Values that are not finite before the step starts **arrived** with the
batch or a parameter. An -inf that a mask wrote on purpose is followed apart and marked ``allowed``, as far as -inf is
all it makes: a softmax that turns a row of nothing but -inf into NaN gave birth to that NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from roundoff.formats import LARGEST
from roundoff.ops import base, operators_that, values_read, written_input

Row = Mapping[str, Any]
#: rank, step, record: one tensor value of a run
Key = tuple[int, int, int]

#: What finite masks are made of, in these dtypes or before a cast to them.
LOWEST = frozenset(
    -LARGEST[dtype] for dtype in ("float16", "bfloat16", "float32", "float64")
)
BORN = ("birth", "arrived")


@dataclass(slots=True)
class State:
    """What is known of a record that isn't plainly finite.

    ``bad``: holds NaN or Inf; None where that was not recorded. ``allowed``: "mask", "pattern" or "" (not allowed).
    ``masked``: holds a mask's large negative values. ``origin``: the birth that it comes from.
    """

    bad: bool | None = False
    allowed: str = ""
    masked: bool = False
    origin: Key | None = None


@dataclass
class Memory:
    """What one rank carries from one step into the next: the births behind its parameters, and behind other state."""

    named: dict[str, Key] = field(default_factory=dict)
    state: Key | None = None


def is_bad(row: Row) -> bool | None:
    """Whether there is a NaN or Inf; None where it was not counted."""
    if row["nan"] is None:
        return None
    return bool(row["nan"] or row["posinf"] or row["neginf"])


class Step:
    """One step of one rank, read once; ``events`` are its events in order, ``states`` its records that matter."""

    def __init__(
        self, rows: Sequence[Row], memory: Memory, allow: Callable[[str], bool]
    ) -> None:
        self.rows = {row["record"]: row for row in rows}
        self.states: dict[int, State] = {}
        self.events: list[dict[str, Any]] = []
        self._memory, self._allow = memory, allow
        self._roots: dict[int, int] = {}
        self._writes: dict[int, list[int]] = {}
        self._like: dict[tuple[Any, ...], State] = {}
        ordered = sorted(rows, key=lambda row: row["record"])
        for call, group in groupby(ordered, key=lambda row: row["call"]):
            every = list(group)
            # a tool that records no data flow has rows of inputs instead
            leaves = (
                every if call < 0 else [row for row in every if row["role"] == "input"]
            )
            for row in leaves:
                self._leaf(row)
            if (
                outputs := []
                if call < 0
                else [row for row in every if row["role"] != "input"]
            ):
                self._call(outputs)
        self._remember(ordered)

    def key(self, row: Row) -> Key:
        return row["rank"], row["step"], row["record"]

    def _leaf(self, row: Row) -> None:
        bad = is_bad(row)
        if bad is None:
            self.states[row["record"]] = State(bad=None)
        if row["inputs"]:  # other memory of a tensor that is known
            self._roots[row["record"]] = self._roots.get(
                row["inputs"][0], row["inputs"][0]
            )
        if not bad:
            return
        known = [
            i for i in row["inputs"] or () if i in self.states and self.states[i].bad
        ]
        if known:
            self.states[row["record"]] = self.states[known[0]]
            return
        if (
            row["role"] == "input"
            and (state := self._like.get((row["dtype"], *(row["shape"] or ()))))
            is not None
        ):
            self.states[row["record"]] = (
                state  # the last of this type and shape is the likely one
            )
            return
        carried = self._memory.named.get(row["name"] or "")
        if carried is None and row["name"] is None and row["phase"] == "optimizer":
            carried = self._memory.state
        allowed = "pattern" if self._allow(row["site"]) else ""
        if (
            not allowed
            and not row["nan"]
            and not row["posinf"]
            and row["neginf"] + row["zero"] == row["numel"]
        ):
            allowed = "mask"  # an additive mask: 0 where it lets through
        origin = self.key(row) if carried is None else carried
        self.states[row["record"]] = State(True, allowed, bool(allowed), origin)
        kind = "arrived" if carried is None else "carried"
        self._event(
            row,
            kind,
            allowed,
            None,
            origin,
            "came over from an earlier step" if carried else "",
        )

    def _call(self, outputs: list[Row]) -> None:
        read: dict[int, None] = {}
        bad_output = unknown_output = False
        for row in outputs:
            inputs = values_read(row, len(outputs))
            read.update(dict.fromkeys(inputs))
            bad = is_bad(row)
            unknown_output |= bad is None
            if bad or bad is None:
                bad_output |= bool(bad)
                self._not_finite(row, inputs, bad)
            elif row["min"] in LOWEST:
                self._maybe_masked(row, inputs)
        for row in outputs:
            self._place_in_memory(row, len(outputs))
            if (made := self.states.get(row["record"])) is not None and made.bad:
                self._like[row["dtype"], *(row["shape"] or ())] = made
        first = outputs[0]
        inspected = all(row["dtype"] == "bool" for row in outputs)
        if (
            bad_output
            or unknown_output
            or inspected
            or first["view_of"] is not None
            or base(first["operator"]) in operators_that("take out or ask")
        ):
            return
        killed = [i for i in read if self._bad(i, first["record"])]
        if killed:
            worst = self._worst(killed)
            state = self.states[worst]
            if state.allowed != "empty":  # else it was written piece by piece
                self._event(first, "death", state.allowed, worst, state.origin)

    def _not_finite(self, row: Row, inputs: Sequence[int], bad: bool | None) -> None:
        """An output that isn't finite, or not known to be."""
        if row["view_of"] in self.states and self.states[row["view_of"]].bad:
            self.states[row["record"]] = self.states[
                row["view_of"]
            ]  # the same memory: nothing happened
            return
        found = [i for i in inputs if self._bad(i, row["record"])]
        # memory that was written through another view after it was recorded: it explains, but proves nothing
        found = found or [
            w
            for i in inputs
            for w in self._written(i, row["record"])
            if self._bad(w, row["record"])
        ]
        if bad is None:
            origin = self.states[self._worst(found)].origin if found else None
            self.states[row["record"]] = State(None, origin=origin)
            return
        only_minus = not row["nan"] and not row["posinf"]
        masked = any(i in self.states and self.states[i].masked for i in inputs)
        if found:
            worst = self._worst(found)
            state = self.states[worst]
            self._unallow_empty(state)
            if state.allowed == "mask" and not only_minus:
                self._birth(
                    row, "", worst, f"made of the -inf of a mask ({self.site(worst)})"
                )
                return
            self.states[row["record"]] = State(
                True, state.allowed, masked, state.origin
            )
            if row["view_of"] is None:
                self._event(row, "propagation", state.allowed, worst, state.origin)
        elif only_minus and (masked or self._writes_mask(row, inputs)):
            self._birth(row, "mask", None, "-inf of a mask")
        elif base(row["operator"]) in operators_that("leave memory unwritten"):
            self._birth(row, "empty", None, "memory that nothing was written to yet")
        else:
            unknown = [
                i
                for i in inputs
                if i not in self.rows or self._bad(i, row["record"]) is None
            ]
            note = (
                "inputs without statistics: " + ", ".join(map(self.site, unknown))
                if unknown
                else ""
            )
            earlier = [
                s.origin
                for i in unknown
                if (s := self.states.get(i)) and s.origin is not None
            ]
            if (
                earlier
            ):  # what went in could not be read, but what went into that was not finite
                self.states[row["record"]] = State(True, origin=earlier[0])
                self._event(row, "propagation", "", unknown[0], earlier[0], note)
            else:
                self._birth(row, "", None, note)

    def _birth(self, row: Row, allowed: str, source: int | None, note: str) -> None:
        if self._allow(row["site"]):
            allowed = "pattern"
        self.states[row["record"]] = State(
            True, allowed, allowed == "mask", self.key(row)
        )
        self._event(row, "birth", allowed, source, self.key(row), note)

    def _unallow_empty(self, state: State) -> None:
        """Unwritten memory is nobody's fault until an operator reads it."""
        if state.allowed != "empty":
            return
        state.allowed = ""
        for event in self.events:
            if event["origin"] == state.origin and event["kind"] == "birth":
                event.update(allowed=False, note="unwritten memory was read")

    def _writes_mask(self, row: Row, inputs: Iterable[int]) -> bool:
        operator = base(row["operator"])
        if operator in operators_that("write constants"):
            return True
        if operator != "mul":
            return False
        # a factor within [-1, 1] cannot make a finite one overflow: the -inf is a constant's
        return any(
            i in self.rows
            and self.rows[i]["max"] is not None
            and (
                self.rows[i]["dtype"] == "bool"
                or (self.rows[i]["min"] >= -1 and self.rows[i]["max"] <= 1)
            )
            for i in inputs
        )

    def _maybe_masked(self, row: Row, inputs: Iterable[int]) -> None:
        """A finite mask: the lowest value of the dtype instead of -inf."""
        inherited = any(i in self.states and self.states[i].masked for i in inputs)
        if inherited or self._writes_mask(row, inputs):
            self.states[row["record"]] = State(masked=True)

    def _bad(self, record: int, when: int) -> bool | None:
        """Whether a record is not finite as the call that made ``when`` read it."""
        state = self.states.get(record)
        if state is None or not state.bad:
            return None if state is not None and state.bad is None else False
        size = self.rows[record]["numel"]
        cleaned = (
            self.rows[w]["numel"] >= size and is_bad(self.rows[w]) is False
            for w in self._written(record, when)
        )
        return not any(cleaned)

    def _written(self, record: int, when: int) -> list[int]:
        """In-place writes to the memory of a record after it was recorded and before ``when``."""
        writes = self._writes.get(self._roots.get(record, record), ())
        return [w for w in writes if record < w < when]

    def _place_in_memory(self, row: Row, outputs: int) -> None:
        if row["view_of"] is not None:
            viewed = int(row["view_of"])
            self._roots[row["record"]] = self._roots.get(viewed, viewed)
        if row["inplace"]:
            written = written_input(row, outputs)
            if written is not None:
                root = self._roots.get(written, written)
                self._roots[row["record"]] = root
                self._writes.setdefault(root, []).append(row["record"])

    def _worst(self, records: Sequence[int]) -> int:
        """The record to follow: one that isn't allowed before one that is, then the earliest birth."""
        return min(
            records,
            key=lambda r: (
                self.states[r].allowed != "",
                self.states[r].origin or (0, 0, 0),
            ),
        )

    def _remember(self, ordered: Sequence[Row]) -> None:
        for row in ordered:
            state = self.states.get(row["record"], State())
            origin = state.origin if state.bad and not state.allowed else None
            if row["name"] is not None:
                self._memory.named.pop(row["name"], None)
                if origin is not None:
                    self._memory.named[row["name"]] = origin
            if origin is not None and row["phase"] == "optimizer":
                self._memory.state = origin

    def site(self, record: int) -> str:
        return (
            str(self.rows[record]["site"])
            if record in self.rows
            else f"record {record}"
        )

    def _event(
        self,
        row: Row,
        kind: str,
        allowed: str,
        source: int | None,
        origin: Key | None,
        note: str = "",
    ) -> None:
        columns = (
            "rank",
            "step",
            "record",
            "call",
            "phase",
            "site",
            "operator",
            "line",
            "dtype",
            "numel",
            "group",
            "place",
            "name",
            "nan",
            "posinf",
            "neginf",
        )
        self.events.append(
            {c: row[c] for c in columns}
            | {
                "kind": kind,
                "allowed": bool(allowed),
                "note": note,
                "source": source,
                "origin": origin,
            }
            | {"source_site": None if source is None else self.site(source)}
        )
