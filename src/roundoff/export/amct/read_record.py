"""AMCT's ``record.txt`` as our ``Record``: the scales of a model that AMCT quantized.

``x ~ scale * (code - offset)`` with signed codes, so an offset is a zero point, sign
included. ``scale_d`` and ``offset_d`` belong to the input of the layer that ``key``
names by its module path, ``scale_w`` to its weight: one, or one for each output channel.
Codes have the full range, [-128, 127]: formats ``int8_full`` and ``int8_asym`` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundoff.errors import QuantizationError, examples
from roundoff.export.amct.text_format import Lines, read_text
from roundoff.formats import PerBlock
from roundoff.quantize import Entry, Fingerprint, Record, fingerprint, granularity_name
from roundoff.site import Site

if TYPE_CHECKING:
    from torch import nn

#: Module class → the operator of its site.
OPERATORS = {
    **{f"Conv{d}d": f"conv{d}d" for d in (1, 2, 3)},
    **{f"ConvTranspose{d}d": f"conv_transpose{d}d" for d in (1, 2, 3)},
    "Linear": "linear",
    "AvgPool2d": "avg_pool2d",
    "LSTM": "lstm",
    "GRU": "gru",
}
#: A pattern for any operator, where no model says it.
ANY = "*"
#: Bits that AMCT has for inputs and weights.
BITS = {"act_type": (4, 8, 16), "wts_type": (4, 6, 7, 8)}
#: AMCT's lower bound of balance factors, fp32's machine epsilon; the upper is its inverse.
SMALLEST_FACTOR = 2.0**-23
_RECURRENT = ("scale_h", "offset_h", "scale_r", "offset_r")
#: Fields without a place in our Record: ``about["amct"]`` keeps them to be written back.
_KEPT = ("shift_bit", "skip_fusion", "dst_type", "fakequant_precision_mode")


def read_record(path: str | Path, model: nn.Module | None = None) -> Record:
    """Return our record of an AMCT ``record.txt``.

    The input of layer ``c1`` becomes the entry ``c1/conv2d:0``, its weight
    ``c1.weight``, a KV cache's factors ``k_proj/linear``. Fields without a place in our
    record (``skip_fusion``, pruning records, factors of recurrent layers) are kept in
    ``about["amct"]``, and
    :func:`roundoff.export.amct.write_record.write_record` writes them back.

    Args:
        path: the file.
        model: checks layer names and channel counts, gives the record its fingerprint,
            and lists layers without factors as skipped. Without it the operator is
            unknown and written ``*``.

    Raises:
        QuantizationError: all that
            :func:`roundoff.export.amct.text_format.read_text` refuses, a layer that
            stands twice or that the model lacks, factors that AMCT itself would refuse
            (a scale without its offset, an offset of a weight other than 0, counts that
            differ, values out of range), always with the line.
    """
    message, lines = read_text(path, "record")
    layers = dict(model.named_modules()) if model is not None else None
    reading = _Reading(layers)
    first_lines: dict[str, int] = {}
    for index, row in enumerate(message.record):
        at = _FieldPlace(str(path), lines, ("record", index))
        _check_row(row, at, first_lines)
        first_lines[row.key] = at.line("key")
        reading.add(row, at)
    skipped = [*reading.skipped, *_without_factors(layers or {}, first_lines)]
    return Record(
        fingerprint(model) if model is not None else Fingerprint(),
        tuple(reading.entries),
        tuple(skipped),
        (),
        reading.balance,
        _about(message, reading.kept),
    )


class _Reading:
    """The parts of a ``Record``, filled row by row."""

    def __init__(self, layers: Mapping[str, Any] | None) -> None:
        self.layers = layers
        self.entries: list[Entry] = []
        self.balance: dict[str, tuple[float, ...]] = {}
        self.skipped: list[tuple[str, str]] = []
        #: Layer → its fields without a place in our record.
        self.kept: dict[str, dict[str, Any]] = {}

    def add(self, row: Any, at: _FieldPlace) -> None:
        site = _site(row.key, self.layers, at)
        if row.HasField("kv_cache_value"):
            self.entries.append(_cache(site, row.kv_cache_value, at))
        if not row.HasField("value"):
            return
        kept = _fields(row.value, _KEPT)
        if _is_recurrent(row.value):
            kept = _fields(row.value)
            reason = "factors of a recurrent layer: kept for AMCT, not applied here"
            self.skipped.append((str(site), reason))
        else:
            self._add_layer(site, row.value, at)
        if kept:
            self.kept[row.key] = kept

    def _add_layer(self, site: Site, value: Any, at: _FieldPlace) -> None:
        """Add the input and the weight; neither where the record has only flags."""
        module = (self.layers or {}).get(site.module)
        _check_input(value, at)
        if value.HasField("scale_d"):
            self.entries.append(_input_entry(site, value, at))
        _check_weight(site, value, at, module)
        if value.scale_w:
            self.entries.append(_weight_entry(site, value, at, module))
        if value.tensor_balance_factor:
            factors = _balance(value, at, module)
            self.balance[f"{site.module}.weight"] = factors


def _without_factors(
    layers: Mapping[str, Any], first_lines: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Return the layers of a model that AMCT's record lacks, with the reason."""
    lacking = []
    for name, module in layers.items():
        operator = OPERATORS.get(type(module).__name__)
        if operator is not None and name not in first_lines:
            lacking.append((f"{name}/{operator}", "no factors in AMCT's record"))
    return lacking


def _check_row(row: Any, at: _FieldPlace, first_lines: Mapping[str, int]) -> None:
    has_value = row.HasField("value") or row.HasField("kv_cache_value")
    if not row.HasField("key") or not has_value:
        raise QuantizationError(
            "a record without key or value",
            where=at(),
            expected='key: "LAYER" value { ... }',
        )
    if row.key in first_lines:
        raise QuantizationError(
            f"layer {row.key} stands twice",
            where=at("key"),
            got=f"the first is at line {first_lines[row.key]}",
            do="keep one",
        )


def _is_recurrent(value: Any) -> bool:
    names = {field.name for field, _ in value.ListFields()}
    return not names.isdisjoint(_RECURRENT)


def _about(message: Any, kept: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what our record has no place for, by its key in ``about``."""
    from google.protobuf import text_format

    about: dict[str, Any] = {"source": "AMCT record.txt"}
    if kept:
        about["amct"] = kept
    if message.prune_record:
        about["amct_prune_record"] = [
            text_format.MessageToString(row, as_one_line=True)
            for row in message.prune_record
        ]
    return about


class _FieldPlace:
    """Where a field of one record stands."""

    def __init__(self, path: str, lines: Lines, prefix: tuple[str | int, ...]) -> None:
        self.path = path
        self.lines = lines
        self.prefix = prefix

    def line(self, *fields: str) -> int:
        key = self.prefix + tuple(part for name in fields for part in (name, 0))
        return self.lines.get(key) or self.lines.get(self.prefix, 0)

    def __call__(self, *fields: str) -> str:
        return f"{self.path}, line {self.line(*fields)}"


def _site(layer: str, layers: Mapping[str, Any] | None, at: _FieldPlace) -> Site:
    if layers is None:
        return Site(layer, ANY)
    if layer not in layers:
        raise QuantizationError(
            f"the model has no layer {layer}",
            where=at("key"),
            expected=f"the path of a module, such as {examples(layer, layers)}",
            do="read the record of this model, or leave model= out",
        )
    kind = type(layers[layer]).__name__
    return Site(layer, OPERATORS.get(kind, ANY))


def _check_input(value: Any, at: _FieldPlace) -> None:
    for field, other in (("scale_d", "offset_d"), ("offset_d", "scale_d")):
        if value.HasField(field) and not value.HasField(other):
            raise QuantizationError(
                f"{field} without {other}",
                where=at("value", field),
                expected="both, as AMCT does",
            )


def _check_weight(site: Site, value: Any, at: _FieldPlace, module: Any) -> None:
    if len(value.scale_w) != len(value.offset_w):
        raise QuantizationError(
            "as many offset_w as scale_w are needed",
            where=at("value", "scale_w"),
            got=f"{len(value.scale_w)} scale_w, {len(value.offset_w)} offset_w",
        )
    offsets = [offset for offset in value.offset_w if offset]
    if offsets:
        raise QuantizationError(
            "offset_w is not 0",
            where=at("value", "offset_w"),
            expected="0: AMCT has no other",
            got=str(offsets[0]),
        )
    if module is None or len(value.scale_w) <= 1:
        return
    channels = _output_channels(site, module)
    if len(value.scale_w) != channels:
        raise QuantizationError(
            "the number of scale_w is not that of output channels",
            where=at("value", "scale_w"),
            expected=f"1 or {channels}",
            got=str(len(value.scale_w)),
        )


def _output_channels(site: Site, module: Any) -> int:
    if "transpose" in site.operator:
        return int(module.weight.shape[1] * module.groups)
    return int(module.weight.shape[0])


def _granularity(site: Site, module: Any) -> str:
    """Return the granularity of one scale for each output channel.

    Those of a transposed convolution with groups lie in blocks of rows.
    """
    if "transpose" not in site.operator:
        return "per_axis(0)"
    if module is None or module.groups == 1:
        return "per_axis(1)"
    rows, _, *kernel = module.weight.shape
    return granularity_name(PerBlock((rows // module.groups, 1, *kernel)))


def _input_entry(site: Site, value: Any, at: _FieldPlace) -> Entry:
    bits = _bits(value, "act_type", at).removeprefix("INT")
    is_asymmetric = value.offset_d != 0
    try:
        return Entry(
            f"{site}:0",
            "activation",
            f"int{bits}_asym" if is_asymmetric else f"int{bits}_full",
            "per_tensor",
            (value.scale_d,),
            (value.offset_d,) if is_asymmetric else None,
            (str(site),),
            "amct",
        )
    except QuantizationError as error:
        is_offset = error.expected is not None and "integers" in error.expected
        field = "offset_d" if is_offset else "scale_d"
        raise _at_field(error, field, at) from error


def _weight_entry(site: Site, value: Any, at: _FieldPlace, module: Any) -> Entry:
    name = _bits(value, "wts_type", at)
    # Retraining writes dst_type, calibration act_type and wts_type; INT4 weights of the
    # former have only that.
    if value.HasField("dst_type") and not value.HasField("wts_type"):
        name = value.dst_type
    granularity = "per_tensor"
    if len(value.scale_w) > 1:
        granularity = _granularity(site, module)
    try:
        return Entry(
            f"{site.module}.weight",
            "weight",
            f"int{name.removeprefix('INT')}_full",
            granularity,
            tuple(value.scale_w),
            None,
            (str(site),),
            "amct",
        )
    except QuantizationError as error:
        raise _at_field(error, "scale_w", at) from error


def _bits(value: Any, field: str, at: _FieldPlace) -> str:
    """Return a type such as INT8. Raises ``QuantizationError`` where AMCT has no such."""
    name = str(getattr(value, field))
    choices = [f"INT{bits}" for bits in BITS[field]]
    if name not in choices:
        raise QuantizationError(
            f"no such {field}",
            where=at("value", field),
            got=repr(name),
            expected=", ".join(choices),
        )
    return name


def _at_field(
    error: QuantizationError, field: str, at: _FieldPlace
) -> QuantizationError:
    """Return the error of an entry with the line of its field."""
    return QuantizationError(
        f"{field}: {error.what}",
        where=at("value", field),
        expected=error.expected,
        got=error.got,
    )


def _cache(site: Site, value: Any, at: _FieldPlace) -> Entry:
    if not value.scale or len(value.scale) != len(value.offset):
        raise QuantizationError(
            "as many offsets as scales are needed",
            where=at("kv_cache_value"),
            got=f"{len(value.scale)} scale, {len(value.offset)} offset",
        )
    granularity = "per_axis(-1)" if len(value.scale) > 1 else "per_tensor"
    try:
        return Entry(
            str(site),
            "kv_cache",
            "int8_asym",
            granularity,
            tuple(value.scale),
            tuple(value.offset),
            (),
            "amct",
        )
    except QuantizationError as error:
        raise QuantizationError(
            error.what,
            where=at("kv_cache_value"),
            expected=error.expected,
            got=error.got,
        ) from error


def _balance(value: Any, at: _FieldPlace, module: Any) -> tuple[float, ...]:
    factors = tuple(value.tensor_balance_factor)
    bad = [f for f in factors if not SMALLEST_FACTOR <= f <= 1 / SMALLEST_FACTOR]
    if bad:
        raise QuantizationError(
            "a balance factor out of range",
            where=at("value", "tensor_balance_factor"),
            expected="2^-23 to 2^23",
            got=str(bad[0]),
        )
    features = getattr(module, "in_features", len(factors))
    channels = getattr(module, "in_channels", features)
    if channels != len(factors):
        raise QuantizationError(
            "as many balance factors as input channels are needed",
            got=str(len(factors)),
            where=at("value", "tensor_balance_factor"),
            expected=str(channels),
        )
    return factors


def _fields(value: Any, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the fields that are set, as plain data; ``names`` leaves out the others."""
    fields: dict[str, Any] = {}
    for field, content in value.ListFields():
        if names is None or field.name in names:
            is_plain = isinstance(content, str | bool | int | float)
            fields[field.name] = content if is_plain else list(content)
    return fields
