"""Advice on how a forward pass is written, each timed on shapes of its own: look-ups,
attention, loops, constants. Only the author can change the code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from roundoff.advise.advice import PAYS, TRIAL_ERRORS, AdviceRow, first_line
from roundoff.advise.facts import Facts
from roundoff.advise.forward_calls import (
    Attention,
    ForwardCalls,
    Loop,
    Product,
    forward_calls,
)
from roundoff.advise.setup import Runner
from roundoff.advise.trial import Precision, measure_speed, sqnr_of

_TUNING = "PyTorch performance tuning guide"


def advise_on_code(facts: Facts, *, seconds: float) -> list[AdviceRow]:
    """Return a row for each roundabout way that the forward pass takes, the dearest of
    each kind."""
    runner = Runner(facts.setup.copied())
    seen = forward_calls(runner.step)
    with torch.no_grad():
        return list(_rows(facts, seen, seconds))


def _rows(facts: Facts, seen: ForwardCalls, seconds: float) -> Iterator[AdviceRow]:
    if seen.one_hot:
        product = max(seen.one_hot, key=lambda each: each.rows * each.columns)
        yield _look_up(facts, product, len(seen.one_hot), seconds)
    if seen.attention and not facts.attention:
        yield _attention(facts, max(seen.attention, key=_scores), seconds)
    if seen.loops:
        yield _loop(facts, seen.loops[0], len(seen.loops), seconds)
    if seen.constants:
        yield _constants(seen)


def _scores(attention: Attention) -> int:
    return attention.batch * attention.queries * attention.keys


def _look_up(facts: Facts, product: Product, count: int, seconds: float) -> AdviceRow:
    table = torch.randn(product.columns, product.width, device=facts.device)
    table = table.to(product.dtype)
    ids = torch.arange(product.rows, device=facts.device) % product.columns
    one_hot = functional.one_hot(ids, product.columns).to(product.dtype)
    row = AdviceRow(
        name="look_up",
        seen=f"{count} product(s) with one-hot rows, the largest {product.rows} × "
        f"{product.columns} by {product.columns} × {product.width}, without what makes "
        "the rows",
        place=f"({product.line})" if product.line else "",
        do="torch.nn.functional.embedding(ids, table), or table[ids]",
        why="a product with a one-hot row picks one row of the table, and reads it all",
        source="torch.nn.Embedding",
        verdict="not tried",
        of="layer",
        share=_share(facts, product.line),
    )
    return _tried(
        row,
        facts,
        lambda: one_hot @ table,
        lambda: functional.embedding(ids, table),
        seconds,
    )


def _attention(facts: Facts, seen: Attention, seconds: float) -> AdviceRow:
    def make(length: int) -> torch.Tensor:
        shape = (1, seen.batch, length, seen.width)
        return torch.randn(shape, device=facts.device).to(seen.dtype)

    queries = make(seen.queries)
    keys = make(seen.keys)
    values = make(seen.keys)

    def written() -> torch.Tensor:
        scores = queries @ keys.transpose(-2, -1) / seen.width**0.5
        weights = scores.softmax(-1)
        return torch.matmul(weights, values)

    row = AdviceRow(
        name="written_attention",
        seen=f"softmax(QKᵀ)V in single operators, {seen.batch} heads of {seen.queries} "
        f"queries and {seen.keys} keys; timed without mask and dropout",
        place=f"({seen.line})" if seen.line else "",
        do="torch.nn.functional.scaled_dot_product_attention, with attn_mask or is_causal",
        why="the scores are neither written to memory nor read again",
        source="Dao et al. 2022, FlashAttention",
        verdict="not tried",
        of="layer",
        share=_share(facts, seen.line),
    )
    return _tried(
        row,
        facts,
        written,
        lambda: functional.scaled_dot_product_attention(queries, keys, values),
        seconds,
    )


def _loop(facts: Facts, loop: Loop, count: int, seconds: float) -> AdviceRow:
    parts = torch.randn(loop.calls, loop.numel, device=facts.device)
    row = AdviceRow(
        name="python_loop",
        seen=f"one line calls {loop.operator} {loop.calls} times in a step, on at most "
        f"{loop.numel} elements, and {count - 1} other operators likewise; timed as so "
        "many sums of that size against a single one",
        place=f"({loop.line})",
        do="one call for all entries (torch.func.vmap, a dimension more), or a fused "
        "layer such as torch.nn.LSTM for a recurrence",
        why="each call costs some microseconds however small it is",
        source=_TUNING,
        verdict="not tried",
        of="layer",
    )
    row = _tried(
        row,
        facts,
        lambda: [part + part for part in parts],
        lambda: parts + parts,
        seconds,
    )
    return replace(row, precision=None)


def _constants(seen: ForwardCalls) -> AdviceRow:
    total = sum(seen.constants.values())
    worst = max(seen.constants, key=lambda line: seen.constants[line])
    return AdviceRow(
        name="constants",
        seen=f"{total} tensors are made from no other in each step",
        place=f"({worst})",
        do="register_buffer in __init__, for masks, positions and scales",
        why="what is the same in every step is made, and copied to the device, in each",
        source=_TUNING,
        verdict="not tried",
        reason="whether it is the same in every step, the code knows",
    )


def _share(facts: Facts, line: str | None) -> float | None:
    rows = [
        row
        for row in facts.counts.rows
        if line is not None and row.line == line and row.phase == "forward"
    ]
    names = {(row.operator, row.module) for row in rows}
    shares = [
        facts.profile.share(row)
        for row in facts.profile.rows
        if (row.operator, row.module) in names and row.phase == "forward"
    ]
    return min(1.0, sum(shares)) if shares else None


def _tried(
    row: AdviceRow,
    facts: Facts,
    unchanged: Callable[[], object],
    changed: Callable[[], object],
    seconds: float,
) -> AdviceRow:
    """Time both, and compare what they compute where that is one tensor."""
    try:
        speed = measure_speed(unchanged, changed, seconds=seconds, device=facts.device)
        before = unchanged()
        after = changed()
    except TRIAL_ERRORS as error:
        return replace(row, reason=f"it failed: {first_line(error)}")
    pays = speed.median >= PAYS and speed.low > 1
    precision = None
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        output_db = sqnr_of([{"result": before}], [{"result": after}])
        precision = Precision(output_db=output_db, loss_db=None)
    return replace(
        row,
        speed=speed,
        precision=precision,
        verdict="by hand" if pays else "does not pay",
    )
