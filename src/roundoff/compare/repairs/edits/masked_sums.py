"""A sum or an average over places some of which a mask takes out: the mask is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from roundoff.compare.repairs.edits.averages import again
from roundoff.compare.repairs.edits.edited_calls import (
    Ingredients,
    Template,
    reading_another,
)
from roundoff.compare.values.traced_calls import (
    BEFORE,
    Edit,
    EditStep,
    TracedCall,
    records_in,
)

_SUM = "sum"
_MEAN = "mean"
_HELD = BEFORE - 1


def masked_sums(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """The sum, or the average, of what a mask of the candidate leaves of its input."""
    records = records_in(call.parsed)
    if call.first.base_operator in (_SUM, _MEAN) and len(records) == 1:
        for choose in ingredients.masks(call, records[0]):
            yield _masked(choose, ingredients)


def _masked(
    choose: Callable[[TracedCall], int | None], ingredients: Ingredients
) -> Template:
    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        mask = choose(call)
        if mask is None or len(records) != 1:
            return None
        content, read = ingredients.contents(mask), ingredients.contents(records[0])
        if content is None or read is None or not _takes_out(content, read):
            return None
        product = [[{"record": records[0]}, {"record": mask}], {}]
        kept = EditStep("aten.mul.Tensor", product)
        arguments = reading_another(call, 0, BEFORE)
        reduced = EditStep(call.first.overload or "", arguments)
        words = "of what a mask leaves"
        if call.first.base_operator == _SUM:
            return Edit((kept, reduced), words)
        share = _share_kept(call, content, ingredients.shapes(records[0]))
        if share is None or bool((share == 0).any()):
            return None
        divisor = [[{"record": BEFORE}, {"record": _HELD}], {}]
        divided = EditStep("aten.div.Tensor", divisor)
        return Edit((kept, reduced, divided), words, held={_HELD: share})

    return template


def _takes_out(mask: Tensor, read: Tensor) -> bool:
    """Return True for a mask outside which anything is: what is zero counts for nothing."""
    fits = mask.dim() == read.dim()
    return fits and bool((read != 0)[(mask == 0).expand(read.shape)].any())


def _share_kept(
    call: TracedCall, mask: Tensor, shape: tuple[int, ...]
) -> Tensor | None:
    """Return which share of what it averages a mask keeps; None where it does not fit."""
    dtype = getattr(torch, call.first.dtype or "", None)
    if not isinstance(dtype, torch.dtype):
        return None
    return again(call, mask.to(dtype).expand(shape))
