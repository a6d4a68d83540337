"""Our ``Record`` as AMCT's ``record.txt``, with a line for whatever that format has no words for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundoff.export.amct.read_record import ANY, BITS, SMALLEST_FACTOR
from roundoff.export.amct.schema import message_class
from roundoff.export.amct.text import write_message
from roundoff.quantize import Entry, Record, format_named
from roundoff.site import Site


def write_record(record: Record, path: str | Path) -> list[str]:
    """Write what AMCT's format can say of a record; returns what it can't, one line each (empty: nothing was lost).

    A layer is written when its weight has a static integer format of 4, 6, 7 or 8 bits with zero point 0, one scale or
    (convolutions) one for each output channel, and its input a static integer format of 4, 8 or 16 bits per tensor.
    Operands of other operators (the two of an addition, say), floating-point formats, groups and dynamic scales have no
    words there. Fingerprint, steps and reasons of skipped sites are not part of AMCT's record.
    """
    from google.protobuf import text_format

    lost: list[str] = []
    rows = message_class("record")()
    kept: Mapping[str, Mapping[str, Any]] = record.about.get("amct", {})
    readers = _readers(record)
    used: set[tuple[str, str]] = set()
    narrow = 0
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
            narrow += entry.format == "int8"
            row.value.scale_d = entry.scale[0]
            row.value.offset_d = (entry.zero_point or (0,))[0]
            row.value.act_type = f"INT{format_named(entry.format).width}"
        if weight is not None:
            scales = (
                weight.scale[:1]
                if len(set(weight.scale)) == 1 and site.endswith("/linear")
                else weight.scale
            )
            row.value.scale_w.extend(scales)
            row.value.offset_w.extend([0] * len(scales))
            row.value.wts_type = f"INT{format_named(weight.format).width}"
            factors = record.balance.get(weight.name, ())
            if all(SMALLEST_FACTOR <= f <= 1 / SMALLEST_FACTOR for f in factors):
                row.value.tensor_balance_factor.extend(factors)
            else:
                lost.append(
                    f"{weight.name}: balance factors outside AMCT's [2^-23, 2^23]"
                )
    _add_caches(record, rows, lost)
    for entry in record.entries:
        if entry.kind == "activation":
            others = [
                s
                for s in _sites(entry)
                if (entry.name, s) not in used and readers.get(s, entry) is entry
            ]
            by = f", read by {', '.join(others)}" if others else ""
            if others or not _sites(entry):
                lost.append(
                    f"{entry.name}{by}: AMCT quantizes only inputs of layers with weights"
                )
    if narrow:
        lost.append(
            f"{narrow} inputs are int8 with codes from -127: AMCT clips them one code lower, at -128"
        )
    for name in record.balance:
        if not any(e.name == name for e in record.entries):
            lost.append(f"{name}: balance factors of a weight without an entry")
    _put_back(rows, kept)
    for text in record.about.get("amct_prune_record", ()):
        text_format.Parse(text, rows.prune_record.add())
    write_message(rows, path)
    return lost


def _readers(record: Record) -> dict[str, Entry]:
    """The entry that each site reads as its first operand: one made for this operand goes before one of its source."""
    found: dict[str, Entry] = {}
    for entry in record.entries:
        if entry.kind == "activation" and ":" not in entry.name:
            found.update(dict.fromkeys(entry.sites, entry))
    for entry in record.entries:
        site, colon, operand = entry.name.rpartition(":")
        if entry.kind == "activation" and colon and operand == "0":
            found[site] = entry
    return found


def _layers(record: Record, lost: list[str]) -> list[tuple[str, Entry | None, str]]:
    """(layer, weight, site) of each layer that AMCT may know, in the record's order; pooling has no weight."""
    found: list[tuple[str, Entry | None, str]] = []
    for entry in record.entries:
        if entry.kind == "weight":
            for site in entry.sites or (f"{entry.name.rpartition('.')[0]}/{ANY}",):
                layer = Site.parse(site).module
                if entry.name != f"{layer}.weight" or "#" in site:
                    lost.append(
                        f"{site}: {entry.name} is not the weight of a module called once, as AMCT's layers are"
                    )
                else:
                    found.append((layer, entry, site))
    weights = {site for _, _, site in found}
    pools = [
        site
        for entry in record.entries
        if entry.kind == "activation"
        for site in _sites(entry)
        if site.endswith("/avg_pool2d")
        and not site.startswith("/")
        and site not in weights
    ]
    return found + [
        (Site.parse(site).module, None, site) for site in dict.fromkeys(pools)
    ]


def _sites(entry: Entry) -> tuple[str, ...]:
    """Who reads an activation: an operand's own call where the entry doesn't say."""
    return entry.sites or (
        (entry.name.rpartition(":")[0],) if ":" in entry.name else ()
    )


def _why_not(weight: Entry | None, site: str) -> str:
    """Why AMCT's record cannot hold this weight; empty if it can."""
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
