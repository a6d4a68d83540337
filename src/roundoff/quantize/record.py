"""Record: every scale and zero point of a quantized model, and how it came about.

A record is one TOML file. A weight is named by its parameter, ``body.0.c1.weight``. An
activation is named by the site that makes it, ``body.0/relu#1``, or by one operand of one
call, ``body.0.c1/conv2d:0``, where only that reader sees it quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from roundoff.errors import QuantizationError, examples
from roundoff.files import atomic_path, toml_string, toml_value
from roundoff.foreign import fault_of, parse_toml, read_text
from roundoff.quantize.entry import Entry

if TYPE_CHECKING:
    from torch import nn

SCHEMA = 1
KIND = "quantization record"
#: Differences between record and model that an error lists.
_LISTED = 10


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """One step of ``quantize``: SQNR of the output before and after in dB, and a note."""

    name: str
    before: float
    after: float
    note: str = ""


@dataclass(frozen=True)
class Fingerprint:
    """Which model a record belongs to.

    Attributes:
        shapes: of its parameters.
        hash: of names and shapes.
        values: of parameters and buffers, if asked for.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    hash: str = ""
    values: str = ""


@dataclass(frozen=True)
class Record:
    """What quantization decided about a model.

    Attributes:
        model: the model it was made for; without shapes (read from a file of another
            tool) only entries are checked.
        entries: qparams of weights and activations.
        skipped: sites that stay in high precision, each with the reason.
        steps: what the pipeline tried and what each step gained.
        balance: by weight name, the factor of each input channel: the weight is
            multiplied by it, its input divided (SmoothQuant, arXiv 2211.10438,
            equation 3).
        about: anything else, strings, numbers, booleans, lists and mappings of them.
    """

    model: Fingerprint
    entries: tuple[Entry, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    steps: tuple[PipelineStep, ...] = ()
    balance: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names: set[str] = set()
        for entry in self.entries:
            if entry.name in names:
                raise QuantizationError(
                    "two entries have this name",
                    where=f"record, {entry.name}",
                    do="join them: the sites that read one value are listed in one entry",
                )
            names.add(entry.name)

    def __getitem__(self, name: str) -> Entry:
        """Return the entry with this name.

        Raises ``QuantizationError`` with the nearest names.
        """
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise QuantizationError(
            "the record has no such entry",
            where=f"record, {name}",
            expected=examples(name, [e.name for e in self.entries]) or "none",
        )

    def check(self, model: nn.Module) -> None:
        """Raise ``QuantizationError`` if this record was made for another model.

        The error names what differs. Values of weights are compared only where the record
        has their hash.
        """
        shapes = _shapes(model)
        differences = [*self._parameters_differ(shapes), *self._entries_differ(shapes)]
        if differences:
            listed = differences[:_LISTED]
            if len(differences) > _LISTED:
                listed.append(f"and {len(differences) - _LISTED} more")
            text = "\n    ".join(listed)
            raise QuantizationError(
                f"the record was made for another model, {len(differences)} parameters differ:\n    {text}",
                where="record",
                do="check the copy that was quantized (.model of what quantize returned), or quantize this one",
            )
        if self.model.values and _values(model) != self.model.values:
            raise QuantizationError(
                "the record was made for other weights: the same shapes, other values",
                where="record",
                do="load the weights that were calibrated, or calibrate again",
            )

    def _parameters_differ(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Say which parameters of the record the model has not, or otherwise."""
        recorded = {name: tuple(shape) for name, shape in self.model.shapes.items()}
        missing = []
        changed = []
        for name, shape in recorded.items():
            if name not in shapes:
                near = examples(name, shapes) or "none"
                missing.append(f"{name} {shape}: the model has none; nearest: {near}")
            elif shape != shapes[name]:
                changed.append(
                    f"{name}: {shape} in the record, {shapes[name]} in the model"
                )
        added = [
            f"{name} {shape}: only in the model"
            for name, shape in shapes.items()
            if recorded and name not in recorded
        ]
        return missing + changed + added

    def _entries_differ(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        """Say which entries of weights the model's parameters do not fit."""
        recorded = self.model.shapes
        for entry in self.entries:
            if entry.kind != "weight" or entry.name in recorded:
                continue
            if entry.name not in shapes:
                near = examples(entry.name, shapes) or "none"
                yield f"{entry.name}: an entry without a parameter; nearest: {near}"
            elif entry.scale and not recorded:
                shape = shapes[entry.name]
                try:
                    entry.qparams(shape)
                except QuantizationError as error:
                    yield f"{entry.name}: {error.what}, shape {shape}, {len(entry.scale)} scales"

    def save(self, path: str | Path) -> None:
        """Write the record as TOML, whole or not at all; every number is read back exactly."""
        with atomic_path(path) as temporary:
            temporary.write_text(_toml(self), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read a record.

        Raises ``QuantizationError`` naming what is wrong and where.
        """
        where = str(path)
        try:
            data = parse_toml(read_text(Path(path)))
        except (OSError, ValueError) as error:
            raise QuantizationError(
                f"not a readable record: {error}",
                where=where,
                expected="a TOML file written by roundoff quantize",
            ) from error
        if data.get("schema") != SCHEMA or data.get("kind") != KIND:
            raise QuantizationError(
                "not a quantization record of this version",
                where=where,
                expected=f'schema = {SCHEMA} and kind = "{KIND}"',
                got=f"schema = {data.get('schema')!r}, kind = {data.get('kind')!r}",
            )
        try:
            record = _read_record(data)
            fault = fault_of(record)
            if fault is not None:
                raise ValueError(fault)
            return record
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
        ) as error:
            raise QuantizationError(
                f"the record is incomplete: {type(error).__name__}: {error}",
                where=where,
                expected="a TOML file written by roundoff quantize",
            ) from error


def fingerprint(model: nn.Module, *, values: bool = False) -> Fingerprint:
    """Return names and shapes of the model's parameters with their hash.

    ``values`` adds a hash of parameters and buffers. Raises ``QuantizationError`` for lazy
    parameters, which have no shape yet.

    >>> fingerprint(torch.nn.Linear(3, 2)).shapes
    {'weight': (2, 3), 'bias': (2,)}
    """
    shapes = _shapes(model)
    text = "".join(f"{name} {list(shape)}\n" for name, shape in sorted(shapes.items()))
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return Fingerprint(shapes, digest, _values(model) if values else "")


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, under every name it has."""
    shapes = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if torch.nn.parameter.is_lazy(parameter):
            raise QuantizationError(
                "a lazy parameter has no shape yet",
                where=name,
                do="run the model once on a batch",
            )
        shapes[name] = tuple(parameter.shape)
    return shapes


def _values(model: nn.Module) -> str:
    """Hash the values of parameters and buffers."""
    digest = xxhash.xxh3_128()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous().reshape(-1)
            digest.update(f"{name} {plain.dtype} ".encode())
            digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_record(data: Mapping[str, Any]) -> Record:
    model = data.get("model", {})
    shapes = {
        str(name): tuple(shape) for name, shape in model.get("shapes", {}).items()
    }
    skipped = [(str(site), str(reason)) for site, reason in data.get("skipped", [])]
    balance = {
        str(name): tuple(map(float, factors))
        for name, factors in data.get("balance", {}).items()
    }
    return Record(
        Fingerprint(shapes, str(model.get("hash", "")), str(model.get("values", ""))),
        tuple(_read_entry(row) for row in data.get("entry", [])),
        tuple(skipped),
        tuple(_read_step(row) for row in data.get("step", [])),
        balance,
        data.get("about", {}),
    )


def _read_entry(row: Mapping[str, Any]) -> Entry:
    zero_point = row.get("zero_point")
    return Entry(
        str(row["name"]),
        str(row["kind"]),
        str(row["format"]),
        str(row["granularity"]),
        tuple(map(float, row.get("scale", ()))),
        None if zero_point is None else tuple(map(int, zero_point)),
        tuple(map(str, row.get("sites", ()))),
        str(row.get("observer", "")),
        bool(row.get("dynamic", False)),
    )


def _read_step(row: Mapping[str, Any]) -> PipelineStep:
    return PipelineStep(
        str(row["name"]),
        float(row["before"]),
        float(row["after"]),
        str(row.get("note", "")),
    )


def _toml(record: Record) -> str:
    """Write TOML.

    Names that may hold any character are quoted; what an entry leaves at its default has
    no line.
    """
    about = {k: toml_value(v) for k, v in record.about.items() if v is not None}
    shapes = {name: str(list(shape)) for name, shape in record.model.shapes.items()}
    balance = {
        name: toml_value(tuple(map(float, factors)))
        for name, factors in record.balance.items()
    }
    lines = [
        "# Scales and zero points of a quantized model: real = scale * (code - zero_point).",
        f"schema = {SCHEMA}",
        f'kind = "{KIND}"',
        f"skipped = {_toml_rows(record.skipped)}",
        *_toml_table("about", about),
        "",
        "[model]",
        f"hash = {toml_string(record.model.hash)}",
        f"values = {toml_string(record.model.values)}",
        *_toml_table("model.shapes", shapes),
        *_toml_table("balance", balance),
    ]
    for step in record.steps:
        lines += [
            "",
            "[[step]]",
            f"name = {toml_string(step.name)}",
            f"before = {toml_value(float(step.before))}",
            f"after = {toml_value(float(step.after))}",
            f"note = {toml_string(step.note)}",
        ]
    for entry in record.entries:
        lines += ["", "[[entry]]", *_toml_entry(entry)]
    return "\n".join(lines) + "\n"


def _toml_table(name: str, values: Mapping[str, str]) -> list[str]:
    """Write a table whose keys may hold any character."""
    lines = [f"{toml_string(key)} = {value}" for key, value in values.items()]
    return ["", f"[{name}]", *lines]


def _toml_entry(entry: Entry) -> Iterator[str]:
    for column in fields(entry):
        value = getattr(entry, column.name)
        if value is not None and value not in ((), "", False):
            yield f"{column.name} = {toml_value(value)}"


def _toml_rows(rows: Iterable[tuple[str, str]]) -> str:
    text = "".join(f"\n  {toml_value(row)}," for row in rows)
    return f"[{text}\n]" if text else "[]"
