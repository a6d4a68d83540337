"""What is named for an edit that makes a value right: its call, or a parameter behind it."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.known_leaves import is_right_elsewhere
from roundoff.compare.blame.near_leaves import leaves_of, of_leaves_alone
from roundoff.compare.blame.same_layouts import is_close
from roundoff.compare.records.call_stacks import shared, stack_of
from roundoff.compare.records.parameter_content import axis_orders
from roundoff.compare.repairs.edits.added_calls import ADDED
from roundoff.compare.repairs.edits.edited_calls import (
    INPUT,
    LAYOUT,
    LEFT_OUT,
    ONE_MORE,
)
from roundoff.compare.repairs.handed_numbers import line_that_hands_numbers
from roundoff.compare.repairs.repair_trials import Repair
from roundoff.compare.rounding.rounding_bound import DIFFERENCES, PRODUCTS
from roundoff.compare.values.fault_lines import FaultLines
from roundoff.compare.values.traced_calls import TracedCall, records_in
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides, upstream
from roundoff.ops import operators_that

_JOIN = operators_that("join")
_LOOK_UP = operators_that("read at places")
_MOVE = operators_that("move values")
#: Give all elements of their input, in other places.
TURNS = (
    operators_that("reshape")
    | operators_that("permute axes")
    | operators_that("reorder")
)
_ORDERS = TURNS | operators_that("hand on in order")
_PRODUCTS = operators_that("multiply two matrices")
_SCALES = operators_that("scale with their operand")
#: Of a value and a number.
_FACTORS = operators_that("scale elements") | operators_that("divide")
#: A convolution of one place the other way round is one with a weight that is transposed.
_TRANSPOSED = "transposed="
_OTHER_SIGN = ("as sub, not add", "as add, not sub")
#: Calls from the parts of a layer's result back to its weight, at most: moves, the bias,
#: the product.
_LAYER = 4
#: Kinds of edits that one caller of a function may need, and another not.
_OF_SOME_CALLERS = (LEFT_OUT, INPUT, ONE_MORE)
_FORWARD = "forward"


def blamed_for(
    sides: Sides, repair: Repair, region: Collection[int], wanted: Value | None
) -> Blamed:
    """Return what to name for a repair.

    Args:
        sides: both programs.
        repair: the edit that makes a value right.
        region: the candidate's values that lead to results that differ.
        wanted: the value of the reference that the edit gives.
    """
    [first, *_] = repair.call.rows
    value = sides.candidate.values[first.record]
    more = "" if repair.ends else "more of "
    words = f"{repair.words} it gives {more}what the reference has"
    is_added = repair.unlikely == ONE_MORE and ADDED in repair.words
    if is_added and wanted is not None and wanted.operator == "add":
        words = f"left out is {there(wanted)}: {words}"
    is_apart = (
        repair.exchanges
        or _cuts_apart(sides.candidate, repair)
        or _joins_otherwise(repair)
    )
    joined = _put_together_for(sides, value) if is_apart else []
    if joined:
        names = ", ".join(leaf.row.name or "" for leaf in joined)
        words = (
            f"the parts of {names} stand in another order than "
            f"{value.row.site} takes them: {words}"
        )
        line = (
            _line_of_some(sides, value, repair.edits, are_right=False) or value.row.line
        )
        return Blamed(joined[0], wanted, words, line=line)
    is_move = repair.unlikely == LAYOUT or value.operator in TURNS
    turned = _only_turned(sides, value) if is_move else None
    if is_move and turned is None:
        turned = _turned_factor(sides, value)
    if _TRANSPOSED in repair.words:
        turned = _only_matrix(sides.candidate, value)
    if turned is not None:
        words = (
            f"{turned.row.name} stands in another order than {value.row.site} "
            f"takes it: {words}"
        )
        return Blamed(turned, wanted, words, line=value.row.line)
    negative = _added_leaf(sides, value) if repair.words in _OTHER_SIGN else None
    if negative is not None:
        words = (
            f"{negative.row.name} has the other sign than {value.row.site} takes it "
            f"with: {words}"
        )
        return Blamed(negative, wanted, words, line=value.row.line)
    skipped = _skipped(sides, repair)
    if skipped is not None:
        last, source = skipped
        words = (
            f"it is one too many: of {source.operator} ({source.row.line}) itself "
            f"{value.row.site} gives what the reference has"
        )
        line = FaultLines(sides, frozenset(region)).of_operator(last)
        return Blamed(last, wanted, words, is_operator=True, line=line)
    if repair.factor is not None:
        value = _beside_factor(sides.candidate, value, repair.factor) or value
    total = _weighed_sum(sides.candidate, value) if repair.scales else None
    if total is not None:
        words = f"with {there(value)} {words}"
        value = total
    line = None
    if repair.unlikely in _OF_SOME_CALLERS and not repair.is_whole:
        line = FaultLines(sides, frozenset(region)).of_operator(value)
    are_right = repair.ends and repair.is_of_caller
    if repair.exchanges or are_right:
        line = _line_of_some(sides, value, repair.edits, are_right=are_right)
    line = line or line_that_hands_numbers(sides.candidate, repair)
    return Blamed(value, wanted, words, is_operator=True, line=line)


def _skipped(sides: Sides, repair: Repair) -> tuple[Value, Value] | None:
    """Return the result of a function that a repair does without, and what that was given.

    None where the repair does not read, in the place of a wrong value, what that is made of,
    or where something else reads that value too.
    """
    edit = repair.edits.get(repair.call.first.call)
    if repair.unlikely != INPUT or edit is None or len(edit.steps) != 1:
        return None
    flow = sides.candidate
    reads = records_in(repair.call.parsed)
    reads_instead = records_in(edit.steps[0].arguments)
    lost = [record for record in reads if record not in reads_instead]
    new = [record for record in reads_instead if record not in reads]
    if len(lost) != 1 or len(new) != 1 or not {*lost, *new} <= flow.values.keys():
        return None
    last, source = flow.values[lost[0]], flow.values[new[0]]
    if last.key in sides.twins or not source.is_call:
        return None
    if source.key not in upstream(flow, [last.key], lambda _value: True):
        return None
    readers = [flow.values[key].row for key in flow.readers.get(last.key, ())]
    read_by = {row.call for row in readers if row.phase == _FORWARD}
    return (last, source) if read_by <= repair.edits.keys() else None


def _cuts_apart(flow: Flow, repair: Repair) -> bool:
    """Return True for one of the slices that cut a value into parts, which a repair moves.

    Where it is right the others are wrong, as they would not give the rest any more.
    """
    first = repair.call.first
    sources = flow.values[first.record].inputs if first.record in flow.values else ()
    if first.base_operator != "slice" or len(sources) != 1:
        return False
    [source] = sources
    rows = [flow.values[key].row for key in flow.readers.get(source, ())]
    cuts = [row for row in rows if row.base_operator == "slice" and row.arguments]
    places = [TracedCall(row, (row,)).parsed[0][1:4] for row in cuts]
    axes = {axis for axis, _, _ in places}
    if len(axes) != 1:
        return False
    size = tuple(flow.values[source].row.shape or ())[axes.pop()]
    windows = sorted({slice(*ends).indices(size)[:2] for _, *ends in places})
    meet = all(one[1] == other[0] for one, other in itertools.pairwise(windows))
    return len(windows) > 1 and meet and windows[0][0] == 0 and windows[-1][1] == size


def _joins_otherwise(repair: Repair) -> bool:
    """Return True for an edit that joins the same values along another axis."""
    edit = repair.edits.get(repair.call.first.call)
    if repair.call.first.base_operator not in _JOIN or edit is None:
        return False
    reads = records_in(repair.call.parsed)
    return len(edit.steps) == 1 and records_in(edit.steps[0].arguments) == reads


def _line_of_some(
    sides: Sides, value: Value, edited: Collection[int], *, are_right: bool
) -> str | None:
    """Return the line where an edited call parts from those of its line that are right.

    A function of which some calls are right hands on what it was given. None where no
    other call of the line is. ``are_right``: all that are not edited are, as all results
    agree.
    """
    stack = stack_of(value.row)
    staying = [
        stack_of(each.row)
        for each in sides.candidate.values.values()
        if each.row.line == value.row.line
        and each.operator == value.operator
        and each.row.phase == value.row.phase
        and each.row.call not in edited
        and (are_right or each.key in sides.twins)
    ]
    staying = [other for other in staying if other[-1:] == stack[-1:]]
    place = max((shared(stack, other) for other in staying), default=None)
    if place is None:
        return None
    # where the two run through other functions too, the last of these hands on what is wrong
    right = {line for other in staying for line in other}
    return next(
        (line for line in reversed(stack[place:]) if line not in right), stack[place]
    )


def _beside_factor(flow: Flow, value: Value, factor: int) -> Value | None:
    """Return what is made of a value on a line that multiplies others by the same factor.

    Wherever on its way a value is scaled, the same comes out: a sum of which all is to be
    weighed has brackets in the wrong place.
    """
    lines = {
        flow.values[key].row.line
        for key in flow.readers.get(factor, ())
        if flow.values[key].computes and flow.values[key].row.phase == _FORWARD
    }
    made: Value | None = value
    while made is not None and made.row.line not in lines:
        readers = [flow.values[key] for key in flow.readers.get(made.key, ())]
        readers = [v for v in readers if v.row.phase == _FORWARD and not v.inner]
        made = readers[0] if len(readers) == 1 else None
    return made


def _weighed_sum(flow: Flow, value: Value) -> Value | None:
    """Return the sum that a value goes into, if one of its terms is weighed on that line.

    The weights of a sum belong together.
    """
    factors = []
    while True:
        readers = [flow.values[key] for key in flow.readers.get(value.key, ())]
        readers = [v for v in readers if v.row.phase == _FORWARD]
        if len(readers) != 1:
            return None
        [reader] = readers
        if reader.operator in DIFFERENCES and not reader.inner:
            break
        is_scaled = reader.operator in _FACTORS and len(reader.inputs) == 1
        is_product = reader.operator in PRODUCTS
        is_linear = is_scaled or is_product or reader.operator in _SCALES
        if reader.computes and reader.operator not in _MOVE and not is_linear:
            return None
        if is_scaled:
            factors.append(reader)
        value = reader
    others = [flow.behind(key) for key in _terms(flow, reader) if key != value.key]
    products = [*factors, *(each for each in others if each.operator in PRODUCTS)]
    is_weighed = any(each.row.line == reader.row.line for each in products)
    return reader if is_weighed else None


def _terms(flow: Flow, part: Value) -> list[int]:
    """Return what the sum on a value's line is made of that a value is a part of."""

    def is_part(value: Value) -> bool:
        is_sum = value.operator in DIFFERENCES and not value.inner
        return is_sum and value.row.line == part.row.line

    total: Value | None = part
    while total is not None:
        part = total
        readers = [flow.values[key] for key in flow.readers.get(part.key, ())]
        readers = [v for v in readers if v.row.phase == _FORWARD]
        total = next(filter(is_part, readers), None)
    terms: list[int] = []
    waiting = [part]
    while waiting:
        read = [key for key in waiting.pop().inputs if key in flow.values]
        waiting += [flow.values[key] for key in read if is_part(flow.values[key])]
        terms += read
    return terms


def there(twin: Value) -> str:
    """Return a call in words: its operator, site and line."""
    line = f" ({twin.row.line})" if twin.row.line else ""
    return f"{twin.operator} of {twin.row.site}{line}"


def _only_matrix(flow: Flow, product: Value) -> Value | None:
    """Return the one weight that a product reads."""
    leaves = leaves_of(flow, [product.key])
    matrices = [leaf for leaf in leaves if len(leaf.row.shape or ()) > 1]
    return matrices[0] if len(matrices) == 1 else None


def _only_turned(sides: Sides, value: Value) -> Value | None:
    """Return the parameter of which a call moves nothing but the elements.

    None for one that another call reads rightly: then the call is wrong. Nor where places
    are looked up: then these are out of order.
    """
    flow = sides.candidate
    if not of_leaves_alone(flow, value):
        return None
    behind = [flow.values[key] for key in upstream(flow, [value.key], lambda _: True)]
    if any(each.operator in _LOOK_UP for each in behind):
        return None
    leaves = [each for each in behind if not each.is_call]
    if len(leaves) != 1:
        return None
    [leaf] = leaves
    return None if is_right_elsewhere(sides, leaf, but=value) else leaf


def _turned_factor(sides: Sides, moved: Value) -> Value | None:
    """Return the parameter that a moved value is multiplied with, if it is the one of the
    two whose elements do not stand in the reference's order.

    Either makes the product right when it is moved. None where the value is out of order.
    """
    flow = sides.candidate
    other = _factor_beside(flow, moved)
    if other is None or not of_leaves_alone(flow, other):
        return None
    leaves = leaves_of(flow, [other.key])
    read = [flow.values[key] for key in moved.inputs if key in flow.values]
    sources = (*read, flow.behind(moved.key))
    is_value_in_order = any(stands_in_order(sides, each) for each in sources)
    if len(leaves) != 1 or not is_value_in_order:
        return None
    return None if stands_in_order(sides, leaves[0]) else leaves[0]


def _factor_beside(flow: Flow, moved: Value) -> Value | None:
    """Return what a value is multiplied with in the one product that reads it behind moves."""
    factor = moved
    while True:
        readers = [flow.values[key] for key in flow.readers.get(factor.key, ())]
        readers = [v for v in readers if v.row.phase == _FORWARD and not v.inner]
        if len(readers) != 1:
            return None
        [reader] = readers
        if reader.operator in _PRODUCTS:
            others = [k for k in reader.inputs if k != factor.key and k in flow.values]
            return flow.values[others[0]] if len(others) == 1 else None
        if reader.operator not in TURNS and reader.computes:
            return None
        factor = reader


def stands_in_order(sides: Sides, value: Value) -> bool:
    """Return True where a value that agrees has the reference's elements one after the
    other, by some order of the axes."""
    held = sides.candidate.tensor(value.key)
    if held is None:
        return False
    flat = held.reshape(-1)
    for key in sides.all_twins(value):
        content = sides.reference.tensor(key)
        if content is None or content.numel() != flat.numel():
            continue
        forms = (content.permute(order) for order in axis_orders(content))
        if any(is_close(form.reshape(-1), flat) for form in forms):
            return True
    return False


def _added_leaf(sides: Sides, total: Value) -> Value | None:
    """Return the parameter that a sum adds to what is computed, if it adds one.

    None for one that another call reads rightly: then the call is wrong.
    """
    flow = sides.candidate
    sources = [flow.behind(key) for key in total.inputs if key in flow.values]
    added = [each for each in sources if each.row.name and not each.is_call]
    if len(added) != 1 or is_right_elsewhere(sides, added[0], but=total):
        return None
    return added[0]


def _put_together_for(sides: Sides, cut: Value) -> list[Value]:
    """Return the parameters of whose parts a call cuts the values, if a loader joined them.

    Of a cell there are two: of what it reads and of its state. Or those with which the
    parts that a call joins are multiplied. Empty where the reference has the elements of
    one in the same order: then only the call can take the parts in another.
    """
    flow = sides.candidate
    source = _read_first(flow, cut) if cut.operator in _JOIN else flow.behind(cut.key)
    joined: list[Value] = []
    waiting = [(source, 0)]
    while waiting:
        source, calls = waiting.pop(0)
        leaves = leaves_of(flow, [source.key])
        matrices = [leaf for leaf in leaves if len(leaf.row.shape or ()) > 1]
        if len(leaves) == 1 and of_leaves_alone(flow, source):
            matrices = leaves
        inputs = [flow.values[key] for key in source.inputs if key in flow.values]
        computed = [v for v in inputs if v.is_call and v.is_number]
        is_far = calls + 1 == _LAYER or not computed
        if len(matrices) > 1 or (not matrices and is_far):
            return []
        joined += matrices
        if not matrices:
            waiting += [(flow.behind(value.key), calls + 1) for value in computed]
    return [] if any(stands_in_order(sides, leaf) for leaf in joined) else joined


def _read_first(flow: Flow, value: Value) -> Value:
    """Return what first computes with a value in the forward pass; without one the value
    behind."""
    read: Value | None = value
    while read is not None and (read.key == value.key or read.operator in _ORDERS):
        readers = [flow.values[key] for key in flow.readers.get(read.key, ())]
        readers = [v for v in readers if v.row.phase == _FORWARD and not v.inner]
        read = min(readers, key=lambda v: v.order, default=None)
    return flow.behind(value.key) if read is None else read
