"""The values behind a tensor: shards, nested and sparse tensors hold plain ones; some hold none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

#: The plain tensor, or None and the reason.
Values = tuple[Tensor | None, str | None]

_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_META = "a meta tensor has no values"


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor without what ``torch.func`` wraps it in: of a batched one, the
    whole batch.
    """
    while _wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def plain(tensor: Tensor) -> Values:
    """Return a strided tensor with the values of ``tensor`` in memory of its own, or the reason.

    A ``DTensor`` gives its local shard, a sparse tensor its stored values, a nested one its
    concatenated values.
    """
    kind: Any = type(tensor)
    if kind is not Tensor and kind is not Parameter and kind is not torch.nn.Buffer:
        return _inside(tensor, kind)
    layout = tensor.layout
    if layout is torch.strided:
        return _strided(tensor)
    if layout is torch.sparse_coo:
        return tensor._values(), None
    if layout in _COMPRESSED:
        return tensor.values(), None
    name = str(layout).removeprefix("torch.")
    return None, f"values in layout {name} cannot be read"


def _strided(tensor: Tensor) -> Values:
    if _wrapped(tensor):
        return plain(unwrapped(tensor))
    if tensor.is_meta:
        return None, _META
    if tensor.is_quantized:
        return tensor.dequantize(), None
    if tensor.is_nested:
        return tensor.values().detach(), None
    if tensor.data_ptr() or not tensor.numel():
        return tensor, None
    if tensor._is_zerotensor():  # autograd's zeros without memory
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return zeros, None
    return None, "its memory was freed"


def _inside(tensor: Tensor, kind: Any) -> Values:
    """The values of a tensor of another class."""
    for attribute in ("_local_tensor", "_values"):
        inner = getattr(tensor, attribute, None)
        if type(inner) is Tensor:
            return (None, _META) if inner.device.type == "meta" else (inner, None)
    dispatch = getattr(kind, "__torch_dispatch__", None)
    if dispatch in (None, torch._C._disabled_torch_dispatch_impl):
        return tensor.as_subclass(Tensor), None  # a subclass with plain memory
    return None, f"values inside {kind.__name__} cannot be read"


def tensors_in(*groups: Any) -> list[Tensor]:
    """Return the tensors among arguments and in lists of them, however deep."""
    tensors: list[Tensor] = []
    for group in groups:
        for value in group:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                tensors.append(value)
            elif kind is list or kind is tuple:
                if value and type(value[0]) is not int:
                    tensors += tensors_in(value)
            elif kind not in _NO_TENSORS:
                tensors += _tensors_of_subclass(value)
    return tensors


def _tensors_of_subclass(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return tensors_in(value) if isinstance(value, (list, tuple)) else []


#: Told apart by their type alone, which is faster than ``isinstance``.
_NO_TENSORS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))
