"""Decisions and edges, and the multiple-choice knapsack they make.

The multiple-choice knapsack problem (Sinha and Zoltners, Operations Research 27, 1979;
Kellerer, Pferschy and Pisinger, *Knapsack Problems*, 2004, chapter 11) picks one choice
of each class, here one format of each site. Noise powers add (independent roundings),
so the noise row is linear. Absorption makes it a little more: rounding an operand that
already is representable in the consumer's format costs nothing, which takes one
continuous column for each edge,
``paid >= consumer in format - producer in an absorbing format``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roundoff.errors import PlanError
from roundoff.plan.milp import Bools, Floats, Link, Program

__all__ = ["Choice", "Decision", "Edge", "Knapsack", "Noise", "at_each_output"]

#: A noise power, or one for each output.
Noise = float | tuple[float, ...]


@dataclass(frozen=True)
class Choice:
    """One format a decision may take.

    Attributes:
        format: name of the format.
        noise: noise power this choice adds to the output relative to the signal's, 1,
            or to each of several outputs; not finite = forbidden (overflow).
        cost: finite and at least 0, in the cost model's unit.
    """

    format: str
    noise: Noise
    cost: float

    @property
    def worst(self) -> float:
        """The noise at the output that has most of it."""
        return max(at_each_output(self.noise))


@dataclass(frozen=True)
class Decision:
    """A site, or a group of sites that must share a format. ``pinned`` allows only that format."""

    name: str
    choices: tuple[Choice, ...]
    pinned: str | None = None


@dataclass(frozen=True)
class Edge:
    """Rounding one operand of ``consumer`` to ``format`` costs ``noise``, a number or
    one for each output, unless its values fit already.

    They fit if every producer takes a format in ``absorbed_by``. An edge without
    producers (an input of the model) is always paid. Noise that is not finite
    (overflow) lets the consumer take ``format`` only where the operand is absorbed. An
    edge whose consumer doesn't offer ``format`` has no effect.
    """

    consumer: str
    producers: tuple[str, ...]
    format: str
    noise: Noise
    absorbed_by: frozenset[str]


@dataclass(frozen=True)
class Knapsack:
    """Decisions and edges as columns: all choices in order, then the edges that may
    have to be paid. ``noises`` has one row for each output.
    """

    decisions: tuple[Decision, ...]
    program: Program
    noises: tuple[Floats, ...]
    cost: Floats

    @classmethod
    def build(
        cls, decisions: tuple[Decision, ...], edges: tuple[Edge, ...]
    ) -> Knapsack:
        column: dict[str, dict[str, int]] = {}
        groups: list[int] = []
        allowed: list[bool] = []
        noise: list[tuple[float, ...]] = []
        cost: list[float] = []
        for group, decision in enumerate(decisions):
            _check_decision(decision, earlier=column)
            offered = column[decision.name] = {}
            for choice in decision.choices:
                offered[choice.format] = len(groups)
                groups.append(group)
                allowed.append(decision.pinned in (None, choice.format))
                noise.append(at_each_output(choice.noise))
                cost.append(choice.cost)
        links: list[Link] = []
        for edge in edges:
            _check_edge(edge, column)
            payer = column[edge.consumer].get(edge.format)
            if payer is None or not any(at_each_output(edge.noise)):
                continue
            links.append(Link(payer, _absorbing(edge, column)))
            noise.append(at_each_output(edge.noise))
        program = Program(
            np.array(groups, dtype=np.int64),
            np.array(allowed, dtype=bool),
            tuple(links),
        )
        cost_with_edges = np.concatenate([np.array(cost), np.zeros(len(links))])
        return cls(decisions, program, _rows(noise), cost_with_edges)

    def formats(self, columns: Bools) -> dict[str, str]:
        names = [
            (decision.name, choice.format)
            for decision in self.decisions
            for choice in decision.choices
        ]
        return {
            name: fmt
            for (name, fmt), taken in zip(names, columns[: len(names)], strict=True)
            if taken
        }


def at_each_output(noise: Noise) -> tuple[float, ...]:
    """Return the noise at each output; one number is that of the only output."""
    return noise if isinstance(noise, tuple) else (noise,)


def _rows(noise: Sequence[tuple[float, ...]]) -> tuple[Floats, ...]:
    """Return a row of columns for each output, with infinity for what is forbidden."""
    outputs = {len(column) for column in noise}
    if len(outputs) > 1:
        raise PlanError(
            "choices have noise at different numbers of outputs",
            expected="as many in each choice and edge",
            got=", ".join(map(str, sorted(outputs))),
        )
    shape = len(noise), max(outputs, default=1)
    table = np.array(noise, dtype=np.float64).reshape(shape)
    table[~np.isfinite(table)] = math.inf
    return tuple(np.ascontiguousarray(row) for row in table.T)


def _absorbing(
    edge: Edge, column: dict[str, dict[str, int]]
) -> tuple[npt.NDArray[np.int64], ...]:
    """For each producer the columns that absorb the edge.

    No producer: one empty set, from which nothing can be chosen, so the edge is always
    paid.
    """
    sets = []
    for producer in dict.fromkeys(edge.producers):
        offered = column[producer]
        sets.append([at for fmt, at in offered.items() if fmt in edge.absorbed_by])
    return tuple(np.array(columns, dtype=np.int64) for columns in sets or [[]])


def _check_edge(edge: Edge, column: dict[str, dict[str, int]]) -> None:
    for name in (edge.consumer, *edge.producers):
        if name not in column:
            raise PlanError(
                "an edge names no decision",
                where=edge.consumer,
                got=name,
                expected="a consumer and producers among the decisions",
            )
    if min(at_each_output(edge.noise)) < 0.0:
        raise PlanError(
            "negative noise", where=f"edge to {edge.consumer}", got=str(edge.noise)
        )


def _check_decision(decision: Decision, earlier: dict[str, dict[str, int]]) -> None:
    formats = [choice.format for choice in decision.choices]
    if decision.name in earlier:
        raise PlanError("two decisions have one name", where=decision.name)
    if not formats or len(set(formats)) < len(formats):
        raise PlanError(
            "bad choices",
            where=decision.name,
            expected="each format once, at least one",
            got=", ".join(formats) or "none",
        )
    if decision.pinned is not None and decision.pinned not in formats:
        raise PlanError(
            "pinned to a format that is not offered",
            where=decision.name,
            expected=", ".join(formats),
            got=decision.pinned,
            do="offer the format, or pin another",
        )
    for choice in decision.choices:
        _check_choice(choice, f"{decision.name} in {choice.format}")


def _check_choice(choice: Choice, where: str) -> None:
    if not (math.isfinite(choice.cost) and choice.cost >= 0.0):
        raise PlanError(
            "bad cost",
            where=where,
            expected="a finite number of at least 0",
            got=str(choice.cost),
        )
    if min(at_each_output(choice.noise)) < 0.0:
        raise PlanError("negative noise", where=where, got=str(choice.noise))
