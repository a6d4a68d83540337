"""An average over places some of which do not count: over the others alone.

Poolings count the padding or do not (``count_include_pad`` of PyTorch, ``exclusive`` of
Paddle; "SAME" of TensorFlow does not), and losses divide by the sum of the weights or by
how many there are. One that is written out does as it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from roundoff.compare.repairs.edits.edited_calls import Ingredients, Template, is_move
from roundoff.compare.values.traced_calls import (
    BEFORE,
    Edit,
    EditStep,
    TracedCall,
    records_in,
)
from roundoff.ops import RepeatedCall, operators_that

_PAD = operators_that("pad")
_AVERAGES = ("mean", "avg_pool1d", "avg_pool2d", "avg_pool3d")
_MEANS = ("aten.mean.default", "aten.mean.dim")
_HELD = BEFORE - 1


def averages_without_padding(
    call: TracedCall, ingredients: Ingredients
) -> Iterator[Template]:
    """The sum of what it averages, divided by how many places are no padding."""
    if call.first.base_operator in _AVERAGES:
        yield partial(_without_padding, ingredients)


def weighted_averages(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """The sum of a product that it averages, divided by the sum of either factor."""
    if call.first.overload in _MEANS:
        yield from (partial(_weighted, place, ingredients) for place in range(2))


def _weighted(place: int, ingredients: Ingredients, call: TracedCall) -> Edit | None:
    [product, *axes] = call.parsed[0]
    read = records_in(product)
    maker = ingredients.maker(read[0]) if len(read) == 1 else None
    if maker is None or maker.first.overload != "aten.mul.Tensor":
        return None
    factors = records_in(maker.parsed)
    if len(factors) != 2:
        return None
    weights = factors[place]
    shape = tuple(maker.first.shape or ())
    if axes and len(ingredients.shapes(weights)) != len(shape):
        return None
    kept = [*axes[:1], True] if axes else []
    share = EditStep(call.first.overload or "", [[{"record": weights}, *kept], {}])
    divided = EditStep("aten.div.Tensor", [[product, {"record": BEFORE}], {}])
    again = [[{"record": BEFORE}, *axes], call.parsed[1]]
    average = EditStep(call.first.overload or "", again)
    words = "divided by the sum of the weights, not by how many there are,"
    return Edit((share, divided, average), words)


def _without_padding(ingredients: Ingredients, call: TracedCall) -> Edit | None:
    share = _share_inside(call, ingredients)
    if share is None or bool((share == 0).any()) or bool((share == 1).all()):
        return None
    average = EditStep(call.first.overload or "", call.parsed)
    divided = EditStep("aten.div.Tensor", [[{"record": BEFORE}, {"record": _HELD}], {}])
    words = "averaged over the places that are no padding"
    return Edit((average, divided), words, held={_HELD: share})


def _share_inside(call: TracedCall, ingredients: Ingredients) -> Tensor | None:
    """Return which share of the places of each average is no padding.

    None for an average of values that are not cut out of one that zeros were put around.
    """
    path = [call]
    while path[-1].first.base_operator not in _PAD:
        read = records_in(path[-1].parsed)
        maker = ingredients.maker(read[0]) if len(read) == 1 else None
        if maker is None or not (is_move(maker) or is_move(maker, _PAD)):
            return None
        path.append(maker)
    positional, keywords = path[-1].parsed
    fill = positional[2] if len(positional) > 2 else 0
    shape = ingredients.shapes(records_in(positional)[0])
    dtype = getattr(torch, path[-1].first.dtype or "", None)
    if keywords or fill != 0 or not isinstance(dtype, torch.dtype):
        return None
    share = torch.ones(shape, dtype=dtype)
    for each in reversed(path):
        made = again(each, share)
        if made is None:
            return None
        share = made
    return share


def again(call: TracedCall, tensor: Tensor) -> Tensor | None:
    """Return the one result of a call that reads a tensor in the place of its own."""
    repeated = RepeatedCall(call.first.overload or "", call.first.arguments or "")
    results = repeated.run(lambda _record: tensor)
    if not isinstance(results, list) or len(results) != 1:
        return None
    [result] = results
    return result if isinstance(result, Tensor) else None
