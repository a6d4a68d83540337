"""``scaled_dot_product_attention`` in as few operators of ONNX as it needs.

ONNX Runtime folds the scale and the transposition of the keys into the product. A causal
mask of known lengths is made of constants, which it computes when the file is loaded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return ``softmax(query @ key.T * scale + mask) @ value`` as nodes of ONNX.

    Shapes as torch has them: [..., L, E], [..., S, E], [..., S, Ev]. A row that a boolean
    mask leaves nothing to is 0. Dropout is left out: what is exported is in evaluation.
    """
    from onnxscript import opset21

    op: Any = opset21
    del dropout_p
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    rank = len(key.shape)
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    mask = _causal_mask(op, query, key) if is_causal else attn_mask
    if enable_gqa:
        key, value = (_for_each_query(op, query, kept) for kept in (key, value))
    scaled = op.Mul(query, _number(op, query, factor))
    scores = op.MatMul(scaled, op.Transpose(key, perm=swapped))
    if mask is None:
        weights = op.Softmax(scores, axis=-1)
    elif mask.dtype is not None and mask.dtype.name == "BOOL":
        weights = _unmasked_weights(op, scores, mask, query)
    else:
        weights = op.Softmax(op.Add(scores, mask), axis=-1)
    return op.MatMul(weights, value)


def _unmasked_weights(op: Any, scores: Any, mask: Any, like: Any) -> Any:
    """Return the softmax of scores over the keys where a boolean mask is True."""
    zero = _number(op, like, 0.0)
    lowest = _number(op, like, float(np.finfo(like.dtype.numpy()).min))
    kept = op.Add(scores, op.Where(mask, zero, lowest))
    return op.Where(mask, op.Softmax(kept, axis=-1), zero)


def _number(op: Any, like: Any, number: float) -> Any:
    """Return a constant of the dtype of a value."""
    import onnx_ir as ir

    return op.Constant(value=ir.tensor(np.array(number, like.dtype.numpy())))


def _causal_mask(op: Any, query: Any, key: Any) -> Any:
    """Return [L, S] with the lowest number above the diagonal, and 0."""
    import onnx_ir as ir

    lengths = query.shape[-2], key.shape[-2]
    if all(isinstance(length, int) for length in lengths):
        shape = op.Constant(value_ints=list(lengths))
    else:
        ends = [op.Shape(value, start=-2, end=-1) for value in (query, key)]
        shape = op.Concat(*ends, axis=0)
    dtype = query.dtype.numpy()
    lowest = ir.tensor(np.array([np.finfo(dtype).min], dtype))
    above = op.Constant(value_int=1)
    return op.Trilu(op.ConstantOfShape(shape, value=lowest), above, upper=1)


def _for_each_query(op: Any, query: Any, kept: Any) -> Any:
    """Repeat keys or values [N, heads, S, E] for the heads of the queries that share them."""
    heads = query.shape[-3]
    repeats = heads // kept.shape[-3]
    if repeats == 1:
        return kept
    apart = op.Unsqueeze(kept, op.Constant(value_ints=[2]))
    repeated = op.Expand(apart, op.Constant(value_ints=[1, 1, repeats, 1, 1]))
    width = kept.shape[-1]
    return op.Reshape(repeated, op.Constant(value_ints=[0, heads, -1, width]))
