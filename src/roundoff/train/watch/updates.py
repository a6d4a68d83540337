"""Which parameters an optimizer changes, and how many updates are too small to be kept.

A few elements of each parameter are compared before and after a step, in a few steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

#: The steps of each optimizer in which elements are compared.
LOOKED_AT = frozenset({2, 4, 8})
#: So many elements of a parameter are compared.
ELEMENTS = 256
#: A parameter that is the same after so many steps of its optimizer never changes.
LAST_LOOK = 8
#: Updates are lost where more than this share of elements with a gradient stays.
LOST_SHARE = 0.5


@dataclass
class _Before:
    """A parameter before a step: some elements, and which of them have a gradient."""

    parameter: Tensor
    values: Tensor
    has_gradient: Tensor


@dataclass
class _Counts:
    """What was seen of the steps of one optimizer."""

    steps: int = 0
    first: dict[int, Tensor] = field(default_factory=dict)
    before: list[_Before] = field(default_factory=list)


@dataclass(frozen=True)
class LostUpdates:
    """A share of elements stayed as it was in a step, though each had a gradient."""

    share: float
    dtype: torch.dtype
    lr: float


class UpdateWatch:
    """Compares parameters before and after steps.

    Attributes:
        owned: identities of the parameters of every optimizer that has stepped.
    """

    def __init__(self) -> None:
        self.owned: set[int] = set()
        self._counts: weakref.WeakKeyDictionary[Optimizer, _Counts] = (
            weakref.WeakKeyDictionary()
        )

    def begin(self, optimizer: Optimizer) -> None:
        """Note the parameters of an optimizer that is about to step."""
        counts = self._counts.setdefault(optimizer, _Counts())
        counts.steps += 1
        parameters = list(_parameters(optimizer))
        if counts.steps == 1 or len(parameters) != len(counts.first):
            self.owned.update(map(id, parameters))
        if counts.steps == 1:
            counts.first = {id(p): _elements(p).clone() for p in parameters}
        if counts.steps in LOOKED_AT:
            counts.before = [_before(p) for p in parameters if p.grad is not None]

    def end(self, optimizer: Optimizer) -> LostUpdates | None:
        """Return the updates that were lost in the step; None where most were kept, or
        where the step is not looked at.
        """
        counts = self._counts.get(optimizer)
        if counts is None or not counts.before:
            return None
        before = counts.before
        counts.before = []
        lr = _rate(optimizer)
        if lr == 0:
            return None
        return _lost(before, lr)

    def unchanged(self, optimizer: Optimizer) -> list[int]:
        """Return the identities of the parameters that no step has changed; once, after
        ``LAST_LOOK`` steps, and none before.
        """
        counts = self._counts.get(optimizer)
        if counts is None or counts.steps != LAST_LOOK or _rate(optimizer) == 0:
            return []
        first = counts.first
        counts.first = {}
        same = []
        for parameter in _parameters(optimizer):
            values = first.get(id(parameter))
            if values is not None and _is_same(values, _elements(parameter)):
                same.append(id(parameter))
        return same


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.is_floating_point() and parameter.layout is torch.strided:
                yield parameter


def _rate(optimizer: Optimizer) -> float:
    """Return the largest learning rate of the groups."""
    rates = [float(group.get("lr", 1.0)) for group in optimizer.param_groups]
    return max(rates, default=0.0)


def _elements(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor, evenly spread."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()
    if flat.dim() != 1:
        flat = flat.flatten()
    step = max(flat.numel() // ELEMENTS, 1)
    return flat[::step][:ELEMENTS]


def _before(parameter: Tensor) -> _Before:
    gradient = parameter.grad
    assumed = parameter if gradient is None or gradient.is_sparse else gradient
    has_gradient = _elements(assumed) != 0
    return _Before(parameter, _elements(parameter).clone(), has_gradient)


def _lost(before: list[_Before], lr: float) -> LostUpdates | None:
    """Return the share of updates that changed nothing, for the narrowest format."""
    changed: dict[torch.dtype, list[Tensor]] = {}
    for each in before:
        after = _elements(each.parameter)
        stays = (after == each.values) & each.has_gradient
        counts = torch.stack([stays.sum(), each.has_gradient.sum()]).cpu()
        changed.setdefault(each.parameter.dtype, []).append(counts)
    for dtype, pairs in changed.items():
        lost, moving = torch.stack(pairs).sum(0).tolist()
        if moving and lost / moving > LOST_SHARE:
            return LostUpdates(lost / moving, dtype, lr)
    return None


def _is_same(first: Tensor, second: Tensor) -> bool:
    is_alike = first.shape == second.shape and first.device == second.device
    return is_alike and bool(torch.equal(first, second))


def unowned(names: Mapping[int, str], owned: set[int]) -> list[str]:
    """Return the names of parameters that have had a gradient and no optimizer."""
    return [name for identity, name in names.items() if identity not in owned]
