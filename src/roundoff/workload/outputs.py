"""The tensors whose error counts: the model's output, a part of it, a named site, or the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from roundoff.errors import WorkloadError


def named_tensors(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """The floating-point tensors in an output, by the path that leads to each.

    Looks into mappings, sequences, dataclasses and Hugging Face outputs (which are mappings); a single tensor
    has the path ``output``. Tensors without elements are left out.

    >>> import torch
    >>> list(named_tensors({"logits": torch.ones(2), "hidden": (torch.ones(1), torch.arange(3))}))
    ['logits', 'hidden.0']
    """
    found: dict[str, Tensor] = {}
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            found[prefix or "output"] = value
        return found
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = [(str(index), item) for index, item in enumerate(value)]
    for key, item in items:
        found |= named_tensors(item, f"{prefix}.{key}" if prefix else key)
    return found


def target_tensors(output: Any, target: str | None) -> dict[str, Tensor]:
    """The part of ``output`` that ``target`` names, all of it when None.

    Raises ``WorkloadError`` when there is no floating-point tensor, or none of that name.
    """
    found = named_tensors(output)
    if not found:
        raise WorkloadError(
            "the model's output has no floating-point tensor, so rounding cannot be measured in it",
            where="forward",
            expected="a tensor, or a tuple, dict or dataclass that holds one",
            got=type(output).__name__
            + (f" of {output.dtype}" if isinstance(output, Tensor) else ""),
            do="return the scores before argmax or rounding (define forward(model, batch) in the workload)",
        )
    if target is None:
        return found
    chosen = {
        name: t
        for name, t in found.items()
        if name == target or name.startswith(target + ".")
    }
    if not chosen:
        raise WorkloadError(
            f"the output has no part named {target!r}",
            where="target",
            expected="one of " + ", ".join(found) + ", 'loss', or the name of a site",
            got=repr(target),
        )
    return chosen
