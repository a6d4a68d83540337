"""Which reads hand a gradient on: what each would hand on adds up to the recorded gradients.

That is linear: each read does or does not, or multiplies by a number of a backward pass by
hand.
"""

from __future__ import annotations

from collections.abc import (
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from itertools import chain, combinations

import torch
from torch import Tensor

from roundoff.compare.ports.pass_under_autograd import (
    DifferentiatedFlow,
    Edge,
    Scaling,
    gradients_of,
)
from roundoff.compare.ports.port_results import last_result
from roundoff.compare.records.call_arguments import factor_given
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.values.value_flow import Flow

_FORWARD = "forward"
_BACKWARD = "backward"
#: Reads of one parameter of which each choice is tried.
FEW_READS = 6
#: How far shares that are times one another's may be apart: sums of up to millions of
#: products in fp64, each rounded by 2**-53.
PROPORTIONAL = 1e-9
#: The least size that a factor is relative to.
TINY = 1e-300
#: Digits by which sums of factors differ.
_DIGITS = 6
#: Elements of all shares together; of more nothing is found.
MOST_ELEMENTS = 5 * 10**7


def scaled_by_hand(
    found: DifferentiatedFlow, limit: float
) -> Iterator[Mapping[int, Scaling]]:
    """Yield the values whose gradient a backward pass by hand may multiply by a number.

    What its call reads is the gradient of a value of its shape: the last or the first one.
    """
    scaled: list[tuple[Scaling, list[int]]] = []
    end = last_result(found.flow)
    if end is None:
        return
    whole = found.tensors[end.key]
    by_shape: dict[torch.Size, dict[int, Tensor]] = {}
    for row, factor in _factors_by_hand(found.flow):
        gradient = found.flow.step.tensor(row.inputs[0])
        if gradient is None:
            continue
        if gradient.shape not in by_shape:
            values = {
                key: tensor
                for key, tensor in found.tensors.items()
                if tensor.shape == gradient.shape and tensor.requires_grad
            }
            got = gradients_of(whole, values, torch.ones_like(whole))
            by_shape[gradient.shape] = got
        got = by_shape[gradient.shape]
        near = limit * float(gradient.norm())
        keys = [key for key in got if float((got[key] - gradient).norm()) <= near]
        if keys:
            scaled.append((Scaling(factor, row.record), sorted(keys)))
    for place in (-1, 0):
        if scaled:
            yield {keys[place]: scaling for scaling, keys in scaled}


def _factors_by_hand(flow: Flow) -> list[tuple[RecordedRow, float]]:
    """Return the calls that multiply a gradient by a number in a backward pass by hand.

    They were called by none of the user's lines, and no forward call stands beside them.
    """
    rows = flow.step.rows.values()
    forward = {row.line for row in rows if row.phase == _FORWARD}
    by_hand = [row for row in rows if row.line not in forward]
    factors = [(row, _factor(row)) for row in by_hand]
    return [(row, factor) for row, factor in factors if factor is not None]


def _factor(row: RecordedRow) -> float | None:
    """Return the number by which a call of a backward pass by hand multiplies a gradient."""
    if row.phase != _BACKWARD or row.line is None or row.callers:
        return None
    return factor_given(row)


def handing_nothing_on(
    edges: Collection[Edge],
    found: DifferentiatedFlow,
    wanted: Mapping[str, Tensor],
    *,
    together: bool = False,
) -> set[Edge]:
    """Return the reads without which the gradients would be those that were recorded.

    What each hands on to the parameters is known, and each does or does not. With
    ``together`` reads of one value are told apart whose shares are times one another's.
    """
    if _are_too_large(edges, wanted):
        return set()
    shares = {
        edge: found.given(edge[1], found.through[edge])
        for edge in edges
        if edge in found.through
    }
    more = _stacked(found.gradients, wanted) - _stacked(wanted, wanted)
    return _adding_up_to(more, shares, wanted, found.flow, together=together)


def handing_on(
    found: DifferentiatedFlow, wanted: Mapping[str, Tensor], *, together: bool = False
) -> set[Edge]:
    """Return the reads with which the gradients would be those that were recorded.

    Of those that hand nothing on. Of several reads one behind the other that were cut none
    is known by what it hands on alone, as the others cut that too; where all are cut, what
    each of the others adds is known. ``together``: see ``handing_nothing_on``.
    """
    if _are_too_large(found.way.cut, wanted):
        return set()
    shares = {
        edge: found.given(edge[1], found.lost_by_read[edge])
        for edge in found.way.cut
        if edge in found.lost_by_read and found.hands_on(edge[1])
    }
    less = _stacked(wanted, wanted) - _stacked(found.gradients, wanted)
    return _adding_up_to(less, shares, wanted, found.flow, together=together)


def _are_too_large(edges: Collection[Edge], wanted: Mapping[str, Tensor]) -> bool:
    numel = sum(tensor.numel() for tensor in wanted.values())
    return len(edges) * numel > MOST_ELEMENTS


def _adding_up_to(
    whole: Tensor,
    shares: Mapping[Edge, Mapping[str, Tensor]],
    like: Mapping[str, Tensor],
    flow: Flow,
    *,
    together: bool,
) -> set[Edge]:
    """Return the reads whose shares add up to a sum: each does or does not.

    A backward pass by hand may multiply some by another factor than one.
    """
    if not shares:
        return set()
    columns = {edge: _stacked(share, like) for edge, share in shares.items()}
    groups = [{edge: 1.0} for edge in columns]
    if together:
        groups = _proportional(columns)
    matrix = torch.stack([columns[next(iter(group))] for group in groups], 1)
    solution = torch.linalg.lstsq(matrix, whole[:, None], driver="gelsd").solution
    least = _least_factor(flow)
    chosen: set[Edge] = set()
    for group, factor in zip(groups, solution[:, 0].tolist(), strict=True):
        if len(group) > 1:
            chosen |= _nearest_factors(group, factor)
        elif abs(factor) > least / 2:
            chosen |= group.keys()
    # of a parameter with few elements several reads may add up to the same
    by_parameter: dict[int, list[Edge]] = {}
    for edge in shares:
        if not flow.values[edge[1]].is_call:
            by_parameter.setdefault(edge[1], []).append(edge)
    of_values = [columns[edge] for edge in chosen if edge[1] not in by_parameter]
    rest = whole - sum(of_values, torch.zeros_like(whole))
    for edges in by_parameter.values():
        if 1 < len(edges) <= FEW_READS:
            best = _nearest_sum(rest, {edge: columns[edge] for edge in edges})
            chosen = (chosen - {*edges}) | best
    return chosen


def _proportional(columns: Mapping[Edge, Tensor]) -> list[dict[Edge, float]]:
    """Return the reads in groups: those of one value whose shares are times one another's.

    Each with its factor; the first is the largest, and 1. ``x.detach() + c * (x -
    x.detach())`` reads one memory three times, and only together do they say anything.
    """
    by_size = sorted(columns, key=lambda edge: -float(columns[edge].norm()))
    groups: list[dict[Edge, float]] = []
    of_value: dict[int, list[dict[Edge, float]]] = {}
    for edge in by_size:
        alike = of_value.setdefault(edge[1], [])
        for group in alike:
            factor = _times_another(columns[edge], columns[next(iter(group))])
            if factor is not None and len(group) < FEW_READS:
                group[edge] = factor
                break
        else:
            groups.append({edge: 1.0})
            alike.append(groups[-1])
    return groups


def _times_another(column: Tensor, whole: Tensor) -> float | None:
    """Return how many times another share one is; None where it is not, or is zero."""
    factor = float(column @ whole) / max(float(whole @ whole), TINY)
    apart = float((column - factor * whole).norm())
    is_proportional = apart <= PROPORTIONAL * float(column.norm())
    return factor if is_proportional and factor else None


def _nearest_factors(factors: Mapping[Edge, float], whole: float) -> set[Edge]:
    """Return the fewest reads whose factors add up to what is nearest to ``whole``."""
    some = chain.from_iterable(
        combinations(factors, count) for count in range(len(factors) + 1)
    )

    def off(edges: Sequence[Edge]) -> float:
        return round(abs(whole - sum(factors[edge] for edge in edges)), _DIGITS)

    return {*min(some, key=off)}


def _nearest_sum(whole: Tensor, columns: Mapping[Edge, Tensor]) -> set[Edge]:
    """Return the columns whose sum is nearest to ``whole``, where any of them is not zero."""
    places = torch.stack([*columns.values()]).any(0)
    wanted = whole[places]
    parts = {edge: column[places] for edge, column in columns.items()}
    some = chain.from_iterable(
        combinations(parts, count) for count in range(len(parts) + 1)
    )

    def off(edges: Sequence[Edge]) -> float:
        return float((wanted - sum(parts[edge] for edge in edges)).norm())

    return {*min(some, key=off)}


def _least_factor(flow: Flow) -> float:
    return min([1.0, *(abs(factor) for _, factor in _factors_by_hand(flow))])


def _stacked(gradients: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensor:
    parts = [gradients.get(name, torch.zeros_like(t)) for name, t in like.items()]
    return torch.cat([part.reshape(-1).to(torch.float64) for part in parts])
