"""The tensors whose error counts: the model's output, a part of it, a named site, or the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from roundoff.errors import WorkloadError


def named_tensors(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the floating-point tensors in an output, by the path that leads to each.

    Looks into mappings, sequences, dataclasses and Hugging Face outputs (which are mappings); a
    single tensor has the path ``output``. Tensors without elements are left out.

    >>> import torch
    >>> list(named_tensors({"logits": torch.ones(2), "hidden": (torch.ones(1), torch.arange(3))}))
    ['logits', 'hidden.0']
    """
    tensors = all_named_tensors(value, prefix)
    return {name: t for name, t in tensors.items() if t.is_floating_point()}


def all_named_tensors(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return all tensors in an output, as ``named_tensors`` names them.

    >>> import torch
    >>> list(all_named_tensors({"logits": torch.ones(2), "label": torch.tensor(1)}))
    ['logits', 'label']
    """
    if isinstance(value, Tensor):
        return {} if _is_empty(value) else {prefix or "output": value}
    tensors: dict[str, Tensor] = {}
    for key, item in _items(value):
        tensors |= all_named_tensors(item, f"{prefix}.{key}" if prefix else key)
    return tensors


def _is_empty(tensor: Tensor) -> bool:
    """Return True for a tensor without elements; sizes that are traced count as some."""
    sizes: tuple[Any, ...] = tuple(tensor.shape)
    return any(isinstance(size, int) and size == 0 for size in sizes)


def _items(value: Any) -> list[tuple[str, Any]]:
    """The parts of a container by key; none of any other value."""
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [(str(index), item) for index, item in enumerate(value)]
    return []


def target_tensors(output: Any, target: str | None) -> dict[str, Tensor]:
    """Return the part of ``output`` that ``target`` names, all of it when None.

    Raises ``WorkloadError`` when there is no floating-point tensor, or none of that name.
    """
    tensors = named_tensors(output)
    if not tensors:
        dtype = f" of {output.dtype}" if isinstance(output, Tensor) else ""
        raise WorkloadError(
            "the model's output has no floating-point tensor, so rounding cannot be measured in it",
            where="forward",
            expected="a tensor, or a tuple, dict or dataclass that holds one",
            got=f"{type(output).__name__}{dtype}",
            do="return the scores before argmax or rounding (define forward(model, batch) in the workload)",
        )
    if target is None:
        return tensors
    inside = f"{target}."
    chosen = {n: t for n, t in tensors.items() if n == target or n.startswith(inside)}
    if not chosen:
        raise WorkloadError(
            f"the output has no part named {target!r}",
            where="target",
            expected="one of " + ", ".join(tensors) + ", 'loss', or the name of a site",
            got=repr(target),
        )
    return chosen
