"""What an optimizer is given: its class, the settings of its groups, their parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from roundoff.record.model_facts import listed, named_parameters
from roundoff.record.module_paths import Paths
from roundoff.record.set_up import Fact

#: The learning rate is noted of every step.
_OF_STEPS = ("lr", "params", "initial_lr", "param_names")

_HOLDS = re.compile(r"\d+ tensors, (\d{1,18}) values", re.ASCII)


def optimizer_facts(of: str, optimizer: Any) -> Iterator[Fact]:
    """Yield the settings of an optimizer and of each of its groups."""
    yield Fact(group="optimizer", of=of, name="class", value=type(optimizer).__name__)
    groups = optimizer.param_groups
    yield Fact(group="optimizer", of=of, name="groups", value=str(len(groups)))
    for place, group in enumerate(groups):
        where = f"{of}, group {place}" if place else of
        sizes = [p.numel() for p in group["params"]]
        count = f"{len(sizes)} tensors, {sum(sizes)} values"
        yield Fact(group="optimizer", of=where, name="holds", value=count)
        for name, value in group.items():
            text = None if name in _OF_STEPS else _text(value)
            if text is not None:
                yield Fact(group="optimizer", of=where, name=name, value=text)


def values_held(holds: str) -> int:
    """Return how many values a group holds, of its fact ``holds``; 0 for another text.

    >>> values_held("2 tensors, 72 values")
    72
    """
    match = _HOLDS.fullmatch(holds)
    return int(match[1]) if match else 0


def without_optimizer(
    modules: Sequence[nn.Module], paths: Paths, optimizers: Iterable[Any]
) -> str:
    """Return the names of the parameters that train and that no optimizer holds."""
    held = {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    names = {
        name
        for root in modules
        for name, parameter in named_parameters(root, paths)
        if parameter.requires_grad and id(parameter) not in held
    }
    return listed(sorted(names))


def _text(value: Any) -> str | None:
    """Return plain settings as text; None for what is none."""
    if isinstance(value, torch.Tensor):
        return str(value.item()) if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        parts = [_text(each) for each in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if value is None or isinstance(value, bool | int | float | str):
        return str(value)
    return None
