"""Small edits of a call: what a port's author may have meant.

Another constant, another axis, another operator of the same kind, another input, another
order of axes, the call left out, or one more call. They are made of the call itself and
of what the reference does; each keeps to the call's own inputs, so that it can be made in
every turn of a loop and in every layer that the same line computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from roundoff.compare.repairs.edits.added_calls import (
    activated_inputs,
    negated_inputs,
    offset_inputs,
    one_more,
    other_spreads,
)
from roundoff.compare.repairs.edits.arguments import (
    switched_arguments,
    transferred_arguments,
)
from roundoff.compare.repairs.edits.averages import (
    averages_without_padding,
    weighted_averages,
)
from roundoff.compare.repairs.edits.axes import added_axes, axes_of_line, other_axes
from roundoff.compare.repairs.edits.brackets import terms_alone
from roundoff.compare.repairs.edits.constants import (
    diagonals,
    factors_of_other_terms,
    pairs_of_numbers,
    reciprocals,
    shared_constants,
    unshared_constants,
)
from roundoff.compare.repairs.edits.edited_calls import (
    ARGUMENT,
    CHANGE,
    INPUT,
    LAYOUT,
    LEFT_OUT,
    ONE_MORE,
    Ingredients,
    Proposal,
    Template,
    is_move,
)
from roundoff.compare.repairs.edits.inputs import (
    exchanged_inputs,
    exchanged_makers,
    left_out_calls,
    not_turned,
    opposite_masks,
    other_inputs,
    other_turns,
)
from roundoff.compare.repairs.edits.layouts import other_layouts
from roundoff.compare.repairs.edits.masked_sums import masked_sums
from roundoff.compare.repairs.edits.operators import (
    bounds_and_summands,
    inclusive_comparisons,
    other_activations,
    other_operators,
)
from roundoff.compare.repairs.edits.splits import (
    exchanged_parts,
    exchanged_splits,
    other_copies,
    other_cuts,
    other_order_of_results,
    other_splits,
)
from roundoff.compare.repairs.edits.windows import (
    more_or_less,
    moved_places,
    moved_ranges,
    moved_windows,
    other_borders,
    other_ends,
    other_parts,
    other_rows,
    other_shifts,
    other_sides,
)
from roundoff.compare.values.traced_calls import TracedCall
from roundoff.ops import operators_that

_JOIN = operators_that("join")


def proposals(call: TracedCall, ingredients: Ingredients) -> Iterator[Proposal]:
    """Yield edits of a call, the likely kinds first.

    None of one that was called with names alone: edits count its arguments.
    """
    if not call.parsed[0]:
        return
    for unlikely, kind in _KINDS:
        for template in kind(call, ingredients):
            on_line = kind in _ON_LINE
            everywhere = kind in (
                transferred_arguments,
                switched_arguments,
                unshared_constants,
                shared_constants,
                other_axes,
            )
            exchanges = kind in (
                exchanged_parts,
                exchanged_splits,
                other_order_of_results,
            )
            exchanges |= kind is exchanged_inputs and is_move(call, _JOIN)
            is_copied = kind in (other_copies, other_layouts) and is_move(call)
            yield Proposal(
                unlikely,
                template,
                on_line=on_line,
                everywhere=everywhere,
                exchanges=exchanges,
                is_copied=is_copied,
                in_function=kind in (axes_of_line, other_operators),
            )


#: How unlikely -> what yields edits of that kind.
_KINDS: tuple[tuple[int, Callable[[TracedCall, Ingredients], Iterator[Template]]], ...]
_KINDS = (
    (ARGUMENT, transferred_arguments),
    (ARGUMENT, other_activations),
    (ARGUMENT, inclusive_comparisons),
    (ARGUMENT, averages_without_padding),
    (ARGUMENT, weighted_averages),
    (ARGUMENT, offset_inputs),
    (CHANGE, switched_arguments),
    (CHANGE, other_copies),
    (CHANGE, unshared_constants),
    (CHANGE, diagonals),
    (CHANGE, pairs_of_numbers),
    (CHANGE, other_axes),
    (CHANGE, axes_of_line),
    (CHANGE, added_axes),
    (CHANGE, other_order_of_results),
    (CHANGE, exchanged_parts),
    (CHANGE, moved_windows),
    (CHANGE, other_sides),
    (CHANGE, other_borders),
    (CHANGE, other_rows),
    (CHANGE, other_parts),
    (CHANGE, other_ends),
    (CHANGE, other_shifts),
    (CHANGE, exchanged_inputs),
    (CHANGE, factors_of_other_terms),
    (CHANGE, opposite_masks),
    (CHANGE, exchanged_makers),
    (CHANGE, other_splits),
    (CHANGE, other_operators),
    (CHANGE, bounds_and_summands),
    (CHANGE, not_turned),
    (LAYOUT, other_cuts),
    (LAYOUT, other_layouts),
    (LAYOUT, moved_places),
    (LAYOUT, exchanged_splits),
    (LEFT_OUT, left_out_calls),
    (LEFT_OUT, more_or_less),
    (INPUT, moved_ranges),
    (INPUT, other_turns),
    (INPUT, other_inputs),
    (INPUT, activated_inputs),
    (INPUT, masked_sums),
    (INPUT, terms_alone),
    (ONE_MORE, negated_inputs),
    (ONE_MORE, other_spreads),
    (ONE_MORE, shared_constants),
    (ONE_MORE, reciprocals),
    (ONE_MORE, one_more),
)
#: Made in every call of a line that they fit.
_ON_LINE = (axes_of_line, added_axes, exchanged_parts, moved_windows)
