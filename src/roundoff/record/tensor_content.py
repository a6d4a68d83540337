"""What a tensor holds, in a hash and five numbers, at a cost that has a limit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from roundoff.ops import plain
from roundoff.record.disk.tensors import content_hash
from roundoff.record.set_up import TensorContent

#: Bytes of a tensor of the CPU that is hashed whole.
LARGEST_WHOLE = 2**25
#: Elements that statistics are computed of, and that are hashed of a larger tensor.
SAMPLE = 2**14
#: Entries of the first dimension that are hashed each, and their bytes together.
MOST_ENTRIES = 256
LARGEST_ENTRIES = 2**25


def content_of(name: str, tensor: Tensor, *, entries: bool = False) -> TensorContent:
    """Return what a tensor holds now.

    With ``entries`` also a hash of each entry of the first dimension, of at most
    ``MOST_ENTRIES``. What cannot be read, or has no plain bytes, has a reason.

    >>> content = content_of("x", torch.tensor([1.0, 3.0]))
    >>> content.mean, content.std, content.whole
    (2.0, 1.0, True)
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested:
        return TensorContent(name=name, dtype=dtype, shape=(), reason="nested")
    shape = tuple(tensor.shape)
    try:
        values, reason = plain(tensor)
        if values is None:
            return TensorContent(name=name, dtype=dtype, shape=shape, reason=reason)
        return _content(name, dtype, shape, values.detach(), entries=entries)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        got = str(error).partition("\n")[0][:200]
        return TensorContent(name=name, dtype=dtype, shape=shape, reason=got)


def _content(
    name: str, dtype: str, shape: tuple[int, ...], values: Tensor, *, entries: bool
) -> TensorContent:
    size = values.numel() * values.element_size()
    whole = values.device.type == "cpu" and size <= LARGEST_WHOLE
    sample = _sample(values)
    digest = content_hash(values if whole else sample)
    hashes = _entry_hashes(values) if entries and whole else ()
    return TensorContent(
        name=name,
        dtype=dtype,
        shape=shape,
        hash=digest,
        whole=whole,
        entries=hashes,
        **_statistics(sample),
    )


def _sample(values: Tensor) -> Tensor:
    """Return at most ``SAMPLE`` elements, at equal distances, on the CPU."""
    count = values.numel()
    if count <= SAMPLE:
        return values.cpu()
    flat = values.reshape(-1) if values.is_contiguous() else values.flatten()
    return flat[:: -(-count // SAMPLE)].cpu()


def _statistics(sample: Tensor) -> dict[str, Any]:
    if sample.is_complex() or not sample.numel():
        return {}
    wide = sample.to(torch.float64).reshape(-1).numpy()
    finite = wide[np.isfinite(wide)]
    if not finite.size:
        return {}
    mean = float(finite.mean())
    spread = float(finite.std())
    if not math.isfinite(spread):
        return {"min": float(finite.min()), "max": float(finite.max())}
    return {
        "mean": mean,
        "std": spread,
        "min": float(finite.min()),
        "max": float(finite.max()),
    }


def _entry_hashes(values: Tensor) -> tuple[str, ...]:
    if values.dim() < 2 or not 1 < len(values) <= MOST_ENTRIES or not values.numel():
        return ()
    if values.numel() * values.element_size() > LARGEST_ENTRIES:
        return ()
    rows = values.contiguous().reshape(len(values), -1).view(torch.uint8)
    return tuple(xxhash.xxh3_64_hexdigest(row.tobytes()) for row in rows.numpy())
