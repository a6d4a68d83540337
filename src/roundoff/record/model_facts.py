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
#: Characters of a word, and entries of a list, that are a setting.
_WORD = 40
_ENTRIES = 16


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
    for root in modules:
        tied = tied_parameters(root)
        if tied != "none":
            of = "" if len(modules) == 1 else type(root).__name__
            yield Fact(group="model", of=of, name="tied parameters", value=tied)
    total = sum(p.numel() for root in modules for p in root.parameters())
    yield Fact(group="model", of="", name="parameters", value=str(total))
    kinds = sorted({_kind(p) for root in modules for p in root.parameters()})
    yield Fact(group="model", of="", name="parameter dtypes", value=", ".join(kinds))


def settings_of(module: nn.Module) -> str:
    """Return class and settings of a module: as it prints them, and its own attributes
    that are plain values where it prints none; "" for one that only holds others.

    >>> settings_of(nn.Dropout(0.1))
    'Dropout(p=0.1, inplace=False)'
    >>> settings_of(nn.CrossEntropyLoss(label_smoothing=0.1))
    "CrossEntropyLoss(reduction='mean', ignore_index=-100, label_smoothing=0.1)"
    """
    words = " ".join(module.extra_repr().split())
    if not words:
        words = plain_attributes(module)
    has_others = next(module.children(), None) is not None
    if has_others and not words:
        return ""
    return f"{type(module).__name__}({words})"[:_LONGEST]


def plain_attributes(thing: object) -> str:
    """Return the public attributes of an object that are numbers, flags or short words.

    >>> plain_attributes(nn.ReLU())
    'inplace=False'
    """
    return ", ".join(
        f"{name}={value!r}"
        for name, value in vars(thing).items()
        if not name.startswith("_") and name != "training" and is_plain(value)
    )


def is_plain(value: object) -> bool:
    """Return True for numbers, flags and words that are no places of files."""
    if isinstance(value, str):
        return len(value) <= _WORD and not set(value) & {"/", "\\", "\n"}
    if isinstance(value, tuple | list):
        return 0 < len(value) <= _ENTRIES and all(map(is_plain, value))
    return isinstance(value, bool | int | float)


def tied_parameters(root: nn.Module) -> str:
    """Return the names that modules share one parameter under; ``none`` for none."""
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [" = ".join(sorted(each)) for each in names.values() if len(each) > 1]
    return listed(sorted(tied))


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


def constant_buffers(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of a model that no forward pass changes: not those of
    normalizations by running statistics."""
    for prefix, module in root.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            continue
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            yield module_path(name, "", root), buffer


def _kind(parameter: torch.Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")
