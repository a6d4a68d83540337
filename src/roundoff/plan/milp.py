"""Exact 0/1 programs for planning: one column of each group is chosen, and every limit
holds in float64.

HiGHS (Huangfu and Hall, Math. Prog. Comp. 10, 2018), reached through
:func:`scipy.optimize.milp`, works with absolute tolerances of 1e-6 and drops
coefficients below 1e-9, while noise powers span fifteen decades. :func:`minimise`
therefore scales rows and objective to a common size, sums every answer again with
:func:`math.fsum`, and where an answer breaks a limit by rounding, cuts it off with a
cover inequality (Balas, Math. Prog. 8, 1975, eq. 1) and asks again.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

__all__ = ["Limit", "Link", "MilpResult", "Program", "minimise", "total"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Size of a scaled limit and of a scaled objective at the incumbent. Measured on
# instances of 400 groups: from 1e6 on, HiGHS 1.12 has returned "optimal, gap 0" at
# three times the optimum; at 1e3 its absolute gap of 1e-6 is 1e-9 relative.
SCALE = 1e3
FEASIBILITY = 1e-6  # HiGHS: mip_feasibility_tolerance, absolute
COVER_CUTS = 16
ATTEMPTS = 64
INFEASIBLE = 2  # scipy.optimize.milp status


@dataclass(frozen=True)
class Link:
    """An edge column that is 1 when column ``payer`` is chosen and some set in
    ``absorbing`` has no chosen column.
    """

    payer: int
    absorbing: tuple[npt.NDArray[np.int64], ...]


@dataclass(frozen=True)
class Program:
    """Columns are the choices, group by group, followed by one column for each link.

    Attributes:
        groups: shape (choices,), the group of each choice, ascending from 0; exactly
            one choice of a group is 1.
        allowed: shape (choices,), false for a choice that is excluded from the start.
        links: one for each edge column.
    """

    groups: npt.NDArray[np.int64]
    allowed: Bools
    links: tuple[Link, ...] = ()

    def complete(self, chosen: Bools) -> Bools:
        """Extend the choice columns, shape (choices,), by the edge columns they cause:
        shape (choices + links,).
        """
        paid = [
            bool(chosen[link.payer])
            and not all(chosen[columns].any() for columns in link.absorbing)
            for link in self.links
        ]
        return np.concatenate([chosen, np.array(paid, dtype=bool)])


@dataclass(frozen=True)
class Limit:
    """``sum(coefficients[columns]) <= bound``; a coefficient that is not finite, or
    above the bound, forbids a column.
    """

    coefficients: Floats
    bound: float


@dataclass(frozen=True)
class MilpResult:
    """Result of :func:`minimise`: the columns (``None``: nothing found), and a proven
    lower bound of the objective.

    ``complete`` is false if the time ran out or float64 rounding at a limit left the search
    unfinished; then the bound is weaker, or nothing was found although something exists.
    """

    columns: Bools | None
    bound: float
    complete: bool


def total(coefficients: Floats, columns: Bools) -> float:
    """Sum of the coefficients of the chosen columns, correctly rounded; 0 for none,
    ``inf`` if one of them is not finite.
    """
    values = coefficients[columns]
    return math.fsum(values) if np.isfinite(values).all() else math.inf


def minimise(
    program: Program,
    objective: Floats,
    limits: Sequence[Limit] = (),
    *,
    incumbent: Bools | None = None,
    relative_gap: float = 1e-6,
    deadline: float = math.inf,
) -> MilpResult:
    """Choose one column of each group with the least objective among those that meet all limits.

    Args:
        program: groups, exclusions and links.
        objective: shape (choices + links,), non-negative; a value that is not finite
            forbids the column.
        limits: each with coefficients of the same shape, non-negative.
        incumbent: columns that are known to meet the limits, shape (choices + links,),
            or ``None``.
        relative_gap: the search may stop when (objective - bound) / objective is at
            most this.
        deadline: on the clock of :func:`time.monotonic`, seconds.

    Returns:
        The best columns found (at worst the incumbent) and a lower bound. All zero
        objective and no group are fine.
    """
    best = incumbent
    value = math.inf if best is None else total(objective, best)
    finite = objective[np.isfinite(objective)]
    scale = value if best is not None else math.fsum(finite)
    while True:
        if value == 0.0:
            return MilpResult(best, 0.0, True)
        answer = _search(program, objective, scale, limits, relative_gap, deadline)
        if answer.columns is not None:
            reached = total(objective, answer.columns)
            if best is None or reached <= value:
                best = answer.columns
                value = reached
            if answer.complete and value < 0.1 * scale:
                # tolerances were relative to a value far above the optimum: look closer
                scale = value
                continue
        # Columns dearer than the scale were left out, which is right only below it: the
        # bound can't pass the value.
        return MilpResult(best, min(answer.bound, value), answer.complete)


def _search(
    program: Program,
    objective: Floats,
    scale: float,
    limits: Sequence[Limit],
    relative_gap: float,
    deadline: float,
) -> MilpResult:
    """Call HiGHS until its answer meets the limits in float64.

    The bound is ``inf`` if nothing meets them.
    """
    allowed = _allowed(program, [Limit(objective, scale), *limits])
    open_groups = program.groups[allowed[: len(program.groups)]]
    if set(open_groups) != set(program.groups):
        return MilpResult(None, math.inf, True)
    feasible = _Feasible(program, limits, allowed)
    costs = np.where(allowed, objective, 0.0) / (scale or 1.0) * SCALE
    bound = 0.0
    for _ in range(ATTEMPTS):
        left = deadline - time.monotonic()
        if left <= 0:
            return MilpResult(None, bound, False)
        complete = feasible.complete
        result = feasible.minimise(costs, relative_gap, left)
        if complete and result.mip_dual_bound is not None:
            bound = max(bound, float(result.mip_dual_bound) * scale / SCALE)
        if result.status == INFEASIBLE:
            return MilpResult(None, math.inf if complete else bound, complete)
        if result.x is None:
            return MilpResult(None, bound, False)
        columns = feasible.columns(result.x)
        if feasible.admits(columns):
            return MilpResult(columns, bound, complete and result.status == 0)
        feasible.exclude(columns)
    return MilpResult(None, bound, False)


class _Feasible:
    """The feasible set as HiGHS is told it: limits, tightened where rounding broke them, and cuts.

    ``complete`` turns false when plans that meet the limits had to be given up.
    """

    def __init__(
        self, program: Program, limits: Sequence[Limit], allowed: Bools
    ) -> None:
        self.program = program
        self.limits = limits
        self.allowed = allowed
        self.complete = True
        self._tightened = [SCALE] * len(limits)
        self._cuts: list[tuple[Bools, float]] = []

    def minimise(self, costs: Floats, relative_gap: float, seconds: float) -> Any:
        """What ``scipy.optimize.milp`` returns."""
        sizes = [len(self.program.groups), len(self.program.links)]
        rows = _rows(
            self.program, self.allowed, self.limits, self._tightened, self._cuts
        )
        with _stdout_closed():
            return milp(
                costs,
                integrality=np.repeat([1, 0], sizes),
                bounds=Bounds(np.zeros(sum(sizes)), self.allowed.astype(float)),
                constraints=rows,
                options={"mip_rel_gap": relative_gap, "time_limit": min(seconds, 1e9)},
            )

    def columns(self, solution: Floats) -> Bools:
        """The columns that a solution chooses, and the edges they cause."""
        groups = self.program.groups
        return self.program.complete(_largest(groups, solution[: len(groups)]))

    def admits(self, columns: Bools) -> bool:
        """Return True if every limit holds in float64."""
        forbidden = bool((columns & ~self.allowed).any())
        return not forbidden and not self._broken(columns)

    def exclude(self, columns: Bools) -> None:
        """Keep the solver from giving these columns again."""
        broken = self._broken(columns)
        if not broken:
            self._cuts.append(_cover(self.program, columns, None))
        elif len(self._cuts) < COVER_CUTS:
            coefficients = self.limits[broken[0]].coefficients
            self._cuts.append(_cover(self.program, columns, coefficients))
        else:
            # Too many ties at the limit to cut one by one: give up a sliver of the
            # feasible set, and with it the proof.
            self.complete = False
            for at in broken:
                self._tightened[at] -= _sliver(self.limits[at], columns)

    def _broken(self, columns: Bools) -> list[int]:
        return [
            at
            for at, row in enumerate(self.limits)
            if total(row.coefficients, columns) > row.bound
        ]


def _allowed(program: Program, limits: Sequence[Limit]) -> Bools:
    """The columns that no exclusion and no limit forbids by itself."""
    links = np.ones(len(program.links), dtype=bool)
    allowed = np.concatenate([program.allowed, links])
    for row in limits:
        allowed &= np.isfinite(row.coefficients) & (row.coefficients <= row.bound)
    return allowed


def _sliver(limit: Limit, columns: Bools) -> float:
    """How much to tighten a scaled limit so that ``columns`` breaks it for the solver too."""
    excess = total(limit.coefficients, columns) / limit.bound - 1.0
    return 2.0 * max(excess * SCALE, FEASIBILITY)


def _rows(
    program: Program,
    allowed: Bools,
    limits: Sequence[Limit],
    tightened: Sequence[float],
    cuts: Sequence[tuple[Bools, float]],
) -> LinearConstraint:
    """Matrix rows: one choice of each group, links (edge >= payer - absorbing columns),
    limits, cuts.
    """
    choices = len(program.groups)
    entries: list[tuple[int, int, float]] = []
    lower: list[float] = []
    upper: list[float] = []

    def add(
        columns: npt.NDArray[np.int64], values: Floats, least: float, most: float
    ) -> None:
        entries.extend(
            (len(lower), int(c), float(v)) for c, v in zip(columns, values, strict=True)
        )
        lower.append(least)
        upper.append(most)

    for group in range(int(program.groups.max()) + 1):
        columns = np.flatnonzero(program.groups == group)
        add(columns, np.ones(len(columns)), 1.0, 1.0)
    for at, link in enumerate(program.links):
        for absorbing in link.absorbing:
            columns = np.concatenate([[link.payer, choices + at], absorbing])
            # Duplicate entries are summed: a payer that absorbs its own error needs no
            # case of its own.
            add(
                columns,
                np.concatenate([[1.0, -1.0], -np.ones(len(absorbing))]),
                -math.inf,
                0.0,
            )
    for row, most in zip(limits, tightened, strict=True):
        if 0.0 < row.bound < math.inf:
            columns = np.flatnonzero(allowed & (row.coefficients > 0.0))
            add(columns, row.coefficients[columns] / row.bound * SCALE, -math.inf, most)
    for members, most in cuts:
        columns = np.flatnonzero(members)
        add(columns, np.ones(len(columns)), -math.inf, most)
    rows, cols, values = zip(*entries, strict=True)
    matrix = csr_array((values, (rows, cols)), shape=(len(lower), len(allowed)))
    return LinearConstraint(matrix, np.array(lower), np.array(upper))


def _largest(groups: npt.NDArray[np.int64], values: Floats) -> Bools:
    """The column with the largest value in each group: HiGHS returns integers within 1e-6."""
    chosen = np.zeros(len(groups), dtype=bool)
    for group in range(int(groups.max()) + 1):
        columns = np.flatnonzero(groups == group)
        chosen[columns[values[columns].argmax()]] = True
    return chosen


def _cover(
    program: Program, columns: Bools, coefficients: Floats | None
) -> tuple[Bools, float]:
    """Inequality that excludes ``columns``, and with coefficients every answer that is
    no smaller in any term.
    """
    members = columns.copy()
    if coefficients is None:
        members[len(program.groups) :] = False
    else:
        for column in np.flatnonzero(columns[: len(program.groups)]):
            same = program.groups == program.groups[column]
            members[: len(same)] |= same & (
                coefficients[: len(same)] >= coefficients[column]
            )
    most = float(columns[members].sum()) - 1.0
    return members, most


@contextmanager
def _stdout_closed() -> Iterator[None]:
    """Send file descriptor 1 to the null device: HiGHS prints a debugging line there
    even when told to be silent.

    The line ("HighsMipSolverData::transformNewIntegerFeasibleSolution
    tmpSolver.run();", HiGHS.jl issue 312) would break machine-readable output. The C
    library's buffer is flushed before the descriptor is restored.
    """
    if os.name != "posix":
        yield
        return
    try:
        kept = os.dup(1)
    except OSError:  # the process runs without a standard output: nothing to protect
        yield
        return
    flush = ctypes.CDLL(None).fflush
    if sys.stdout is not None:
        sys.stdout.flush()
    flush(None)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
        flush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)
