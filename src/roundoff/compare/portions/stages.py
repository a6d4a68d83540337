"""Stages of a pipeline: a rank that has some of the layers counts them anew.

Its first layer is ``0`` whatever place it has in the model of the one process. The
parameters say which it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.loop.loaded_values import GRADIENT, values_before
from roundoff.compare.records.recorded_rows import RecordedRow

#: By module, the first value of each of its parameters by its own name.
_Modules = dict[str, dict[str, RecordedRow]]


def named_as_whole(
    whole: RecordedStep, part: RecordedStep, known: dict[str, str]
) -> RecordedStep:
    """Return the step of one rank with the names that its modules have in the whole.

    The step itself, where a module with parameters is none of the whole's, and where
    two modules of the rank hold each other's values: then it is no stage of a pipeline.

    Args:
        whole: of the one process, with tensors.
        part: of the rank, with tensors.
        known: names of an earlier step; those of this one, where there are none yet.
    """
    if not known:
        known.update(_names(whole, part))
    if not known:
        return part
    rows = {
        record: replace(
            row,
            module=_renamed(row.module, known),
            name=None if row.name is None else _of_parameter(row.name, known),
        )
        for record, row in part.rows.items()
    }
    return RecordedStep(rows, part.tensors, part.scales)


def _names(whole: RecordedStep, part: RecordedStep) -> dict[str, str]:
    """Return the whole's name of each module of a rank that has another one there."""
    ours = _modules(whole)
    theirs = _modules(part)
    names: dict[str, str] = {}
    for module, parameters in theirs.items():
        wanted = ours.get(module)
        if wanted is not None and _hold_the_same(whole, part, wanted, parameters):
            continue
        same = [
            other
            for other, values in ours.items()
            if _hold_the_same(whole, part, values, parameters)
        ]
        if len(same) != 1 or same[0] in theirs:
            return {}
        names[module] = same[0]
    return names


def _modules(step: RecordedStep) -> _Modules:
    modules: _Modules = {}
    for name, row in values_before(step.rows).items():
        module, _, own = name.rpartition(".")
        modules.setdefault(module, {})[own] = row
    return modules


def _hold_the_same(
    whole: RecordedStep,
    part: RecordedStep,
    ours: Mapping[str, RecordedRow],
    theirs: Mapping[str, RecordedRow],
) -> bool:
    if ours.keys() != theirs.keys():
        return False
    for own, row in theirs.items():
        values = whole.tensor(ours[own].record)
        other = part.tensor(row.record)
        if values is None or other is None or values.shape != other.shape:
            return False
        if not torch.equal(values, other):
            return False
    return True


def _renamed(module: str, names: Mapping[str, str]) -> str:
    """Return the name of a module; one without parameters is called like its neighbours."""
    if module in names:
        return names[module]
    if not module:
        return module
    parent, _, own = module.rpartition(".")
    for other, wanted in names.items():
        if other.rpartition(".")[0] != parent:
            continue
        above, _, number = wanted.rpartition(".")
        shift = _shift(other.rpartition(".")[2], number)
        if shift is None:
            continue
        moved = str(int(own) + shift) if own.isdecimal() else own
        return f"{above}.{moved}" if above else moved
    return module


def _shift(number: str, wanted: str) -> int | None:
    """Return how many places further a layer is; None for names that are no numbers."""
    if number.isdecimal() and wanted.isdecimal():
        return int(wanted) - int(number)
    return 0 if number == wanted else None


def _of_parameter(name: str, names: Mapping[str, str]) -> str:
    gradient = GRADIENT if name.endswith(GRADIENT) else ""
    module, dot, own = name.removesuffix(GRADIENT).rpartition(".")
    return f"{_renamed(module, names)}{dot}{own}{gradient}"
