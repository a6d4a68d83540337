"""Our ``Record`` as AMCT's ``record.txt``, with a line for all that it cannot say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roundoff.export.amct.read_record import ANY, BITS, SMALLEST_FACTOR
from roundoff.export.amct.text_format import message_class, write_message
from roundoff.quantize import Entry, Record, format_named
from roundoff.site import Site


def write_record(record: Record, path: str | Path) -> list[str]:
    """Write what AMCT's format can say of a record; return a line for all it cannot.

    A layer is written when its weight has a static integer format of 4, 6, 7 or 8 bits
    with zero point 0, one scale or (convolutions) one for each output channel, and its
    input a static integer format of 4, 8 or 16 bits per tensor. Operands of other
    operators (the two of an addition, say), floating-point formats, groups and dynamic
    scales have no words there. Fingerprint, steps and reasons of skipped sites are not
    part of AMCT's record.
    """
    from google.protobuf import text_format

    lost: list[str] = []
    rows = message_class("record")()
    readers = _readers(record)
    used: set[tuple[str, str]] = set()
    written: list[Entry] = []
    for layer, weight, site in _layers(record, lost):
        entry = readers.get(site)
        if entry is not None:
            used.add((entry.name, site))
        reason = _why_not(weight, site) or _why_not_input(entry, weight)
        if reason:
            lost.append(f"{site}: {reason}")
            continue
        row = rows.record.add(key=layer)
        if entry is not None:
            written.append(entry)
            _fill_input(row.value, entry)
        if weight is not None:
            lost += _fill_weight(row.value, weight, site, record)
    _add_caches(record, rows, lost)
    lost += _unread_lines(record, readers, used)
    narrow = sum(entry.format == "int8" for entry in written)
    if narrow:
        lost.append(
            f"{narrow} inputs are int8 with codes from -127: AMCT clips them one code lower, at -128"
        )
    names = {entry.name for entry in record.entries}
    lost += [
        f"{name}: balance factors of a weight without an entry"
        for name in record.balance
        if name not in names
    ]
    _put_back(rows, record.about.get("amct", {}))
    for text in record.about.get("amct_prune_record", ()):
        text_format.Parse(text, rows.prune_record.add())
    write_message(rows, path)
    return lost


def _fill_input(value: Any, entry: Entry) -> None:
    value.scale_d = entry.scale[0]
    value.offset_d = (entry.zero_point or (0,))[0]
    value.act_type = f"INT{format_named(entry.format).width}"


def _fill_weight(value: Any, weight: Entry, site: str, record: Record) -> list[str]:
    """Write a weight's scales and balance factors; return a line for what is lost."""
    scales = weight.scale
    if site.endswith("/linear") and len(set(scales)) == 1:
        scales = scales[:1]
    value.scale_w.extend(scales)
    value.offset_w.extend([0] * len(scales))
    value.wts_type = f"INT{format_named(weight.format).width}"
    factors = record.balance.get(weight.name, ())
    if not all(SMALLEST_FACTOR <= f <= 1 / SMALLEST_FACTOR for f in factors):
        return [f"{weight.name}: balance factors outside AMCT's [2^-23, 2^23]"]
    value.tensor_balance_factor.extend(factors)
    return []


def _unread_lines(
    record: Record, readers: Mapping[str, Entry], used: set[tuple[str, str]]
) -> Iterator[str]:
    """Yield a line for each activation that no layer of AMCT reads, or another reads too."""
    for entry in record.entries:
        if entry.kind != "activation":
            continue
        sites = _sites(entry)
        others = [
            site
            for site in sites
            if (entry.name, site) not in used and readers.get(site, entry) is entry
        ]
        if others or not sites:
            by = f", read by {', '.join(others)}" if others else ""
            yield f"{entry.name}{by}: AMCT quantizes only inputs of layers with weights"


def _readers(record: Record) -> dict[str, Entry]:
    """Return the entry that each site reads as its first operand.

    One made for this operand goes before one of its source.
    """
    readers: dict[str, Entry] = {}
    activations = [entry for entry in record.entries if entry.kind == "activation"]
    for entry in activations:
        if ":" not in entry.name:
            readers.update(dict.fromkeys(entry.sites, entry))
    for entry in activations:
        site, colon, operand = entry.name.rpartition(":")
        if colon and operand == "0":
            readers[site] = entry
    return readers


def _layers(record: Record, lost: list[str]) -> list[tuple[str, Entry | None, str]]:
    """Return (layer, weight, site) of each layer that AMCT may know, in order.

    Pooling layers have no weight, and come last. Weights that belong to no layer go to
    ``lost``.
    """
    layers: list[tuple[str, Entry | None, str]] = []
    for entry in record.entries:
        if entry.kind != "weight":
            continue
        for site in entry.sites or (f"{entry.name.rpartition('.')[0]}/{ANY}",):
            layer = Site.parse(site).module
            if entry.name == f"{layer}.weight" and "#" not in site:
                layers.append((layer, entry, site))
            else:
                lost.append(
                    f"{site}: {entry.name} is not the weight of a module called once, as AMCT's layers are"
                )
    weighted = {site for _, _, site in layers}
    pools = [site for site in _pooling_sites(record) if site not in weighted]
    return layers + [(Site.parse(site).module, None, site) for site in pools]


def _pooling_sites(record: Record) -> list[str]:
    """Return the sites of poolings in modules whose input has an entry."""
    sites: list[str] = []
    for entry in record.entries:
        if entry.kind == "activation":
            sites += _sites(entry)
    pools = [s for s in sites if s.endswith("/avg_pool2d") and not s.startswith("/")]
    return list(dict.fromkeys(pools))


def _sites(entry: Entry) -> tuple[str, ...]:
    """Who reads an activation: an operand's own call where the entry doesn't say."""
    return entry.sites or (
        (entry.name.rpartition(":")[0],) if ":" in entry.name else ()
    )


def _why_not(weight: Entry | None, site: str) -> str:
    """Say why AMCT's record cannot hold this weight; empty if it can."""
    if weight is None:
        return ""
    fmt = format_named(weight.format)
    if fmt.one_quantum != 1.0 or fmt.width not in BITS["wts_type"] or not weight.scale:
        return f"weights in {weight.format}: AMCT has INT4, INT6, INT7 and INT8 with static scales"
    if any(weight.zero_point or ()):
        return "its weight has a zero point: AMCT has none but 0"
    channels = (
        r"per_axis\(1\)|per_block\(\d+, 1, .*"
        if "/conv_transpose" in site
        else r"per_axis\(0\)"
    )
    if len(weight.scale) > 1 and not re.fullmatch(channels, weight.granularity):
        return f"its weight is {weight.granularity}: AMCT has one scale a tensor or an output channel"
    if site.endswith("/linear") and len(set(weight.scale)) > 1:
        return "a linear layer with scales per channel: AMCT has these for convolutions only"
    return ""


def _why_not_input(entry: Entry | None, weight: Entry | None) -> str:
    if entry is None:
        return (
            f"weights only, in {weight.format}: AMCT needs the scale of the input too"
            if weight is not None
            else ""
        )
    fmt = format_named(entry.format)
    if fmt.one_quantum != 1.0 or fmt.width not in BITS["act_type"]:
        return f"its input in {entry.format}: AMCT has INT4, INT8 and INT16"
    if entry.dynamic or entry.granularity != "per_tensor":
        return f"its input is {'dynamic' if entry.dynamic else entry.granularity}: AMCT has one static scale"
    return ""


def _add_caches(record: Record, rows: Any, lost: list[str]) -> None:
    for entry in record.entries:
        if entry.kind != "kv_cache":
            continue
        if entry.format not in ("int8_asym", "int8_full", "int8") or entry.dynamic:
            lost.append(
                f"{entry.name}: a KV cache in {entry.format}: AMCT has static INT8"
            )
            continue
        layer = Site.parse(entry.name).module
        row = next(
            (row for row in rows.record if row.key == layer), None
        ) or rows.record.add(key=layer)
        row.kv_cache_value.scale.extend(entry.scale)
        row.kv_cache_value.offset.extend(entry.zero_point or [0] * len(entry.scale))


def _put_back(rows: Any, kept: Mapping[str, Mapping[str, Any]]) -> None:
    for layer, fields in kept.items():
        row = next(
            (row for row in rows.record if row.key == layer), None
        ) or rows.record.add(key=layer)
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(row.value, name).extend(value)
            else:
                setattr(row.value, name, value)
