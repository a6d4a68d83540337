"""AMCT's ``record.txt`` as our ``Record``: the scales of a model that AMCT quantized.

``x ~ scale * (code - offset)`` with signed codes, so an offset is a zero point, sign included. ``scale_d`` and
``offset_d`` belong to the input of the layer that ``key`` names by its module path, ``scale_w`` to its weight: one, or
one for each output channel. Codes have the full range, [-128, 127]: formats ``int8_full`` and ``int8_asym`` here.
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

#: module class → the operator of its site
OPERATORS = {
    **{f"Conv{d}d": f"conv{d}d" for d in (1, 2, 3)},
    **{f"ConvTranspose{d}d": f"conv_transpose{d}d" for d in (1, 2, 3)},
    "Linear": "linear",
    "AvgPool2d": "avg_pool2d",
    "LSTM": "lstm",
    "GRU": "gru",
}
#: where no model says the operator: a pattern for any
ANY = "*"
#: bits that AMCT knows of inputs and weights
BITS = {"act_type": (4, 8, 16), "wts_type": (4, 6, 7, 8)}
#: AMCT's bound of balance factors, fp32's machine epsilon; its inverse is the upper one
SMALLEST_FACTOR = 2.0**-23
_RECURRENT = ("scale_h", "offset_h", "scale_r", "offset_r")
#: what our Record has no place for: kept word for word in ``about["amct"]``, and written back
_KEPT = ("shift_bit", "skip_fusion", "dst_type", "fakequant_precision_mode")


def read_record(path: str | Path, model: nn.Module | None = None) -> Record:
    """Our record of an AMCT ``record.txt``.

    The input of layer ``c1`` becomes the entry ``c1/conv2d:0``, its weight ``c1.weight``, a KV cache's factors
    ``k_proj/linear``. Without ``model`` the operator is unknown and written ``*``; with it layer names and channel counts
    are checked, the record has the model's fingerprint, and layers without factors are listed as skipped. What our
    record has no place for (``skip_fusion``, pruning records, factors of recurrent layers) is kept in ``about["amct"]``
    and written back by :func:`roundoff.export.amct.write_record.write_record`.

    Raises:
        QuantizationError: what :func:`roundoff.export.amct.text_format.read_text` refuses, a layer that stands twice or that
            the model lacks, factors that AMCT itself would refuse (a scale without its offset, an offset of a weight
            other than 0, counts that differ, values out of range), always with the line.
    """
    message, lines = read_text(path, "record")
    layers = dict(model.named_modules()) if model is not None else None
    entries: list[Entry] = []
    balance: dict[str, tuple[float, ...]] = {}
    skipped: list[tuple[str, str]] = []
    kept: dict[str, dict[str, Any]] = {}
    first_lines: dict[str, int] = {}
    for index, row in enumerate(message.record):
        at = _FieldPlace(str(path), lines, ("record", index))
        _check_row(row, at, first_lines)
        layer = row.key
        first_lines[layer] = at.line("key")
        site = _site(layer, layers, at)
        if row.HasField("kv_cache_value"):
            entries.append(_cache(site, row.kv_cache_value, at))
        if not row.HasField("value"):
            continue
        kept_fields = _fields(row.value, _KEPT)
        if _is_recurrent(row.value):
            kept_fields = _fields(row.value)
            reason = "factors of a recurrent layer: kept for AMCT, not applied here"
            skipped.append((str(site), reason))
        else:
            entries += _layer(site, row.value, at, layers)
            if row.value.tensor_balance_factor:
                factors = _balance(site.module, row.value, at, layers)
                balance[f"{site.module}.weight"] = factors
        if kept_fields:
            kept[layer] = kept_fields
    for name, module in (layers or {}).items():
        operator = OPERATORS.get(type(module).__name__)
        if operator is not None and name not in first_lines:
            skipped.append((f"{name}/{operator}", "no factors in AMCT's record"))
    model_of = fingerprint(model) if model is not None else Fingerprint()
    about = _about(message, kept)
    return Record(model_of, tuple(entries), tuple(skipped), (), balance, about)


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
    return bool(
        {field.name for field, _ in value.ListFields()}.intersection(_RECURRENT)
    )


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


def _layer(
    site: Site, value: Any, at: _FieldPlace, layers: Mapping[str, Any] | None
) -> list[Entry]:
    """The entries of a layer's input and weight; none where the record has only flags."""
    found = []
    if value.HasField("scale_d") != value.HasField("offset_d"):
        there, other = (
            ("scale_d", "offset_d")
            if value.HasField("scale_d")
            else ("offset_d", "scale_d")
        )
        raise QuantizationError(
            f"{there} without {other}",
            where=at("value", there),
            expected="both, as AMCT does",
        )
    if value.HasField("scale_d"):
        found.append(
            _entry(
                f"{site}:0",
                "activation",
                (value.scale_d,),
                (value.offset_d,),
                value,
                at,
                site,
            )
        )
    if len(value.scale_w) != len(value.offset_w):
        raise QuantizationError(
            "as many offset_w as scale_w are needed",
            where=at("value", "scale_w"),
            got=f"{len(value.scale_w)} scale_w, {len(value.offset_w)} offset_w",
        )
    if any(value.offset_w):
        raise QuantizationError(
            "offset_w is not 0",
            where=at("value", "offset_w"),
            expected="0: AMCT has no other",
            got=str(next(o for o in value.offset_w if o)),
        )
    if value.scale_w:
        module = (layers or {}).get(site.module)
        if module is not None and len(value.scale_w) > 1:
            axis = 1 if "transpose" in site.operator else 0
            channels = module.weight.shape[axis] * (module.groups if axis else 1)
            if len(value.scale_w) != channels:
                raise QuantizationError(
                    "the number of scale_w is not that of output channels",
                    where=at("value", "scale_w"),
                    expected=f"1 or {channels}",
                    got=str(len(value.scale_w)),
                )
        found.append(
            _entry(
                f"{site.module}.weight",
                "weight",
                tuple(value.scale_w),
                None,
                value,
                at,
                site,
                module,
            )
        )
    return found


def _granularity(site: Site, module: Any) -> str:
    """Of one scale for each output channel; those of a transposed convolution with groups lie in blocks of rows."""
    if "transpose" not in site.operator:
        return "per_axis(0)"
    if module is None or module.groups == 1:
        return "per_axis(1)"
    rows, _, *kernel = module.weight.shape
    return granularity_name(PerBlock((rows // module.groups, 1, *kernel)))


def _entry(
    name: str,
    kind: str,
    scale: tuple[float, ...],
    offset: tuple[int, ...] | None,
    value: Any,
    at: _FieldPlace,
    site: Site,
    module: Any = None,
) -> Entry:
    field = "act_type" if kind == "activation" else "wts_type"
    said = getattr(value, field)
    if said not in {f"INT{bits}" for bits in BITS[field]}:
        raise QuantizationError(
            f"no such {field}",
            where=at("value", field),
            got=repr(said),
            expected=", ".join(f"INT{bits}" for bits in BITS[field]),
        )
    # Retraining writes dst_type, calibration act_type and wts_type; INT4 weights of the former have only that.
    if (
        kind == "weight"
        and value.HasField("dst_type")
        and not value.HasField("wts_type")
    ):
        said = value.dst_type
    bits = said.removeprefix("INT")
    fmt = f"int{bits}_asym" if offset is not None and offset[0] else f"int{bits}_full"
    granularity = (
        _granularity(site, module)
        if kind == "weight" and len(scale) > 1
        else "per_tensor"
    )
    try:
        return Entry(
            name,
            kind,
            fmt,
            granularity,
            scale,
            offset if fmt.endswith("asym") else None,
            (str(site),),
            "amct",
        )
    except QuantizationError as error:
        which = "scale_d" if kind == "activation" else "scale_w"
        if (
            offset is not None
            and error.expected is not None
            and "integers" in error.expected
        ):
            which = "offset_d"
        raise QuantizationError(
            f"{which}: {error.what}",
            where=at("value", which),
            expected=error.expected,
            got=error.got,
        ) from error


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


def _balance(
    layer: str, value: Any, at: _FieldPlace, layers: Mapping[str, Any] | None
) -> tuple[float, ...]:
    factors = tuple(value.tensor_balance_factor)
    bad = [f for f in factors if not SMALLEST_FACTOR <= f <= 1 / SMALLEST_FACTOR]
    if bad:
        raise QuantizationError(
            "a balance factor out of range",
            where=at("value", "tensor_balance_factor"),
            expected="2^-23 to 2^23",
            got=str(bad[0]),
        )
    module = (layers or {}).get(layer)
    channels = getattr(
        module, "in_channels", getattr(module, "in_features", len(factors))
    )
    if channels != len(factors):
        raise QuantizationError(
            "as many balance factors as input channels are needed",
            got=str(len(factors)),
            where=at("value", "tensor_balance_factor"),
            expected=str(channels),
        )
    return factors


def _fields(value: Any, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The fields that are set, as plain data."""
    return {
        field.name: list(v) if not isinstance(v, str | bool | int | float) else v
        for field, v in value.ListFields()
        if names is None or field.name in names
    }
