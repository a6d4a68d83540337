"""Weights set to zero: which ones, and zero they stay while the network is trained on.

Scores say how much a weight matters; masks keep the highest. A weight's magnitude (Han
et al., arXiv:1506.02626), or ``|w·∂L/∂w|``, the first-order change of the loss when it
goes (Molchanov et al., arXiv:1611.06440, equation 7; on one batch of an untrained
network it is SNIP, arXiv:1810.02340, equation 5). N:M structure keeps the N highest of
every M in a row along the input channels (2:4: Mishra et al., arXiv:2104.08378); an
incomplete last group is filled with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.preserve import preserve
from roundoff.quantize.channels.fold_batch_norm import CONVOLUTIONS, TRANSPOSED
from roundoff.workload import Workload


@dataclass(frozen=True)
class Sparsity:
    """How many of a parameter's elements are zero."""

    name: str
    elements: int
    zeros: int

    @property
    def share(self) -> float:
        """Zeros over elements; 0 for an empty tensor."""
        return self.zeros / self.elements if self.elements else 0.0


def prunable(model: nn.Module) -> dict[str, Tensor]:
    """The weights of linear layers and convolutions by name, each once."""
    kinds = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
    owners = {
        id(m.weight)
        for m in model.modules()
        if isinstance(m, kinds) and isinstance(m.weight, nn.Parameter)
    }
    return {name: p for name, p in model.named_parameters() if id(p) in owners}


def magnitude_scores(model: nn.Module) -> dict[str, Tensor]:
    """``|w|`` of every prunable weight."""
    return {name: weight.detach().abs() for name, weight in prunable(model).items()}


def taylor_scores(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[Any, Any], Tensor],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> dict[str, Tensor]:
    """``|w·∂L/∂w|`` of every prunable weight, the mean over the batches; ``loss(output, batch)``.

    The model runs in evaluation mode and is left as it was. Raises
    ``QuantizationError`` where no gradient reaches a weight or a score is NaN or
    infinite, and ``WorkloadError`` without batches.
    """
    workload = Workload(model, batches, forward=forward, loss=loss)
    weights = prunable(model)
    scores = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    with preserve(model):
        model.eval()
        for weight in weights.values():
            weight.requires_grad_(True)
        for batch in workload.batches:
            with torch.enable_grad():
                value = loss(workload.run(batch), batch)
                gradients = torch.autograd.grad(
                    value, list(weights.values()), allow_unused=True
                )
            for (name, weight), gradient in zip(
                weights.items(), gradients, strict=True
            ):
                if gradient is None:
                    raise QuantizationError(
                        "no gradient reaches this weight",
                        where=name,
                        do="leave it out, or give a loss that depends on it",
                    )
                scores[name] += (weight.detach() * gradient).abs() / len(
                    workload.batches
                )
    _check_finite(scores)
    return scores


def unstructured_masks(
    scores: Mapping[str, Tensor],
    sparsity: float,
    *,
    scope: Literal["global", "layer"] = "global",
) -> dict[str, Tensor]:
    """Boolean masks that keep all but the ``round(sparsity * n)`` lowest scores, of all
    weights together or of each.

    Of equal scores the first ones go, so the count is exact.

    Raises:
        QuantizationError: a sparsity outside [0, 1), another scope, a score that is NaN
            or infinite.

    Example:
        >>> unstructured_masks({"w": torch.tensor([3.0, 1.0, 2.0, 1.0])}, 0.5)
        {'w': tensor([ True, False,  True, False])}
    """
    if not 0.0 <= sparsity < 1.0:
        raise QuantizationError(
            "not a sparsity", expected="0 <= sparsity < 1", got=repr(sparsity)
        )
    if scope not in ("global", "layer"):
        raise QuantizationError(
            "unknown scope", expected="global or layer", got=repr(scope)
        )
    _check_finite(scores)
    flat = {name: score.flatten() for name, score in scores.items()}
    if scope == "global" and flat:
        sizes = [f.numel() for f in flat.values()]
        kept = torch.split_with_sizes(
            _keep_highest(torch.cat([f.cpu() for f in flat.values()]), sparsity), sizes
        )
    else:
        kept = tuple(_keep_highest(f, sparsity) for f in flat.values())
    return {
        n: k.view(scores[n].shape).to(scores[n].device)
        for n, k in zip(flat, kept, strict=True)
    }


def _keep_highest(flat: Tensor, sparsity: float) -> Tensor:
    mask = torch.ones(flat.shape, dtype=torch.bool, device=flat.device)
    mask[flat.argsort(stable=True)[: round(sparsity * flat.numel())]] = False
    return mask


def n_m_mask(score: Tensor, n: int = 2, m: int = 4, *, axis: int = 1) -> Tensor:
    """A boolean mask that keeps the ``n`` highest of every ``m`` scores in a row along ``axis``.

    An incomplete last group counts as filled with zeros, which go first. Of equal
    scores the first are kept.

    Args:
        score: any shape; magnitudes or other scores of at least 0.
        n: how many are kept, ``0 < n <= m``.
        m: of how many; AMCT's "4:2" (M4N2) is ``n=2, m=4``.
        axis: of the input channels: 1 of a linear or convolution weight, 0 of a
            transposed convolution's.

    Example:
        >>> n_m_mask(torch.tensor([[1.0, 4.0, 2.0, 3.0, 9.0, 8.0]])).int()
        tensor([[0, 1, 0, 1, 1, 1]], dtype=torch.int32)
    """
    _check_n_m(score, n, m, axis)
    groups, length = _groups(score, m, axis)
    order = torch.argsort(groups, dim=-1, descending=True, stable=True)
    mask = torch.zeros(groups.shape, dtype=torch.bool, device=score.device)
    mask.scatter_(-1, order[..., :n], True)
    return mask.flatten(-2)[..., :length].movedim(-1, axis)


def check_n_m(weight: Tensor, n: int = 2, m: int = 4, *, axis: int = 1) -> int:
    """The number of groups of ``m`` along ``axis`` that hold more than ``n`` values
    other than 0; 0 when the structure holds.

    >>> check_n_m(torch.tensor([[1.0, 0.0, 2.0, 0.0, 5.0, 6.0]])), check_n_m(torch.ones(2, 8))
    (0, 4)
    """
    _check_n_m(weight, n, m, axis)
    groups, _ = _groups(weight != 0, m, axis)
    return int((groups.sum(-1) > n).sum())


def n_m_masks(
    model: nn.Module,
    n: int = 2,
    m: int = 4,
    *,
    scores: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """N:M masks of all prunable weights, by magnitude or the given scores, along their
    input channels.
    """
    transposed = {id(t.weight) for t in model.modules() if isinstance(t, TRANSPOSED)}
    scores = magnitude_scores(model) if scores is None else scores
    weights = prunable(model)
    return {
        name: n_m_mask(score, n, m, axis=0 if id(weights[name]) in transposed else 1)
        for name, score in scores.items()
    }


def sparsify_(model: nn.Module, masks: Mapping[str, Tensor]) -> list[Sparsity]:
    """Set what the masks leave out to zero, and again before every forward pass, until
    :func:`finish_`.

    Parameters stay the same objects under the same names, so any optimizer and autocast
    work on. Masks given for a second time replace the first.

    Raises:
        QuantizationError: a name or a shape that the model hasn't; the model is then as
            before.
    """
    parameters = dict(model.named_parameters())
    for name, mask in masks.items():
        if (
            name not in parameters
            or parameters[name].shape != mask.shape
            or mask.dtype != torch.bool
        ):
            raise QuantizationError(
                "no parameter for this mask",
                where=name,
                got=f"{tuple(mask.shape)} {mask.dtype}",
                expected="a boolean tensor of a parameter's name and shape",
            )
    keep = _keeper(model)
    if keep is None:
        keep = _Keep()
        model.register_forward_pre_hook(keep)
    keep.masks.update({name: mask.detach().clone() for name, mask in masks.items()})
    keep(model)
    return [_sparsity(name, parameters[name]) for name in masks]


def finish_(model: nn.Module) -> list[Sparsity]:
    """Make the zeros final: apply the masks once more and forget them.

    Raises ``QuantizationError`` when there are none.
    """
    keep = _keeper(model)
    if keep is None:
        raise QuantizationError(
            "this model has no masks",
            where=type(model).__name__,
            do="sparsify_(model, masks) first",
        )
    keep(model)
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is keep:
            del model._forward_pre_hooks[key]
    return [_sparsity(name, model.get_parameter(name)) for name in keep.masks]


class _Keep:
    """Forward pre-hook that multiplies by the masks; copied with the model."""

    def __init__(self) -> None:
        self.masks: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, model: nn.Module, *_: Any) -> None:
        for name, mask in self.masks.items():
            parameter = model.get_parameter(name)
            if mask.device != parameter.device:
                mask = self.masks[name] = mask.to(parameter.device)
            # data: the values that a graph has saved are masked already, so this
            # changes none of them
            parameter.data.masked_fill_(~mask, 0.0)


def _keeper(model: nn.Module) -> _Keep | None:
    return next(
        (hook for hook in model._forward_pre_hooks.values() if isinstance(hook, _Keep)),
        None,
    )


def _sparsity(name: str, tensor: Tensor) -> Sparsity:
    return Sparsity(name, tensor.numel(), int((tensor == 0).sum()))


def _groups(tensor: Tensor, m: int, axis: int) -> tuple[Tensor, int]:
    """``[..., groups, m]`` along an axis moved to the back and filled with zeros, and
    the axis's length.
    """
    last = tensor.movedim(axis, -1)
    length = last.shape[-1]
    return nn.functional.pad(last, (0, math.ceil(length / m) * m - length)).unflatten(
        -1, (-1, m)
    ), length  # type: ignore[no-untyped-call]


def _check_n_m(tensor: Tensor, n: int, m: int, axis: int) -> None:
    if not 0 < n <= m:
        raise QuantizationError(
            "not an N:M structure", expected="0 < n <= m", got=f"{n}:{m}"
        )
    if not -tensor.ndim <= axis < tensor.ndim:
        raise QuantizationError(
            "no such axis", expected=f"an axis of {tuple(tensor.shape)}", got=str(axis)
        )
    if not bool(torch.isfinite(tensor).all()):
        raise QuantizationError(
            "NaN or Inf among the weights or scores",
            got=f"{tuple(tensor.shape)} {tensor.dtype}",
        )


def _check_finite(scores: Mapping[str, Tensor]) -> None:
    for name, score in scores.items():
        if not bool(torch.isfinite(score).all()):
            raise QuantizationError(
                "NaN or Inf among the scores",
                where=name,
                got=f"{tuple(score.shape)} {score.dtype}",
            )
