"""Record: every scale and zero point of a quantized model, for which model, and how it came about; one TOML file.

A weight is named by its parameter, ``body.0.c1.weight``. An activation is named by the site that makes it,
``body.0/relu#1``, or by one operand of one call, ``body.0.c1/conv2d:0``, where only that reader sees it quantized.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from roundoff.errors import QuantizationError, examples
from roundoff.files import atomic_path, toml_string, toml_value
from roundoff.quantize.entry import Entry as Entry
from roundoff.quantize.entry import format_named as format_named
from roundoff.quantize.entry import granularity_name as granularity_name
from roundoff.quantize.entry import granularity_named as granularity_named

if TYPE_CHECKING:
    from torch import nn

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """One step of ``quantize``: SQNR of the output before and after in dB, and a note."""

    name: str
    before: float
    after: float
    note: str = ""


@dataclass(frozen=True)
class Fingerprint:
    """Which model a record belongs to: the shapes of its parameters, their hash, and, if asked for, that of the values."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    hash: str = ""
    values: str = ""


@dataclass(frozen=True)
class Record:
    """What quantization decided about a model.

    Attributes:
        model: the model it was made for; without shapes (read from a file of another tool) only entries are checked.
        entries: qparams of weights and activations.
        skipped: sites that stay in high precision, each with the reason.
        steps: what the pipeline tried and what each step gained.
        balance: by weight name, the factor of each input channel: the weight is multiplied by it, its input divided
            (SmoothQuant, arXiv 2211.10438, equation 3).
        about: anything else, strings, numbers, booleans, lists and mappings of them.
    """

    model: Fingerprint
    entries: tuple[Entry, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    steps: tuple[PipelineStep, ...] = ()
    balance: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for entry in self.entries:
            if entry.name in seen:
                raise QuantizationError(
                    "two entries have this name",
                    where=f"record, {entry.name}",
                    do="join them: the sites that read one value are listed in one entry",
                )
            seen.add(entry.name)

    def __getitem__(self, name: str) -> Entry:
        """The entry with this name. Raises ``QuantizationError`` with the nearest names."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise QuantizationError(
            "the record has no such entry",
            where=f"record, {name}",
            expected=examples(name, [e.name for e in self.entries]) or "none",
        )

    def check(self, model: nn.Module) -> None:
        """Raise ``QuantizationError`` if this record was made for another model, naming what differs.

        Values of weights are compared only where the record has their hash.
        """
        own = _shapes(model)
        made_for = self.model.shapes
        lines = [
            f"{name} {tuple(shape)}: the model has none; nearest: {examples(name, own) or 'none'}"
            for name, shape in made_for.items()
            if name not in own
        ]
        lines += [
            f"{name}: {tuple(made_for[name])} in the record, {own[name]} in the model"
            for name in made_for
            if name in own and tuple(made_for[name]) != own[name]
        ]
        lines += [
            f"{name} {own[name]}: only in the model"
            for name in own
            if made_for and name not in made_for
        ]
        for entry in self.entries:
            if (
                entry.kind == "weight"
                and entry.name not in own
                and entry.name not in made_for
            ):
                lines.append(
                    f"{entry.name}: an entry without a parameter; nearest: {examples(entry.name, own) or 'none'}"
                )
            elif entry.kind == "weight" and entry.scale and not made_for:
                try:
                    entry.qparams(own[entry.name])
                except QuantizationError as error:
                    lines.append(
                        f"{entry.name}: {error.what}, shape {own[entry.name]}, {len(entry.scale)} scales"
                    )
        if lines:
            shown = "\n    ".join(
                lines[:10]
                + ([f"and {len(lines) - 10} more"] if len(lines) > 10 else [])
            )
            raise QuantizationError(
                f"the record was made for another model, {len(lines)} parameters differ:\n    {shown}",
                where="record",
                do="check the copy that was quantized (.model of what quantize returned), or quantize this one",
            )
        if self.model.values and _values(model) != self.model.values:
            raise QuantizationError(
                "the record was made for other weights: the same shapes, other values",
                where="record",
                do="load the weights that were calibrated, or calibrate again",
            )

    def save(self, path: str | Path) -> None:
        """Write the record as TOML, whole or not at all; every number is read back exactly."""
        with atomic_path(path) as temporary:
            temporary.write_text(_text(self), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read a record. Raises ``QuantizationError`` naming what is wrong and where."""
        where = str(path)
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise QuantizationError(
                f"not a readable record: {error}",
                where=where,
                expected="a TOML file written by roundoff quantize",
            ) from error
        if data.get("schema") != SCHEMA or data.get("kind") != "quantization record":
            raise QuantizationError(
                "not a quantization record of this version",
                where=where,
                expected=f'schema = {SCHEMA} and kind = "quantization record"',
                got=f"schema = {data.get('schema')!r}, kind = {data.get('kind')!r}",
            )
        try:
            model = data.get("model", {})
            shapes = {
                str(name): tuple(shape)
                for name, shape in model.get("shapes", {}).items()
            }
            return cls(
                Fingerprint(
                    shapes, str(model.get("hash", "")), str(model.get("values", ""))
                ),
                tuple(_entry(row) for row in data.get("entry", [])),
                tuple(
                    (str(site), str(reason)) for site, reason in data.get("skipped", [])
                ),
                tuple(
                    PipelineStep(
                        str(s["name"]),
                        float(s["before"]),
                        float(s["after"]),
                        str(s.get("note", "")),
                    )
                    for s in data.get("step", [])
                ),
                {
                    str(name): tuple(map(float, factors))
                    for name, factors in data.get("balance", {}).items()
                },
                data.get("about", {}),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise QuantizationError(
                f"the record is incomplete: {type(error).__name__}: {error}",
                where=where,
                expected="a TOML file written by roundoff quantize",
            ) from error


def fingerprint(model: nn.Module, *, values: bool = False) -> Fingerprint:
    """Names and shapes of the model's parameters with their hash; ``values`` adds one of parameters and buffers.

    Raises ``QuantizationError`` for lazy parameters, which have no shape yet.

    >>> fingerprint(torch.nn.Linear(3, 2)).shapes
    {'weight': (2, 3), 'bias': (2,)}
    """
    shapes = _shapes(model)
    text = "".join(f"{name} {list(shape)}\n" for name, shape in sorted(shapes.items()))
    return Fingerprint(
        shapes,
        xxhash.xxh3_128_hexdigest(text.encode()),
        _values(model) if values else "",
    )


def _entry(row: Mapping[str, Any]) -> Entry:
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


def _text(record: Record) -> str:
    """TOML: names that may hold any character are quoted; what an entry leaves at its default has no line."""
    lines = [
        "# Scales and zero points of a quantized model: real = scale * (code - zero_point).",
        f"schema = {SCHEMA}",
        'kind = "quantization record"',
        f"skipped = {_rows(record.skipped)}",
        "",
        "[about]",
    ]
    lines += [
        f"{toml_string(k)} = {toml_value(v)}"
        for k, v in record.about.items()
        if v is not None
    ]
    lines += [
        "",
        "[model]",
        f"hash = {toml_string(record.model.hash)}",
        f"values = {toml_string(record.model.values)}",
    ]
    lines += ["", "[model.shapes]"] + [
        f"{toml_string(n)} = {list(s)}" for n, s in record.model.shapes.items()
    ]
    lines += ["", "[balance]"]
    lines += [
        f"{toml_string(n)} = {toml_value(tuple(map(float, f)))}"
        for n, f in record.balance.items()
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
        lines += ["", "[[entry]]"]
        for key in (
            "name",
            "kind",
            "format",
            "granularity",
            "scale",
            "zero_point",
            "sites",
            "observer",
            "dynamic",
        ):
            value = getattr(entry, key)
            if value is not None and value not in ((), "", False):
                lines.append(f"{key} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    text = "".join(f"\n  {toml_value(row)}," for row in rows)
    return f"[{text}\n]" if text else "[]"


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of every parameter, under every name it has."""
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
    digest = xxhash.xxh3_128()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous().reshape(-1)
            digest.update(f"{name} {plain.dtype} ".encode())
            digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()
