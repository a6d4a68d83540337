"""What a model says of itself: its modules' settings, their modes, what is frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from roundoff.record.module_paths import Paths, module_path
from roundoff.record.set_up import Fact

#: Modules whose settings are noted.
MOST_MODULES = 5000
#: Names that a fact lists.
MOST_NAMES = 200
#: Characters of a module's settings.
_LONGEST = 300


def model_facts(modules: Sequence[nn.Module], paths: Paths) -> Iterator[Fact]:
    """Yield the settings of every module that holds no others, and what is frozen."""
    if not modules:
        return
    number = 0
    for root in modules:
        yield Fact(group="model", of="", name="class", value=type(root).__name__)
        for name, module in root.named_modules():
            number += 1
            if number > MOST_MODULES:
                return
            settings = settings_of(module)
            if settings:
                path = module_path(name, "", root)
                yield Fact(group="module", of=path, name="settings", value=settings)
    yield Fact(
        group="model",
        of="",
        name="frozen parameters",
        value=listed(_names(modules, paths, trainable=False)),
    )
    total = sum(p.numel() for root in modules for p in root.parameters())
    yield Fact(group="model", of="", name="parameters", value=str(total))
    kinds = sorted({_kind(p) for root in modules for p in root.parameters()})
    yield Fact(group="model", of="", name="parameter dtypes", value=", ".join(kinds))


def settings_of(module: nn.Module) -> str:
    """Return class and settings of a module that holds no others, as it prints them.

    >>> settings_of(nn.Dropout(0.1))
    'Dropout(p=0.1, inplace=False)'
    """
    if next(module.children(), None) is not None:
        return ""
    words = " ".join(module.extra_repr().split())
    return f"{type(module).__name__}({words})"[:_LONGEST]


def mode_of(modules: Sequence[nn.Module]) -> str:
    """Return in words which modules train, and which are in evaluation mode."""
    flags = {
        module_path(name, "", root): module.training
        for root in modules
        for name, module in root.named_modules()
    }
    if not flags:
        return ""
    evaluating = [
        name or "the model" for name, training in flags.items() if not training
    ]
    if not evaluating:
        return "training"
    if len(evaluating) == len(flags):
        return "evaluation"
    return f"training, but evaluation in {listed(evaluating, 8)}"


def listed(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Return names in one text; ``none`` for none.

    >>> listed([]), listed(["a", "b", "c"], 2)
    ('none', 'a, b and 1 more')
    """
    if not names:
        return "none"
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"


def _names(modules: Sequence[nn.Module], paths: Paths, *, trainable: bool) -> list[str]:
    names = {
        name
        for root in modules
        for name, parameter in named_parameters(root, paths)
        if parameter.requires_grad is trainable
    }
    return sorted(names)


def named_parameters(
    root: nn.Module, paths: Paths
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of a model with the names that a recording gives them."""
    for name, parameter in root.named_parameters():
        yield paths.name_of(parameter) or module_path(name, "", root), parameter


def _kind(parameter: torch.Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")
