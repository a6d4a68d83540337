"""Every value of a step in portions: which piece of which value of the reference it is."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roundoff.compare.judging.divergence import UNWRITTEN, is_workspace
from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.pairing.call_pairs import TRANSPARENT
from roundoff.compare.portions.accumulated_rounding import (
    accumulated_rounding,
    explained,
)
from roundoff.compare.portions.location import (
    Location,
    extremes,
    is_inside,
    locate,
    multiple,
)
from roundoff.compare.records.recorded_rows import RecordedRow, Rows, last_named
from roundoff.compare.records.value_sketch import in_reals
from roundoff.compare.rounding.rounding_bound import condition, unit
from roundoff.ops import operators_that

#: Values of the reference that a piece is looked for in, at most.
MOST_TWINS = 48
#: After so many values that are made of data this share of them should have been found: of
#: the same work in other portions nearly all are, up to a fault; of other data a few are by
#: chance, such as zeros that a state begins with.
ENOUGH = 256
FEWEST_FOUND = 0.02
#: Factors of gradients, at most: how many times the mean of a part weighs that of all.
MOST_FACTORS = 6
#: Put values that stand elsewhere side by side.
_MOVED = operators_that("move values")
_JOINED = operators_that("join")
#: A value whose rounding is this large a share of it says nothing.
NOISE = 0.1

#: Rank and record.
Place = tuple[int, int]


#: A factor this near another one is that one.
_NEAR = 1e-3


@dataclass(slots=True)
class Piece:
    """A value of the candidate, and what it is of the reference.

    Attributes:
        rank: of the candidate.
        row: the value.
        twin: the reference's value that it is a piece of; None without any.
        location: where it stands there; None for a term of a sum.
        term_of: the sum of these pieces over the ranks is this many times the twin.
        tolerance: largest relative distance that rounding explains.
        noise: rounding is as large as the value, so that it says nothing.
    """

    rank: int
    row: RecordedRow
    twin: RecordedRow | None = None
    location: Location | None = None
    term_of: float | None = None
    tolerance: float = 0.0
    noise: bool = False

    @property
    def place(self) -> Place:
        return self.rank, self.row.record

    @property
    def stands(self) -> bool:
        """True where it is a piece of the reference, a term of a sum, or noise."""
        return self.noise or self.location is not None or self.term_of is not None


@dataclass
class StepPieces:
    """One step of the reference, and of all ranks of the candidate.

    Attributes:
        reference: with its tensors.
        candidates: by rank, with their tensors.
        rename: from a module of the reference to its name in the candidate.
        noisy: names whose values are rounding alone; added to, for later steps.
        noisy_elements: which elements of a parameter are; added to likewise.
        before: how far the steps before have rounded the reference's values, by name.
        rounding: the same of its values in this step, by record.
        pieces: the candidate's values by rank and record, once ``find`` has run.
        covered: by record of the reference, which of its elements pieces have.
    """

    reference: RecordedStep
    candidates: Mapping[int, RecordedStep]
    rename: Callable[[str], str]
    noisy: set[str] = field(default_factory=set)
    noisy_elements: dict[str, Tensor] = field(default_factory=dict)
    before: Mapping[str, float] = field(default_factory=dict)
    rounding: dict[int, float] = field(init=False)
    #: Records of the reference whose values are rounding alone.
    noise: set[int] = field(init=False)
    pieces: dict[Place, Piece] = field(default_factory=dict)
    covered: dict[int, Tensor] = field(default_factory=dict)
    _by_module: dict[tuple[str, str], list[RecordedRow]] = field(default_factory=dict)
    _views: dict[tuple[str, str], list[RecordedRow]] = field(default_factory=dict)
    _factors: Counter[float] = field(default_factory=Counter)
    _extremes: dict[int, tuple[float, float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rounding = accumulated_rounding(self.reference.rows, self.before)
        self.noise = self._noise()

    def _noise(self) -> set[int]:
        """Return the values that are rounding alone, and what is made of nothing else."""
        rows = self.reference.rows
        noise: set[int] = set()
        for record, row in rows.items():
            if not row.is_call or not unit(row.dtype):
                continue
            read = [rows[r] for r in row.values_read() if r in rows]
            numbers = [r.record for r in read if unit(r.dtype) and r.l2 != 0]
            is_of_noise = bool(numbers) and noise.issuperset(numbers)
            if row.base_operator == "mul":  # by what clips it, or a moment's decay
                is_of_noise = not noise.isdisjoint(numbers)
            is_cancelled = row.phase != "optimizer" and self.allowed(row) > NOISE
            if is_of_noise or is_cancelled:
                noise.add(record)
        return noise

    def find(self) -> None:
        """Find every value of the candidate in the reference."""
        groups = defaultdict(list)
        views = defaultdict(list)
        for row in self.reference.rows.values():
            at = (_kind_of_phase(row), self.rename(row.module))
            if is_value(self.reference, row) and row.is_call:
                groups[at].append(row)
            elif row.is_call and row.view_of is not None:
                views[at].append(row)
        self._by_module = dict(groups)
        self._views = dict(views)
        for rank, step in self.candidates.items():
            self._find_all(rank, step)
            if len(self.candidates) == 1:
                self._find_gradients(rank, step)
        self._find_terms()

    def _find_all(self, rank: int, step: RecordedStep) -> None:
        """Find the values of a rank, unless hardly one of the first that are made of data
        stands in the reference: then the work is another."""
        of_data = _made_of_data(step.rows)
        looked_for = found = 0
        for row in step.rows.values():
            if not is_value(step, row):
                continue
            if looked_for >= ENOUGH and found < FEWEST_FOUND * looked_for:
                piece = Piece(rank, row)
                self.pieces[piece.place] = piece
                continue
            self._find_piece(rank, step, row)
            if row.record in of_data and unit(row.dtype):
                looked_for += 1
                found += self.pieces[rank, row.record].location is not None

    def _find_gradients(self, rank: int, step: RecordedStep) -> None:
        """Find what a step leaves in gradients: autograd leaves views of what a call made.

        Of several ranks each leaves a term of a sum.
        """
        for name, row in last_values(step).items():
            is_kept = step.tensors is not None and row.record in step.tensors
            is_found = (rank, row.record) in self.pieces
            if name.endswith(".grad") and is_kept and not is_found:
                self._find_piece(rank, step, row)

    def allowed(self, twin: RecordedRow) -> float:
        """Return the relative distance that rounding explains at a reference's value."""
        rows = self.reference.rows
        maker = twin
        while hands_on(maker) and maker.inputs[0] in rows:
            maker = rows[maker.inputs[0]]
        inputs = [rows[record] for record in maker.inputs if record in rows]
        rounding = explained(self.rounding[twin.record], twin.dtype)
        return rounding * condition(maker, inputs)

    def _find_piece(self, rank: int, step: RecordedStep, row: RecordedRow) -> None:
        piece = Piece(rank, row)
        self.pieces[piece.place] = piece
        tensor = values_of(step, row)
        if tensor is None:
            return
        twins = self.twins_of(row, piece) if row.is_call else self._named_leaf(row)
        for number, twin in enumerate(twins):
            if self._stands_in(piece, tensor, twin):
                if piece.location is not None and not piece.location.complete:
                    self._cover_others(piece, tensor, twins[number + 1 :])
                return

    def _cover_others(
        self, piece: Piece, tensor: Tensor, twins: Sequence[RecordedRow]
    ) -> None:
        """Note which values of the same call a piece has beside the first: it may be
        several of them in one."""
        for twin in twins:
            whole = self.reference.tensor(twin.record)
            if whole is None or not _is_same_kind(twin, piece.row):
                continue
            location = locate(whole, tensor, self.allowed(twin))
            if location is not None:
                covered = self.covered.get(twin.record)
                self.covered[twin.record] = (
                    location.covered if covered is None else covered | location.covered
                )

    def _named_leaf(self, row: RecordedRow) -> list[RecordedRow]:
        return [
            twin
            for twin in self.reference.rows.values()
            if not twin.is_call and twin.name and self.rename(twin.name) == row.name
        ]

    def twins_of(
        self, row: RecordedRow, piece: Piece | None = None
    ) -> list[RecordedRow]:
        """Return the values of the reference to look in, the likeliest first.

        What ranks exchange stands where that which they send does.
        """
        phases = [_kind_of_phase(row)]
        sent: list[RecordedRow] = []
        is_moved = row.base_operator in _MOVED
        if piece is not None and (row.phase == "collective" or is_moved):
            read = self.read_by(piece)
            sent = [source.twin for source in read if source.twin is not None]
        if row.phase == "collective":
            phases = ["forward", "backward"]
            read = [] if piece is None else self.read_by(piece)
            modules = {source.row.module for source in read} - {row.module}
            for module in sorted(modules):
                sent += [
                    t for p in phases for t in self._by_module.get((p, module), ())
                ]
        twins = [t for p in phases for t in self._by_module.get((p, row.module), ())]
        if row.base_operator in _MOVED:
            # a cache puts together what the reference has as a view
            twins += [t for p in phases for t in self._views.get((p, row.module), ())]
        likeliest_first = sorted(
            twins,
            key=lambda twin: (
                twin.base_operator != row.base_operator,
                row.base_operator in _MOVED and twin.view_of is None,
                twin.view_of is not None and twin.shape != row.shape,
                twin.place != row.place,
                twin.index != row.index,
            ),
        )
        return [*sent, *likeliest_first][:MOST_TWINS]

    def _stands_in(self, piece: Piece, tensor: Tensor, twin: RecordedRow) -> bool:
        whole = self.reference.tensor(twin.record)
        if whole is None or _is_number(whole) != _is_number(tensor):
            return False
        backward = piece.row.phase != "forward"
        factors = [1.0, *self._usual_factors()] if backward else [1.0]
        tolerance = self.allowed(twin)
        if tolerance > NOISE or twin.record in self.noise:
            piece.noise |= _is_same_kind(twin, piece.row)
            return False
        if not any(self._may_hold(whole, twin, tensor, tolerance, f) for f in factors):
            return False
        location = None
        for form in _local_forms(tensor, piece.row):
            location = locate(
                whole, form, tolerance, factors, reordered=not _is_parameter(piece.row)
            )
            if location is not None:
                break
        if location is None or not self._is_as_complete(piece, location):
            return False
        piece.twin = twin
        piece.location = location
        piece.tolerance = tolerance
        piece.noise = False
        covered = self.covered.get(twin.record)
        self.covered[twin.record] = (
            location.covered if covered is None else covered | location.covered
        )
        self._count_factor(whole, tensor)
        return True

    def _may_hold(
        self,
        whole: Tensor,
        twin: RecordedRow,
        tensor: Tensor,
        tolerance: float,
        factor: float,
    ) -> bool:
        """Return False where the extremes say that a tensor is not a part of a whole one.

        Quickly: of thousands of values each is looked for in dozens of others.
        """
        if not is_inside(whole, tensor):
            return True
        if twin.record not in self._extremes:
            self._extremes[twin.record] = extremes(whole)
        least, most, size = self._extremes[twin.record]
        low, high, _ = extremes(tensor)
        ends = sorted((least * factor, most * factor))
        # no element is further off than all of them together may be
        slack = 2 * tolerance * size * abs(factor)
        if not math.isfinite(slack + low + high):
            return True
        if whole.numel() == tensor.numel():
            return abs(ends[0] - low) <= slack and abs(ends[1] - high) <= slack
        return ends[0] - slack <= low and high <= ends[1] + slack

    def _is_as_complete(self, piece: Piece, location: Location) -> bool:
        """Return True unless all that a value reads stands wholly in the reference, and it
        does not: then the rest is no padding. Nor is it where values are joined of which
        one stands nowhere."""
        if location.complete:
            return True
        read = self.read_by(piece)
        computed = [each for each in read if each.row.is_call]
        numbers = [each for each in computed if unit(each.row.dtype)]
        if piece.row.base_operator in _JOINED and not all(p.stands for p in numbers):
            return False
        return not computed or not all(
            each.location is not None and each.location.complete for each in computed
        )

    def read_by(self, piece: Piece) -> list[Piece]:
        """Return the values that a value reads, behind views and copies."""
        rows = self.candidates[piece.rank].rows
        waiting = list(piece.row.values_read())
        visited: set[int] = set()
        read = []
        while waiting:
            record = waiting.pop()
            if record in visited or record not in rows:
                continue
            visited.add(record)
            source = self.pieces.get((piece.rank, record))
            if source is not None:
                read.append(source)
            else:
                waiting += rows[record].inputs
        return read

    def _count_factor(self, whole: Tensor, piece: Tensor) -> None:
        """Note how many times more rows the whole has: the mean over all of them weighs one
        as much less."""
        if not whole.ndim or not piece.ndim or len(piece) >= len(whole):
            return
        if whole.shape[1:] == piece.shape[1:]:
            self._factors[len(whole) / len(piece)] += 1

    def _usual_factors(self) -> list[float]:
        return [factor for factor, _ in self._factors.most_common(MOST_FACTORS)]

    def _find_terms(self) -> None:
        """Find sums over ranks and portions: values that stand nowhere alone, but together
        do."""
        for pieces in self._same_operator().values():
            over_portions: dict[int, list[Piece]] = defaultdict(list)
            over_ranks: dict[int, list[Piece]] = defaultdict(list)
            usual = self._calls_in_reference(pieces[0].row)
            numbers: Counter[int] = Counter()
            for piece in pieces:
                over_portions[numbers[piece.rank] % usual].append(piece)
                over_ranks[piece.row.index].append(piece)
                numbers[piece.rank] += 1
            for group in (*over_portions.values(), *over_ranks.values()):
                if len(group) > 1 and not any(piece.stands for piece in group):
                    self._find_sum(group)

    def _same_operator(self) -> dict[tuple[object, ...], list[Piece]]:
        """Return the results of each operator of a module, in the order of execution."""
        groups: dict[tuple[object, ...], list[Piece]] = defaultdict(list)
        for piece in self.pieces.values():
            row = piece.row
            if row.is_call and _is_float(row):
                groups[row.phase, row.module, row.operator, row.place].append(piece)
        return groups

    def _calls_in_reference(self, row: RecordedRow) -> int:
        """Return how often the reference calls an operator in a module; at least 1."""
        twins = self._by_module.get((_kind_of_phase(row), row.module), ())
        same = [t for t in twins if (t.operator, t.place) == (row.operator, row.place)]
        return max(1, len(same))

    def _sum(self, group: Sequence[Piece]) -> Tensor | None:
        """Return the sum of pieces of one shape in fp64, in reals; None for others."""
        tensors = [values_of(self.candidates[p.rank], p.row) for p in group]
        kept = [in_reals(t).to(torch.float64) for t in tensors if t is not None]
        if len(kept) < len(group) or len({tensor.shape for tensor in kept}) > 1:
            return None
        return torch.stack(kept).sum(0)

    def _find_sum(self, group: Sequence[Piece]) -> None:
        total = self._sum(group)
        if total is None:
            return
        for twin in self.twins_of(group[0].row):
            whole = self.reference.tensor(twin.record)
            whole = None if whole is None else in_reals(whole)
            if whole is None or whole.shape != total.shape or not _is_number(whole):
                continue
            factor = multiple(whole, total, self.allowed(twin))
            if factor is not None and _says_something(whole, factor, len(group)):
                for piece in group:
                    piece.twin = twin
                    piece.term_of = factor
                return


def _says_something(whole: Tensor, factor: float, terms: int) -> bool:
    """Return False for a number that is any multiple of a sum, but that or a mean of it."""
    usual = (1.0, float(terms), 1.0 / terms)
    return whole.numel() > 1 or any(abs(factor / f - 1) <= _NEAR for f in usual)


def _made_of_data(rows: Rows) -> set[int]:
    """Return the records of the calls that read inputs of the step, or what is made of them."""
    of_data: set[int] = set()
    for row in rows.values():
        is_input = not row.is_call and not row.name
        if is_input or not of_data.isdisjoint(row.inputs):
            of_data.add(row.record)
    return of_data


def is_value(step: RecordedStep, row: RecordedRow) -> bool:
    """Return True for values to look at: no views or copies, and no memory unwritten."""
    if not row.numel or step.tensors is None or row.record not in step.tensors:
        return False
    if not row.is_call:
        return bool(row.name)
    is_view = row.view_of is not None and not row.inplace
    if is_view or (hands_on(row) and not row.name):
        return False
    if row.base_operator in UNWRITTEN or is_workspace(row):
        return False
    return not _is_copied_storage(step.rows, row)


def _is_copied_storage(rows: Rows, row: RecordedRow) -> bool:
    """Return True for the bytes of a storage that was copied whole."""
    read = row.values_read()
    is_copy = row.base_operator == "copy" and bool(read)
    return is_copy and all(is_workspace(rows[record]) for record in read)


def hands_on(row: RecordedRow) -> bool:
    """Return True for a view, a copy, and the mark of a gradient."""
    only_names = row.operator in TRANSPARENT or row.operator == "gradient"
    return row.is_call and only_names and len(row.inputs) == 1


def values_of(step: RecordedStep, row: RecordedRow) -> Tensor | None:
    """Return the tensor of a row; of a distributed one the elements that are here, flat."""
    return step.tensor(row.record)


def _local_forms(tensor: Tensor, row: RecordedRow) -> list[Tensor]:
    """Return the tensor; of a shard, of which only the elements are known, in each shape."""
    shape = list(row.shape or ())
    if list(tensor.shape) == shape or not shape or not tensor.numel():
        return [tensor]
    whole = 1
    for size in shape:
        whole *= size
    parts, rest = divmod(whole, tensor.numel())
    if rest:
        return [tensor]
    flat = tensor.reshape(-1)
    return [
        flat.view(*shape[:axis], size // parts, *shape[axis + 1 :])
        for axis, size in enumerate(shape)
        if size % parts == 0
    ] or [tensor]


def last_values(step: RecordedStep) -> dict[str, RecordedRow]:
    """Return what a step leaves in parameters, buffers and gradients, by name."""
    return last_named(step.rows)


def _is_same_kind(twin: RecordedRow, row: RecordedRow) -> bool:
    """Return True for the same operator; of an optimizer for the same parameter."""
    if (twin.base_operator, twin.place) != (row.base_operator, row.place):
        return False
    return row.phase != "optimizer" or twin.index == row.index


def _is_parameter(row: RecordedRow) -> bool:
    """Return True for a parameter or buffer: its rows have their places."""
    if not row.is_call:
        return True
    name = row.name or ".grad"
    return row.phase == "forward" and not name.endswith(".grad")


def _kind_of_phase(row: RecordedRow) -> str:
    return "forward" if row.recomputed else row.phase


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_float(row: RecordedRow) -> bool:
    return bool(unit(row.dtype))
