"""The values behind a tensor: shards, nested and sparse tensors hold plain ones; some hold none that can be read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor


def bare(tensor: Tensor) -> Tensor:
    """Without what ``torch.func`` wraps it in: of a batched tensor, the whole batch."""
    while _wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def plain(tensor: Tensor) -> tuple[Tensor | None, str | None]:
    """A strided tensor with the values of ``tensor`` in memory of its own, or None with the reason.

    A ``DTensor`` gives its local shard, a sparse tensor its stored values, a nested one its concatenated values.
    """
    kind: Any = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter or kind is torch.nn.Buffer:
        layout = tensor.layout
        if layout is torch.strided:
            if _wrapped(tensor):
                return plain(bare(tensor))
            if tensor.is_meta:
                return None, "a meta tensor has no values"
            if tensor.is_quantized or tensor.is_nested:
                return (
                    tensor.dequantize()
                    if tensor.is_quantized
                    else tensor.values().detach()
                ), None
            if not tensor.data_ptr() and tensor.numel():
                if tensor._is_zerotensor():  # autograd's zeros without memory
                    return torch.zeros(
                        tensor.shape, dtype=tensor.dtype, device=tensor.device
                    ), None
                return None, "its memory was freed"
            return tensor, None
        if layout is torch.sparse_coo:
            return tensor._values(), None
        if layout in (
            torch.sparse_csr,
            torch.sparse_csc,
            torch.sparse_bsr,
            torch.sparse_bsc,
        ):
            return tensor.values(), None
        return (
            None,
            f"values in layout {str(layout).removeprefix('torch.')} cannot be read",
        )
    for attribute in ("_local_tensor", "_values"):
        inner = getattr(tensor, attribute, None)
        if type(inner) is Tensor:
            return (
                (inner, None)
                if inner.device.type != "meta"
                else (None, "a meta tensor has no values")
            )
    if (
        not hasattr(kind, "__torch_dispatch__")
        or kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    ):
        return tensor.as_subclass(Tensor), None  # a subclass with plain memory
    return None, f"values inside {kind.__name__} cannot be read"


def tensors_in(*groups: Any) -> list[Tensor]:
    """The tensors among arguments and in lists of them, however deep."""
    found: list[Tensor] = []
    for group in groups:
        for value in group:
            kind = type(value)
            if kind in _KINDS:
                if kind is list or kind is tuple:
                    if value and type(value[0]) is not int:
                        found += tensors_in(value)
                elif kind is Tensor or kind is Parameter:
                    found.append(value)
            elif isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found += tensors_in(value)
    return found


#: Told apart by their type alone, which is faster than ``isinstance``.
_KINDS = frozenset(
    {
        Tensor,
        Parameter,
        list,
        tuple,
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
    }
)
