"""Does a program repeat itself bit for bit, and if not, why?

A value that differs between repeats although all that its operator read is equal is made
by an operator that does not repeat itself. A value that differs before any operator ran
is data, weights or a seed that change from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundoff.check.facts import differing_facts
from roundoff.check.findings import Difference
from roundoff.check.pair import Pair
from roundoff.check.side import Side
from roundoff.compare import (
    GPU,
    OUTSIDE,
    RANDOM,
    REDUCTION,
    UnstableRow,
    not_reproducible,
)
from roundoff.errors import RunError
from roundoff.record import Run

#: Why repeats differ.
UNSEEDED = "unseeded"
NONDETERMINISM = "nondeterminism"
RACE = "race"
_KINDS = {
    OUTSIDE: UNSEEDED,
    RANDOM: UNSEEDED,
    GPU: NONDETERMINISM,
    REDUCTION: NONDETERMINISM,
}
_WORDS = {
    UNSEEDED: "what it reads differs already before any operator ran: data, weights or "
    "random numbers that change from run to run",
    NONDETERMINISM: "the same inputs give another result: an operator that does not "
    "repeat itself",
    RACE: "the same inputs give another result, and the operator is not known for it: a "
    "race, memory that was not written, or state that is no tensor",
}
_ADVICE = {
    UNSEEDED: "seed torch, numpy and Python's random at the start, give the loader a "
    "generator, and read the same files in the same order",
    NONDETERMINISM: "torch.use_deterministic_algorithms(True) chooses kernels that repeat "
    "themselves, or names the operator that has none",
    RACE: "look for threads, asynchronous copies, torch.empty and in-place writes at "
    "this line",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Whether the repeats of a program agree.

    Attributes:
        runs: how many recordings were compared, the first with it.
        steps: how many steps of each.
        agrees: all values of all of them are equal, bit for bit where hashes were kept.
        first: the first value that is not; None where all are.
        kind: ``unseeded``, ``nondeterminism`` or ``race``; None where all agree.
        unstable: how many values differ although what they were computed from does not.
        differences: settings that differ between the repeats: seeds, environment.
        why: what the kind means.
        fix: what to do.
    """

    runs: int
    steps: int
    agrees: bool
    first: UnstableRow | None
    kind: str | None
    unstable: int
    differences: tuple[Difference, ...]
    why: str
    fix: str


def check_baseline(reference: Run, repeats: Sequence[Run]) -> Baseline:
    """Say whether recordings of one unchanged program agree, and why they do not.

    Bit for bit where they were kept with ``keep="hash"`` or ``"tensors"``; otherwise by
    their statistics. Raises ``RunError`` without repeats.
    """
    if not repeats:
        raise RunError(
            "no other recording of the same program",
            where=reference.location,
            expected="at least two",
            do="roundoff check --baseline --repeat 3 -- train.py",
        )
    unstable = not_reproducible("reference", reference, repeats)
    first = unstable[0] if unstable else None
    kind = None if first is None else _KINDS.get(first.note, RACE)
    return Baseline(
        runs=1 + len(repeats),
        steps=len(reference.steps),
        agrees=first is None,
        first=first,
        kind=kind,
        unstable=len(unstable),
        differences=tuple(_settings(reference, repeats)),
        why="" if kind is None else _WORDS[kind],
        fix="" if kind is None else _ADVICE[kind],
    )


def _settings(reference: Run, repeats: Sequence[Run]) -> Sequence[Difference]:
    """Return the settings that differ in the first repeat that has other ones."""
    for number, repeat in enumerate(repeats, 1):
        rank = reference.ranks[0]
        pair = Pair(
            Side(reference, "the first run", rank),
            Side(repeat, f"repeat {number}", rank),
        )
        if pair.reference.set_up is None or pair.candidate.set_up is None:
            continue
        differences = list(differing_facts(pair))
        if differences:
            return differences
    return ()
