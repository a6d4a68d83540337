"""What a check says: differences, what agrees, what was not recorded, the losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: The difference changes what is computed: another training.
CHANGES = "changes the training"
#: The difference changes how numbers are rounded, or whether they repeat.
ROUNDING = "changes rounding"
#: The difference changes no number by itself.
NOTE = "note"
SEVERITIES = (CHANGES, ROUNDING, NOTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One setting that two programs have otherwise.

    Attributes:
        group: of the checklist: ``data``, ``hyper-parameters`` ...
        name: of the setting: ``learning rate``.
        severity: one of ``SEVERITIES``.
        text: the difference in words, with both values.
        reference: its value there.
        candidate: its value there.
        why: what it does to numbers.
        fix: what to do.
        may_follow: names of settings, a difference of which explains this one; ``*``
            for all.
        follows: the name of another difference that explains this one; None where none
            does.
        step: the first step of it.
        ranks: which have it.
        line: the candidate's source line, where one is known.
        reference_line: the reference's.
    """

    group: str
    name: str
    severity: str
    text: str
    reference: str
    candidate: str
    why: str
    fix: str
    may_follow: Sequence[str] = ()
    follows: str | None = None
    step: int | None = None
    ranks: Sequence[int] = (0,)
    line: str | None = None
    reference_line: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """A group of the checklist in which nothing differs, and what was compared in it."""

    group: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRecorded:
    """A group of the checklist that could not be compared, and why."""

    group: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurves:
    """The losses of both programs, step by step.

    Attributes:
        steps: how many steps both have.
        differs: they differ by more than repeats or rounding explain.
        first: the first step that does; None where none does.
        reference: the loss of that step, or of the last one.
        candidate: the same.
        difference: relative, at that step.
        allowed: what was allowed there, relative.
        bound: ``repeats`` or ``derived``.
        text: the same in words.
    """

    steps: int
    differs: bool
    first: int | None
    reference: float
    candidate: float
    difference: float
    allowed: float
    bound: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What :func:`roundoff.check` says of two programs.

    Attributes:
        reference: the first, as it was given.
        candidate: the second.
        differences: the most important first; what follows from another one comes last.
        agreements: a line for each group in which nothing differs.
        missing: a line for each group that could not be compared.
        losses: None where they were not recorded.
        remarks: what is worth knowing and no difference of a setting.
    """

    reference: str
    candidate: str
    differences: tuple[Difference, ...]
    agreements: tuple[Agreement, ...]
    missing: tuple[NotRecorded, ...]
    losses: LossCurves | None
    remarks: tuple[str, ...] = ()

    @property
    def changing(self) -> tuple[Difference, ...]:
        """The differences that change numbers."""
        return tuple(d for d in self.differences if d.severity != NOTE)

    @property
    def comparable(self) -> bool | None:
        """True where nothing that changes numbers differs, None where that is open."""
        losses_differ = self.losses is not None and self.losses.differs
        if self.changing or losses_differ:
            return False
        return None if self.missing else True

    @property
    def verdict(self) -> str:
        """``comparable``, ``differ`` or ``undecided``."""
        return {True: "comparable", False: "differ", None: "undecided"}[self.comparable]
