"""Ascend: ``modify_mixlist`` JSON, the installed operator library's lists, ``precision_mode`` and ``precision_mode_v2``.

The lists edit a built-in white list (may run in half precision), black list (must stay in fp32) and gray list (follows the
operator before). ``to-add`` moves an operator onto a list; ``to-remove`` takes it off one it is on, which makes it gray.
Source: CANN, ATC options --modify_mixlist, --precision_mode and --precision_mode_v2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundoff.errors import PlanError
from roundoff.ops import known, translate
from roundoff.plan.lists.fold import MATRIX, Entry, Operators, Read, Written, low_format
from roundoff.plan.lists.source import Name, check_keys, names_of, place, read_file
from roundoff.plan.rules import FOLLOW, Plan, Rule

LISTS = {"black-list": "fp32", "white-list": "low"}
OPTIONS = ("precision_mode", "precision_mode_v2", "modify_mixlist")
#: mode → (what autocast runs in, what matrix operators run in, what all others run in)
_MODES_V1 = {
    "force_fp16": ("", "", "fp16"),
    "force_fp32": ("", "tf32", "fp32"),
    "cube_fp16in_fp32out": ("", "tf32", "fp32"),
    "allow_fp32_to_fp16": ("", "fp16", "fp32"),
    "allow_fp32_to_bf16": ("", "bf16", "fp32"),
    "must_keep_origin_dtype": ("", "", "fp32"),
    "allow_mix_precision": ("fp16", "", ""),
    "allow_mix_precision_fp16": ("fp16", "", ""),
    "allow_mix_precision_bf16": ("bf16", "", ""),
}
_MODES_V2 = {
    "fp16": ("", "", "fp16"),
    "origin": ("", "", "fp32"),
    "cube_fp16in_fp32out": ("", "tf32", "fp32"),
    "mixed_float16": ("fp16", "", ""),
    "mixed_bfloat16": ("bf16", "", ""),
    "mixed_hif8": ("bf16", "hif8", ""),
    "cube_hif8": ("", "hif8", "fp32"),
}
#: A spelling that some versions of the documentation have.
_MISSPELLED = {"allow_mix_precison_bf16": "allow_mix_precision_bf16"}
_SAID = {
    "tf32": "fp16 in, fp32 out is taken as tf32: the same 10 bits of the operands, an fp32 result; not the range of fp16",
    "hif8": "which operators run in hif8 is decided by the device's built-in lists: taken as the matrix operators",
    "origin": "the formats of the graph are kept: taken as fp32 throughout",
}
_FLAGS = {"true": "low", "false": "fp32"}


def recognise(data: Any) -> bool:
    """Whether this is one of Ascend's files."""
    return isinstance(data, Mapping) and (
        any(key in data for key in (*LISTS, *OPTIONS))
        or any(
            isinstance(v, Mapping)
            and any(str(k).startswith("precision_reduce") for k in v)
            for v in data.values()
        )
    )


def read(
    data: Mapping[str, Any],
    where: str,
    *,
    format: str | None = None,
    base: Any = None,
    partial: bool = False,
    folder: Path | None = None,
) -> Plan:
    """The plan of a mixlist, of the options that name one, or of an operator library's file (see ``read_lists``).

    ``base`` is the installed ``aic-*-ops-info.json`` that a mixlist edits: then every operator of the library has a rule,
    and a ``to-remove`` of one that is not on that list is an error.
    """
    found = Read("ascend", where, partial)
    if any(key in data for key in OPTIONS):
        return _options(data, found, format, base, folder)
    if not any(key in data for key in LISTS):
        low = low_format(format or "fp16", "format")
        flags = library(data, where, low)
        if format is None:
            found.notes.append("the file does not say the format: taken as fp16")
        return found.plan(_library_rules(flags, found), autocast=low)
    low = low_format(format or "fp16", "format")
    if format is None:
        found.notes.append(
            "a mixlist does not say the format: taken as fp16, as of allow_mix_precision and mixed_float16"
        )
    return _mixlist(data, found, low, base)


def write(plan: Plan, *, path: str = "ops_info.json", base: Any = None) -> Written:
    """The mixlist and its mode; for plans without autocast the options alone, where one of the modes says it."""
    operators = Operators.of(plan)
    out = Written("", "", operators.left_out)
    if not plan.autocast or operators.rest:
        mode = _mode_without_lists(operators)
        if mode is None:
            beside = ", ".join(f"op:{o} → {f}" for o, f in operators.formats.items())
            out.left_out.append(
                f"all others → {operators.rest}"
                + (f" beside {beside}" if beside else "")
                + ": lists need a mixed mode (a plan with autocast), other modes have none"
            )
            return replace(out, text="{}\n")
        out.text = json.dumps(mode, indent=2) + "\n"
        out.use = " ".join(f"--{key}={value}" for key, value in mode.items())
        return out
    low = plan.autocast
    gray_from: Mapping[str, str] = plan.about.get("gray_from", {})
    flags = library(read_base(base), "base", low) if base is not None else {}
    lists: dict[str, dict[str, list[str]]] = {
        name: {"to-remove": [], "to-add": []} for name in LISTS
    }
    hif8 = all(operators.formats.get(operator) == "hif8" for operator in MATRIX)
    if hif8:
        operators.formats = {
            o: f for o, f in operators.formats.items() if o not in MATRIX
        }
    said = list(operators.to("cann", (low, "fp32", FOLLOW), out.notes))
    if base is not None:  # one operator has several types, a device not all of them
        there = {operator for name, _, operator in said if name in flags}
        out.left_out += [
            f"op:{o}: none of its types is in the library"
            for o in sorted({o for _, _, o in said} - there)
        ]
        said = [entry for entry in said if entry[0] in flags]
    for name, asked, operator in said:
        on = flags.get(name, "")
        if asked == on:
            continue
        if asked != FOLLOW:
            lists["white-list" if asked == low else "black-list"]["to-add"].append(name)
            continue
        of = {low: "white-list", "fp32": "black-list"}.get(on) or gray_from.get(
            operator
        )
        if of is None:
            out.left_out.append(
                f"op:{operator} → follow: only an operator on a list can be taken off it; give base=, "
                "the installed aic-*-ops-info.json"
            )
        else:
            lists[of]["to-remove"].append(name)
    data = {name: {k: v for k, v in both.items() if v} for name, both in lists.items()}
    out.text = (
        json.dumps({name: both for name, both in data.items() if both}, indent=2) + "\n"
    )
    mode_name = (
        "mixed_hif8" if hif8 else "mixed_float16" if low == "fp16" else "mixed_bfloat16"
    )
    out.use = f"--precision_mode_v2={mode_name} --modify_mixlist={path}"
    return out


def library(data: Mapping[str, Any], where: str, low: str) -> dict[str, str]:
    """Each operator of an ``aic-*-ops-info.json``: ``low`` (white), fp32 (black) or follow (gray, no flag)."""
    key = "precision_reduce"
    found: dict[str, str] = {}
    for name, entry in data.items():
        if not isinstance(entry, Mapping):
            raise PlanError(
                "not an operator's entry",
                where=f"{where}, {name}",
                got=repr(entry)[:60],
                expected='{"precision_reduce": {"flag": "true"}}',
            )
        flagged = entry.get(
            f"{key}_bf16" if low == "bf16" and f"{key}_bf16" in entry else key, {}
        )
        flag = (
            str(flagged.get("flag", "")).lower()
            if isinstance(flagged, Mapping)
            else "?"
        )
        if flag and flag not in _FLAGS:
            raise PlanError(
                "no such flag",
                where=", ".join(p for p in (where, place(name), name) if p),
                expected='"true", "false", or none',
                got=repr(flagged)[:60],
            )
        found[name] = {"": FOLLOW, "true": low, "false": "fp32"}[flag]
    return found


def read_base(base: Any) -> Mapping[str, Any]:
    """The operator library that a mixlist edits: a mapping, or the path of its file."""
    data = base if isinstance(base, Mapping) else read_file(Path(base))
    if not isinstance(data, Mapping) or any(key in data for key in (*LISTS, *OPTIONS)):
        raise PlanError(
            "not an operator library",
            where=str(base)[:80],
            expected="an installed aic-*-ops-info.json",
        )
    return data


def _mixlist(data: Mapping[str, Any], found: Read, low: str, base: Any) -> Plan:
    if not isinstance(data, Mapping):
        raise PlanError(
            "no mixlist",
            where=found.where,
            expected="black-list and white-list",
            got=repr(data)[:60],
        )
    check_keys(data, tuple(LISTS), found.where)
    adds: list[Entry] = []
    removes: list[Entry] = []
    for key, both in data.items():
        if not isinstance(both, Mapping):
            raise PlanError(
                "not a list's edits",
                where=f"{found.where}, {key}",
                got=repr(both)[:60],
                expected='{"to-add": [...], "to-remove": [...]}',
            )
        check_keys(both, ("to-add", "to-remove"), f"{found.where}, {key}")
        add, remove = (
            names_of(both.get(k, []), f"{found.where}, {key}, {k}")
            for k in ("to-add", "to-remove")
        )
        adds += [
            Entry(n, low if key == "white-list" else "fp32", f"{key} to-add")
            for n in add
        ]
        removes += [Entry(n, FOLLOW, f"{key} to-remove") for n in remove]
    _check_removes(adds, removes, found.where)
    flags = library(read_base(base), "base", low) if base is not None else None
    if flags is not None:
        _check_base(removes, flags, low, found.where)
    added = {e.name for e in adds}
    # taken off one list and put on the other: it is on the other
    edits = [*adds, *(e for e in removes if e.name not in added)]
    if flags is None:
        rules = found.rules(edits, "cann")
        gray = {
            o: e.listed.split()[0]
            for e in edits
            if e.format == FOLLOW and e.name in known("cann")
            for o in translate(e.name, "cann", "torch")
        }
        found.notes.append(
            "operators on no list here follow torch's own lists, not Ascend's: give base= for those"
        )
        return found.plan(rules, autocast=low, gray_from=gray)
    found._check_contradictions(edits)
    found._check_unknown(edits, "cann")
    flags |= {e.name: e.format for e in edits}
    edited = {e.name: e for e in edits}
    return found.plan(_library_rules(flags, found, edited), autocast=low)


def _library_rules(
    flags: Mapping[str, str], found: Read, edited: Mapping[str, Entry] | None = None
) -> tuple[Rule, ...]:
    """Rules for what the table knows; a library has many operators that no torch program calls: they are counted."""
    entries = [
        (edited or {}).get(n) or Entry(n, f, "library")
        for n, f in flags.items()
        if n in known("cann")
    ]
    lost = [n for n in flags if n not in known("cann") and n not in (edited or {})]
    if lost:
        found.left_out.append(
            f"{len(lost)} operators of the library without a name here: {', '.join(lost)}"
        )
    return found.rules(entries, "cann")


def _check_removes(adds: list[Entry], removes: list[Entry], where: str) -> None:
    """An operator cannot be taken off a list and put on it, nor off both."""
    lists: dict[str, Entry] = {}
    for entry in removes:
        other = next(
            (
                e
                for e in adds
                if e.name == entry.name
                and e.listed.split()[0] == entry.listed.split()[0]
            ),
            None,
        )
        other = other or lists.get(entry.name)
        if other is not None and other.listed != entry.listed:
            raise PlanError(
                f"{entry.name} is on two lists that contradict each other",
                where=where,
                got=" and ".join(
                    ", ".join(p for p in (e.listed, place(e.name)) if p)
                    for e in (other, entry)
                ),
                do="an operator is on one list: take it off that one, or put it on the other",
            )
        lists[entry.name] = entry


def _check_base(
    removes: list[Entry], flags: Mapping[str, str], low: str, where: str
) -> None:
    for entry in removes:
        of = entry.listed.split()[0]
        on = flags.get(entry.name)
        if on != (low if of == "white-list" else "fp32"):
            said = {
                low: "white-list",
                "fp32": "black-list",
                FOLLOW: "the gray list",
            }.get(on or "", "none: it is not there")
            raise PlanError(
                f"{entry.name} cannot be taken off the {of}: it is not on it",
                where=", ".join(p for p in (where, place(entry.name)) if p),
                got=f"its list in the library: {said}",
                do="leave the entry out",
            )


def _options(
    data: Mapping[str, Any],
    found: Read,
    format: str | None,
    base: Any,
    folder: Path | None,
) -> Plan:
    check_keys(data, OPTIONS, found.where)
    if "precision_mode" in data and "precision_mode_v2" in data:
        both = [f"{key} = {data[key]}" for key in OPTIONS[:2]]
        raise PlanError(
            "precision_mode and precision_mode_v2 exclude each other",
            where=found.where,
            got=", ".join(both),
            do="keep precision_mode_v2",
        )
    key = next((key for key in OPTIONS[:2] if key in data), None)
    mode = str(data[key]) if key else ""
    if mode in _MISSPELLED and key == "precision_mode":
        found.notes.append(
            f"{mode} is a misspelling in the documentation of {_MISSPELLED[mode]}"
        )
        mode = _MISSPELLED[mode]
    modes = _MODES_V2 if key == "precision_mode_v2" else _MODES_V1
    if key:
        check_keys(
            {Name.at(mode, getattr(data[key], "line", 0)): 0},
            tuple(modes),
            found.where,
            f"{key} mode",
        )
    autocast, matrix, rest = (
        modes[mode] if key else (low_format(format or "fp16", "format"), "", "")
    )
    mixlist = data.get("modify_mixlist")
    if mixlist is not None and not autocast:
        raise PlanError(
            f"{mode} has no lists to modify",
            where=f"{found.where}, modify_mixlist",
            expected="a mixed mode: mixed_float16, mixed_bfloat16, mixed_hif8, allow_mix_precision...",
            do=f"leave modify_mixlist out, or change {key}",
        )
    found.notes += [_SAID[matrix]] if matrix in _SAID else []
    found.notes += (
        [_SAID["origin"]] if mode in ("origin", "must_keep_origin_dtype") else []
    )
    said = f"{key} = {mode}" if key else "modify_mixlist"
    rules: tuple[Rule, ...] = (
        found.named((o, matrix, said) for o in MATRIX) if matrix else ()
    )
    if mixlist is None:
        return found.plan(rules, rest or "fp32", autocast, mode=mode)
    inner = Path(folder or ".", str(mixlist)) if isinstance(mixlist, str) else None
    edits = read_file(inner) if inner else mixlist
    listed = Read(
        "ascend",
        str(inner or found.where),
        found.partial,
        found.notes,
        found.left_out,
        found.origin,
    )
    edited = _mixlist(edits, listed, autocast, base)
    return replace(
        edited,
        rules=edited.rules + rules,
        about={**edited.about, **({"mode": mode} if mode else {})},
    )


def _mode_without_lists(operators: Operators) -> dict[str, str] | None:
    if not operators.formats:
        mode = {"fp16": "fp16", "fp32": "origin"}.get(operators.rest)
        return {"precision_mode_v2": mode} if mode else None
    formats = set(operators.formats.values())
    if (
        operators.rest != "fp32"
        or len(formats) != 1
        or set(operators.formats) != set(MATRIX)
    ):
        return None
    return {
        "fp16": {"precision_mode": "allow_fp32_to_fp16"},
        "bf16": {"precision_mode": "allow_fp32_to_bf16"},
        "tf32": {"precision_mode_v2": "cube_fp16in_fp32out"},
        "hif8": {"precision_mode_v2": "cube_hif8"},
    }.get(formats.pop())
