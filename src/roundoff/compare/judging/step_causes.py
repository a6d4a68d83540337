"""What stands behind the operators: a parameter, the data, an update, the loop.

A cause is listed like an operator, before those that only show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from roundoff.compare.judging.culprits import Culprit
from roundoff.compare.records.recorded_rows import RecordedRow

#: What a cause can be.
DATA = "data"
LOADED = "parameter"
UPDATE = "update"
LOOP = "loop"
OPERATORS = "operators"

#: The labels of causes, each with what to try.
CAUSE_ADVICE = {
    "other data": (
        "feed both the same batches: compare files, preprocessing, sampler, seed and "
        "order"
    ),
    "other draws": "give both generators the same seed, and draw as often before it",
    "other parameter": (
        "compare how the two programs make and load it: keys, layout, order, seed"
    ),
    "missing update": (
        "compare what is given to the optimizer, requires_grad, train() and no_grad(), "
        "and what else moves weights (an average, a target) in the two programs"
    ),
    "extra update": (
        "compare what is given to the optimizer, and what is frozen in the reference"
    ),
    "other order": (
        "compare where the two loops move it: before the optimizer steps, or after"
    ),
    "other state": (
        "compare what the two programs do with the state_dict of the optimizer, and "
        "where they make it"
    ),
    "other gradient": "compare padding_idx, and masks of the parameter",
    "gradient cut": "look for detach(), no_grad() or .data in one of the two programs",
    "missing operator": (
        "the reference computes this; look for the line that the candidate lacks"
    ),
    "extra operator": "look for the line that the reference lacks",
    "other loop": "compare the order of the calls in the two training loops",
    "other setting": "compare this setting of the two programs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Something before or beside the operators that makes the runs differ.

    Attributes:
        kind: ``DATA``, ``LOADED``, ``UPDATE`` or ``LOOP``.
        label: a key of ``CAUSE_ADVICE``.
        evidence: in words, whole: which, how, and where.
        step: the first step that shows it.
        rank: whose.
        phase: the pass that it belongs to; empty before the first.
        at: the candidate's call before which it is listed; -1 before all.
        name: what it is about: a parameter, an input, a step of the loop.
        row: a row of the candidate that shows it.
        twin: that of the reference.
        line: the candidate's source line, where no row has it.
        reference_line: the reference's.
        error: relative, the largest.
        names: of the parameters and buffers that it tells of.
        shown_by: records of the candidate that only show this, in this step.
        decides: what differs from there on is no fault of an operator, as far as
            statistics alone can tell.
    """

    kind: str
    label: str
    evidence: str
    step: int
    rank: int
    phase: str
    name: str
    at: int = -1
    row: RecordedRow | None = None
    twin: RecordedRow | None = None
    line: str | None = None
    reference_line: str | None = None
    error: float | None = None
    names: Sequence[str] = ()
    shown_by: Sequence[int] = field(default=())
    decides: bool = False

    def culprit(self) -> Culprit:
        """Return it as it is listed among the operators."""
        row = self.row
        twin = self.twin
        shown = row or twin
        return Culprit(
            kind=self.kind,
            site=self.name,
            reference_site=None if twin is None else twin.site,
            module="" if shown is None else shown.module,
            operator="" if shown is None else shown.operator,
            phase=self.phase,
            line=self.line or (None if row is None else row.line),
            reference_line=self.reference_line or (None if twin is None else twin.line),
            rank=self.rank,
            step=self.step,
            record=-1 if row is None else row.record,
            call=self.at,
            dtype=None if shown is None else shown.dtype,
            name=self.name,
            error=self.error,
            own_error=self.error or 0.0,
            inputs_error=0.0,
            tolerance=0.0,
            contribution=0.0,
            looks_like=self.label,
            evidence=self.evidence,
            advice=CAUSE_ADVICE[self.label],
            semantic=None,
            kernel_excess=None,
            ranks=[self.rank],
            steps=[self.step],
        )


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return names as a sentence has them, the first few of many.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c", "d", "e"])
    ('a', 'a and b', 'a, b, c and 2 more')
    """
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most:,} more"
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def with_line(text: str, line: str | None) -> str:
    """Return the text, with the source line where it is known.

    >>> with_line("zero_grad", "train.py:7"), with_line("zero_grad", None)
    ('zero_grad (train.py:7)', 'zero_grad')
    """
    return f"{text} ({line})" if line else text
