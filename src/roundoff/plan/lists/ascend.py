"""Ascend: ``modify_mixlist`` JSON, the installed operator library's lists,
``precision_mode`` and ``precision_mode_v2``.

The lists edit a built-in white list (may run in half precision), black list (must stay
in fp32) and gray list (follows the operator before). ``to-add`` moves an operator onto
a list; ``to-remove`` takes it off one it is on, which makes it gray. Source: CANN, ATC
options --modify_mixlist, --precision_mode and --precision_mode_v2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roundoff.errors import PlanError
from roundoff.ops import operator_names, translate
from roundoff.plan.lists.fold import (
    MATRIX,
    ListedOperator,
    Operators,
    Read,
    Written,
    list_and_line,
    low_format,
)
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
_NOTES = {
    "tf32": "fp16 in, fp32 out is taken as tf32: the same 10 bits of the operands, an fp32 result; not the range of fp16",
    "hif8": "which operators run in hif8 is decided by the device's built-in lists: taken as the matrix operators",
    "origin": "the formats of the graph are kept: taken as fp32 throughout",
}
_FLAGS = {"true": "low", "false": "fp32"}


def recognise(data: Any) -> bool:
    """Return True for one of Ascend's files."""
    if not isinstance(data, Mapping):
        return False
    if any(key in data for key in (*LISTS, *OPTIONS)):
        return True
    entries = [entry for entry in data.values() if isinstance(entry, Mapping)]
    keys = [str(key) for entry in entries for key in entry]
    return any(key.startswith("precision_reduce") for key in keys)


def read(
    data: Mapping[str, Any],
    where: str,
    *,
    format: str | None = None,
    base: Any = None,
    partial: bool = False,
    folder: Path | None = None,
) -> Plan:
    """The plan of a mixlist, of the options that name one, or of an operator library's
    file (see ``read_lists``).

    ``base`` is the installed ``aic-*-ops-info.json`` that a mixlist edits: then every
    operator of the library has a rule, and a ``to-remove`` of one that is not on that
    list is an error.
    """
    reading = Read("ascend", where, partial)
    if any(key in data for key in OPTIONS):
        return _options(data, reading, format, base, folder)
    if not any(key in data for key in LISTS):
        low = low_format(format or "fp16", "format")
        flags = library(data, where, low)
        if format is None:
            reading.notes.append("the file does not say the format: taken as fp16")
        return reading.plan(_library_rules(flags, reading), autocast=low)
    low = low_format(format or "fp16", "format")
    if format is None:
        reading.notes.append(
            "a mixlist does not say the format: taken as fp16, as of allow_mix_precision and mixed_float16"
        )
    return _mixlist(data, reading, low, base)


def write(plan: Plan, *, path: str = "ops_info.json", base: Any = None) -> Written:
    """The mixlist and its mode; for plans without autocast the options alone, where one
    of the modes says it.
    """
    operators = Operators.of(plan)
    out = Written("", "", operators.left_out)
    if not plan.autocast or operators.rest:
        return _write_mode(operators, out)
    low = plan.autocast
    flags = library(read_base(base), "base", low) if base is not None else {}
    hif8 = all(operators.formats.get(operator) == "hif8" for operator in MATRIX)
    if hif8:
        others = {o: f for o, f in operators.formats.items() if o not in MATRIX}
        operators.formats = others
    asked = list(operators.to("cann", (low, "fp32", FOLLOW), out.notes))
    if base is not None:
        asked = _in_library(asked, flags, out)
    lists = _differences(asked, flags, low, plan.about.get("gray_from", {}), out)
    out.text = json.dumps(_without_empty(lists), indent=2) + "\n"
    mode = "mixed_float16" if low == "fp16" else "mixed_bfloat16"
    mode = "mixed_hif8" if hif8 else mode
    out.use = f"--precision_mode_v2={mode} --modify_mixlist={path}"
    return out


def _differences(
    asked: Iterable[tuple[str, str, str]],
    flags: Mapping[str, str],
    low: str,
    gray_from: Mapping[str, str],
    out: Written,
) -> dict[str, dict[str, list[str]]]:
    """What to add to each list and take off it, so that the library's flags become what
    is asked.
    """
    lists: dict[str, dict[str, list[str]]] = {
        name: {"to-remove": [], "to-add": []} for name in LISTS
    }
    for name, wanted, operator in asked:
        current = flags.get(name, "")
        if wanted == current:
            continue
        if wanted != FOLLOW:
            lists[_list_of(wanted)]["to-add"].append(name)
            continue
        listed = _list_of(current) if current in (low, "fp32") else None
        listed = listed or gray_from.get(operator)
        if listed is None:
            out.left_out.append(
                f"op:{operator} → follow: only an operator on a list can be taken off it; give base=, "
                "the installed aic-*-ops-info.json"
            )
        else:
            lists[listed]["to-remove"].append(name)
    return lists


def _write_mode(operators: Operators, out: Written) -> Written:
    """The options alone, or what keeps any mode from saying the plan."""
    mode = _mode_without_lists(operators)
    if mode is None:
        beside = ", ".join(f"op:{o} → {f}" for o, f in operators.formats.items())
        beside = f" beside {beside}" if beside else ""
        out.left_out.append(
            f"all others → {operators.rest}{beside}"
            ": lists need a mixed mode (a plan with autocast), other modes have none"
        )
        return replace(out, text="{}\n")
    out.text = json.dumps(mode, indent=2) + "\n"
    out.use = " ".join(f"--{key}={value}" for key, value in mode.items())
    return out


def _in_library(
    asked: list[tuple[str, str, str]], flags: Mapping[str, str], out: Written
) -> list[tuple[str, str, str]]:
    """What the library has: one operator has several types, a device not all of them."""
    present = [entry for entry in asked if entry[0] in flags]
    lost = {entry[2] for entry in asked} - {entry[2] for entry in present}
    out.left_out += [
        f"op:{operator}: none of its types is in the library"
        for operator in sorted(lost)
    ]
    return present


def _list_of(form: str) -> str:
    """The list of the operators that run in this format."""
    return "black-list" if form == "fp32" else "white-list"


def _without_empty(lists: dict[str, dict[str, list[str]]]) -> dict[str, Any]:
    kept = {}
    for name, edits in lists.items():
        filled = {edit: names for edit, names in edits.items() if names}
        if filled:
            kept[name] = filled
    return kept


def library(data: Mapping[str, Any], where: str, low: str) -> dict[str, str]:
    """Each operator of an ``aic-*-ops-info.json``: ``low`` (white), fp32 (black) or
    follow (gray, no flag).
    """
    flags = {}
    for name, entry in data.items():
        if not isinstance(entry, Mapping):
            raise PlanError(
                "not an operator's entry",
                where=f"{where}, {name}",
                got=repr(entry)[:60],
                expected='{"precision_reduce": {"flag": "true"}}',
            )
        key = "precision_reduce"
        if low == "bf16" and f"{key}_bf16" in entry:
            key = f"{key}_bf16"
        reduce = entry.get(key, {})
        flag = "?"
        if isinstance(reduce, Mapping):
            flag = str(reduce.get("flag", "")).lower()
        if flag and flag not in _FLAGS:
            raise PlanError(
                "no such flag",
                where=", ".join(p for p in (where, place(name), name) if p),
                expected='"true", "false", or none',
                got=repr(reduce)[:60],
            )
        flags[name] = {"": FOLLOW, "true": low, "false": "fp32"}[flag]
    return flags


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


def _mixlist(data: Any, reading: Read, low: str, base: Any) -> Plan:
    adds, removes = _edits(data, reading.where, low)
    _check_removes(adds, removes, reading.where)
    # taken off one list and put on the other: it is on the other
    added = {entry.name for entry in adds}
    edits = [*adds, *(entry for entry in removes if entry.name not in added)]
    if base is None:
        rules = reading.rules(edits, "cann")
        reading.notes.append(
            "operators on no list here follow torch's own lists, not Ascend's: give base= for those"
        )
        return reading.plan(rules, autocast=low, gray_from=_gray(edits))
    flags = library(read_base(base), "base", low)
    _check_base(removes, flags, low, reading.where)
    reading.check(edits, "cann")
    edited = {entry.name: entry for entry in edits}
    flags |= {name: entry.format for name, entry in edited.items()}
    return reading.plan(_library_rules(flags, reading, edited), autocast=low)


def _edits(
    data: Any, where: str, low: str
) -> tuple[list[ListedOperator], list[ListedOperator]]:
    """What a mixlist adds to lists, and what it takes off them."""
    if not isinstance(data, Mapping):
        raise PlanError(
            "no mixlist",
            where=where,
            expected="black-list and white-list",
            got=repr(data)[:60],
        )
    check_keys(data, tuple(LISTS), where)
    adds: list[ListedOperator] = []
    removes: list[ListedOperator] = []
    for key, edits in data.items():
        place_of_list = f"{where}, {key}"
        if not isinstance(edits, Mapping):
            raise PlanError(
                "not a list's edits",
                where=place_of_list,
                got=repr(edits)[:60],
                expected='{"to-add": [...], "to-remove": [...]}',
            )
        check_keys(edits, ("to-add", "to-remove"), place_of_list)
        form = low if key == "white-list" else "fp32"
        for name in names_of(edits.get("to-add", []), f"{place_of_list}, to-add"):
            adds.append(ListedOperator(name, form, f"{key} to-add"))
        for name in names_of(edits.get("to-remove", []), f"{place_of_list}, to-remove"):
            removes.append(ListedOperator(name, FOLLOW, f"{key} to-remove"))
    return adds, removes


def _gray(edits: list[ListedOperator]) -> dict[str, str]:
    """Operator here → the list that it is taken off."""
    gray: dict[str, str] = {}
    for entry in edits:
        if entry.format == FOLLOW and entry.name in operator_names("cann"):
            listed = entry.listed.split()[0]
            gray |= dict.fromkeys(translate(entry.name, "cann", "torch"), listed)
    return gray


def _library_rules(
    flags: Mapping[str, str],
    reading: Read,
    edited: Mapping[str, ListedOperator] | None = None,
) -> tuple[Rule, ...]:
    """Rules for what the table knows; a library has many operators that no torch
    program calls: they are counted.
    """
    edits = edited or {}
    names = operator_names("cann")
    entries = [
        edits.get(name) or ListedOperator(name, form, "library")
        for name, form in flags.items()
        if name in names
    ]
    lost = [name for name in flags if name not in names and name not in edits]
    if lost:
        reading.left_out.append(
            f"{len(lost)} operators of the library without a name here: {', '.join(lost)}"
        )
    return reading.rules(entries, "cann")


def _check_removes(
    adds: list[ListedOperator], removes: list[ListedOperator], where: str
) -> None:
    """Raise ``PlanError`` for an operator that is taken off a list and put on it, or off both."""
    added = {(entry.name, entry.listed.split()[0]): entry for entry in reversed(adds)}
    removed: dict[str, ListedOperator] = {}
    for entry in removes:
        other = added.get((entry.name, entry.listed.split()[0]))
        other = other or removed.get(entry.name)
        if other is not None and other.listed != entry.listed:
            raise PlanError(
                f"{entry.name} is on two lists that contradict each other",
                where=where,
                got=f"{list_and_line(other)} and {list_and_line(entry)}",
                do="an operator is on one list: take it off that one, or put it on the other",
            )
        removed[entry.name] = entry


def _check_base(
    removes: list[ListedOperator], flags: Mapping[str, str], low: str, where: str
) -> None:
    """Raise ``PlanError`` for an operator that is taken off a list it is not on."""
    names = {low: "white-list", "fp32": "black-list", FOLLOW: "the gray list"}
    for entry in removes:
        listed = entry.listed.split()[0]
        form = flags.get(entry.name, "")
        if form == (low if listed == "white-list" else "fp32"):
            continue
        actual = names.get(form, "none: it is not there")
        raise PlanError(
            f"{entry.name} cannot be taken off the {listed}: it is not on it",
            where=", ".join(p for p in (where, place(entry.name)) if p),
            got=f"its list in the library: {actual}",
            do="leave the entry out",
        )


@dataclass(frozen=True)
class _Mode:
    """A precision mode: its option and name, and what autocast, matrix operators and
    all others run in.
    """

    option: str = ""
    name: str = ""
    autocast: str = ""
    matrix: str = ""
    others: str = ""

    @property
    def origin(self) -> str:
        return f"{self.option} = {self.name}" if self.option else "modify_mixlist"


def _options(
    data: Mapping[str, Any],
    reading: Read,
    format: str | None,
    base: Any,
    folder: Path | None,
) -> Plan:
    check_keys(data, OPTIONS, reading.where)
    mode = _mode(data, reading, format)
    if mode.matrix in _NOTES:
        reading.notes.append(_NOTES[mode.matrix])
    if mode.name in ("origin", "must_keep_origin_dtype"):
        reading.notes.append(_NOTES["origin"])
    rules: tuple[Rule, ...] = ()
    if mode.matrix:
        rules = reading.named((o, mode.matrix, mode.origin) for o in MATRIX)
    mixlist = data.get("modify_mixlist")
    if mixlist is None:
        others = mode.others or "fp32"
        return reading.plan(rules, others, mode.autocast, mode=mode.name)
    if not mode.autocast:
        raise PlanError(
            f"{mode.name} has no lists to modify",
            where=f"{reading.where}, modify_mixlist",
            expected="a mixed mode: mixed_float16, mixed_bfloat16, mixed_hif8, allow_mix_precision...",
            do=f"leave modify_mixlist out, or change {mode.option}",
        )
    if isinstance(mixlist, str):
        file = Path(folder or ".", str(mixlist))
        reading = replace(reading, where=str(file))
        mixlist = read_file(file)
    edited = _mixlist(mixlist, reading, mode.autocast, base)
    about = {**edited.about, "mode": mode.name} if mode.name else edited.about
    return replace(edited, rules=edited.rules + rules, about=about)


def _mode(data: Mapping[str, Any], reading: Read, format: str | None) -> _Mode:
    """The mode that the options name; without one, autocast in ``format``."""
    if "precision_mode" in data and "precision_mode_v2" in data:
        both = [f"{key} = {data[key]}" for key in OPTIONS[:2]]
        raise PlanError(
            "precision_mode and precision_mode_v2 exclude each other",
            where=reading.where,
            got=", ".join(both),
            do="keep precision_mode_v2",
        )
    option = next((key for key in OPTIONS[:2] if key in data), None)
    if option is None:
        return _Mode(autocast=low_format(format or "fp16", "format"))
    name = str(data[option])
    if name in _MISSPELLED and option == "precision_mode":
        reading.notes.append(
            f"{name} is a misspelling in the documentation of {_MISSPELLED[name]}"
        )
        name = _MISSPELLED[name]
    modes = _MODES_V2 if option == "precision_mode_v2" else _MODES_V1
    with_line = Name.at(name, getattr(data[option], "line", 0))
    check_keys({with_line: 0}, tuple(modes), reading.where, f"{option} mode")
    return _Mode(option, name, *modes[name])


def _mode_without_lists(operators: Operators) -> dict[str, str] | None:
    if not operators.formats:
        mode = {"fp16": "fp16", "fp32": "origin"}.get(operators.rest)
        return {"precision_mode_v2": mode} if mode else None
    formats = set(operators.formats.values())
    only_matrix = set(operators.formats) == set(MATRIX)
    if operators.rest != "fp32" or len(formats) != 1 or not only_matrix:
        return None
    return {
        "fp16": {"precision_mode": "allow_fp32_to_fp16"},
        "bf16": {"precision_mode": "allow_fp32_to_bf16"},
        "tf32": {"precision_mode_v2": "cube_fp16in_fp32out"},
        "hif8": {"precision_mode_v2": "cube_hif8"},
    }.get(formats.pop())
