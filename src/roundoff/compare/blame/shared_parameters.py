"""Two parameters of the candidate in one memory, where the reference has two that differ.

A loader that gives one tensor to two layers ties them: the forward pass reads the first
one's memory for both, and a step of the optimizer changes it twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.near_leaves import leaves_of
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides


def blamed_shared(sides: Sides, part: Part) -> Blamed | None:
    """Return a parameter that is another one too, in place of one that is lost.

    None where the reference ties the two, or has no lost one of that shape.
    """
    lost = [
        leaf
        for leaf in leaves_of(sides.reference, sorted(part.expected))
        if leaf.key not in sides.agreeing and not leaf.says_nothing
    ]
    tied_in_reference = {leaf.key for _, leaf in _in_one_memory(sides.reference)}
    for name, leaf in _in_one_memory(sides.candidate):
        wanted = [each for each in lost if each.row.shape == leaf.row.shape]
        is_tied = not tied_in_reference.isdisjoint(sides.all_twins(leaf))
        if not wanted or is_tied:
            continue
        names = _in_order_of_updates(sides.candidate, (name, leaf.row.name or ""))
        if _is_read_first(sides, wanted[0], leaf):
            names = names[::-1]
        other, name = names
        words = (
            f"{name} shares its memory with {other}; in the reference "
            f"{wanted[0].row.name} holds other values"
        )
        return Blamed(replace(leaf, row=replace(leaf.row, name=name)), wanted[0], words)
    return None


def is_shared(flow: Flow, leaf: Value) -> bool:
    """Return True for a parameter in whose memory another one is."""
    return any(other.key == leaf.key for _, other in _in_one_memory(flow))


def _in_order_of_updates(flow: Flow, names: Sequence[str]) -> list[str]:
    """Return names in the order in which their parameters are updated, as they are made."""
    updated = [row.name for row in flow.step.rows.values() if row.inplace]
    places = {name: updated.index(name) for name in names if name in updated}
    return sorted(names, key=lambda name: places.get(name, len(updated)))


def _is_read_first(sides: Sides, lost: Value, leaf: Value) -> bool:
    """Return True where the reference reads the lost parameter before what both hold."""
    held = [sides.reference.values[key] for key in sides.all_twins(leaf)]
    return all(lost.order < each.order for each in held)


def _in_one_memory(flow: Flow) -> Iterator[tuple[str, Value]]:
    """Yield the parameters that the forward pass reads as another one, which stands beside.

    They have a gradient of their own, and the optimizer writes over the other one's values.
    """
    by_name = {
        value.row.name: value
        for value in flow.in_order()
        if value.row.name and not value.is_call
    }
    rows = flow.step.rows
    for row in rows.values():
        if row.name not in flow.trained or row.name in by_name or not row.inplace:
            continue
        written = row
        while written.inplace and written.inputs and written.inputs[0] in rows:
            written = rows[written.inputs[0]]
            if written.name in by_name:
                yield row.name or "", by_name[written.name]
                break
