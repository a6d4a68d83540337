"""How a recorded program was set up: settings, seeds, data, weights, model and optimizer.

Each rank of a run has its own, in ``set_up.json``; numbers of every step of the program,
recorded or not, stand in ``steps.txt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from roundoff.errors import RunError
from roundoff.foreign import fault_of

#: Version of what is noted; a reader takes its own and those before it.
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One setting of the program.

    Attributes:
        group: ``environment``, ``seed``, ``model``, ``optimizer``, ``data`` ...
        of: what it is of: a module, ``optimizer 0``, ``loader 0``; may be empty.
        name: of the setting.
        value: in text.
        line: the user's, where one is known.
    """

    group: str
    of: str = ""
    name: str
    value: str
    line: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorContent:
    """What a tensor held, without its values.

    Attributes:
        name: of the parameter, or the place in a batch.
        dtype: ``float32``.
        shape: of the whole tensor.
        hash: of dtype, shape and bytes; None where they could not be read.
        whole: ``hash`` is of all elements, not of a strided sample.
        mean: as the others of a strided sample of the finite elements.
        std: of the population.
        min: the smallest.
        max: the largest.
        entries: a hash of each entry of the first dimension; empty for none.
        reason: why there is no hash.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    hash: str | None = None
    whole: bool = True
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    entries: tuple[str, ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as a loader gave it, or as the model received it.

    Attributes:
        source: ``loader 0``, or ``model``.
        number: counted from 0 for each source.
        indexes: of the samples in the data set, as the sampler gave them; empty where
            it gives none.
        tensors: its tensors.
        step: of the program, in which it came.
    """

    source: str
    number: int
    indexes: tuple[int, ...] = ()
    tensors: tuple[TensorContent, ...] = ()
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """How one rank of a program was set up.

    Attributes:
        version: of what is noted.
        facts: its settings.
        batches: the first ones of each source.
        parameters: before the first update.
        stopped: why not all was noted; None where it was.
    """

    version: int = VERSION
    facts: tuple[Fact, ...] = ()
    batches: tuple[Batch, ...] = ()
    parameters: tuple[TensorContent, ...] = ()
    stopped: str | None = None

    @classmethod
    def from_json(cls, content: Any, where: str) -> SetUp:
        """Read the object of ``set_up.json``. Raises ``RunError`` for anything else."""
        try:
            set_up = cls(
                version=content["version"],
                facts=tuple(_record(Fact, entry) for entry in content["facts"]),
                batches=tuple(_batch(entry) for entry in content["batches"]),
                parameters=tuple(_tensor(entry) for entry in content["parameters"]),
                stopped=content.get("stopped"),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(where, f"{type(error).__name__}: {error}") from error
        fault = fault_of(set_up)
        if fault is not None:
            raise _unreadable(where, fault)
        if set_up.version > VERSION:
            raise _unreadable(where, f"version {set_up.version}, of a later roundoff")
        return set_up


def _record(kind: Any, entry: Mapping[str, Any]) -> Any:
    """Return a record with the fields that the object has; others are left out."""
    names = {each.name for each in fields(kind)}
    return kind(**{name: value for name, value in entry.items() if name in names})


def _tensor(entry: Mapping[str, Any]) -> TensorContent:
    values = {**entry, "shape": tuple(entry["shape"])}
    values["entries"] = tuple(entry.get("entries", ()))
    content: TensorContent = _record(TensorContent, values)
    return content


def _batch(entry: Mapping[str, Any]) -> Batch:
    values = {**entry, "indexes": tuple(entry.get("indexes", ()))}
    values["tensors"] = tuple(_tensor(each) for each in entry["tensors"])
    batch: Batch = _record(Batch, values)
    return batch


def _unreadable(where: str, got: str) -> RunError:
    return RunError("the set-up of a run cannot be read", where=where, got=got)
