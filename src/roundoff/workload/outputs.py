"""The tensors whose error counts: the model's output, a part of it, a named site, or the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from roundoff.errors import WorkloadError, did_you_mean, nearest
from roundoff.workload.output_names import is_output


def named_tensors(value: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the floating-point tensors in an output, by the path that leads to each.

    Looks into mappings, sequences, dataclasses and Hugging Face outputs (which are
    mappings); a single tensor has the path ``output``. Tensors without elements are
    left out.

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


@dataclasses.dataclass(frozen=True)
class Judged:
    """What of a model's output rounding is judged by.

    Attributes:
        part: name of a tensor, one above it, or a glob; None for the whole output.
        apart: patterns of outputs that are judged by themselves (see ``output_names``),
            and names of numbers that count although they stand beside larger tensors
            (see ``left_out``).
    """

    part: str | None = None
    apart: tuple[str, ...] = ()

    def tensors(self, output: Any) -> dict[str, Tensor]:
        """Return the floating-point tensors of an output that count; none is an empty result.

        >>> import torch
        >>> output = {"loss": torch.tensor(0.5), "logits": torch.ones(2, 3)}
        >>> list(Judged().tensors(output)), list(Judged("loss").tensors(output))
        (['logits'], ['loss'])
        """
        tensors = named_tensors(output)
        if self.part is not None:
            return {n: t for n, t in tensors.items() if is_output(self.part, n)}
        aside = self.left_out(output)
        return {name: t for name, t in tensors.items() if name not in aside}

    def left_out(self, output: Any) -> dict[str, str]:
        """Return the numbers beside larger tensors that do not count, with the reason."""
        if self.part is not None:
            return {}
        numbers = left_out(named_tensors(output))
        return {n: why for n, why in numbers.items() if n not in self.apart}


def left_out(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the tensors that are no target unless they are asked for, with the reason.

    These are numbers without axes, and those called ``loss``, where a larger tensor
    stands beside them: a loss that the model computes from labels in the batch, a
    penalty, a temperature.
    """
    numbers = {name for name, t in tensors.items() if _is_side_number(name, t)}
    if len(numbers) == len(tensors):
        return {}
    reason = "one number beside larger tensors, a loss say: a target only by name"
    return {name: reason for name in tensors if name in numbers}


def _is_side_number(name: str, tensor: Tensor) -> bool:
    is_loss = name.rpartition(".")[2] == "loss"
    return tensor.ndim == 0 or (is_loss and tensor.numel() == 1)


def target_tensors(
    output: Any, target: str | None, apart: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Return the part of ``output`` that ``target`` names; when None what ``Judged`` counts.

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
    chosen = Judged(target, apart).tensors(output)
    if not chosen:
        raise WorkloadError(
            f"the output has no part named {target!r}",
            where="of",
            expected="one of " + ", ".join(tensors) + ", 'loss', or the name of a site",
            got=repr(target),
            do=did_you_mean(nearest(str(target), tensors)),
        )
    return chosen
