"""Paddle: the keyword arguments of ``paddle.amp.auto_cast``, as a mapping or a JSON or
TOML file of them.

Levels: O0 nothing; O1 lists (white low, black fp32, the rest promoted); O2 everything
low but the black list; OD only the white list low. Source: paddle.amp.auto_cast and
paddle/amp/amp_lists.py of 3.3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from roundoff.errors import PlanError
from roundoff.plan.lists.fold import (
    ListedOperator,
    Operators,
    Read,
    Written,
    low_format,
)
from roundoff.plan.lists.source import check_keys, names_of
from roundoff.plan.rules import FOLLOW, Plan

KEYS = (
    "enable",
    "custom_white_list",
    "custom_black_list",
    "level",
    "dtype",
    "use_promote",
)
LEVELS = ("O0", "O1", "O2", "OD")
#: Paddle's own lists where they decide everything else: low under OD, fp32 under O2.
WHITE = "conv2d einsum flash_attn fused_gemm_epilogue linear_v2 matmul matmul_v2 max_pool2d_with_index mul".split()
BLACK_O2 = (
    "linear_interp_v2 nearest_interp_v2 bilinear_interp_v2 bicubic_interp_v2 trilinear_interp_v2 lookup_table "
    "lookup_table_v2 scatter"
).split()


def recognise(data: Any) -> bool:
    """Return True if these are arguments of ``auto_cast``."""
    return isinstance(data, Mapping) and any(
        k in data for k in ("custom_white_list", "custom_black_list", "level")
    )


def read(
    data: Mapping[str, Any],
    where: str,
    *,
    format: str | None = None,
    partial: bool = False,
) -> Plan:
    """The plan of these arguments; what is left out has Paddle's default (O1, float16)."""
    check_keys(data, KEYS, where, "argument of auto_cast")
    reading = Read("paddle", where, partial)
    level = str(data.get("level", "O1")).upper()
    if level not in LEVELS:
        raise PlanError(
            "no such level",
            where=f"{where}, level",
            expected=", ".join(LEVELS),
            got=repr(data["level"]),
        )
    low = low_format(data.get("dtype", format or "float16"), f"{where}, dtype")
    custom = _custom(data, "custom_white_list", low, where)
    custom += _custom(data, "custom_black_list", "fp32", where)
    if data.get("use_promote") is False:
        reading.left_out.append(
            "use_promote=False: operators without a list run in the widest format of their inputs here"
        )
    if data.get("enable") is False or level == "O0":
        if custom:
            reading.left_out.append(
                f"{len(custom)} operators of the custom lists: nothing is cast"
            )
        return reading.plan()
    if level == "O1":
        reading.notes.append(
            "operators on no list here follow torch's own lists, not Paddle's"
        )
        return reading.plan(reading.rules(custom, "paddle"), autocast=low)
    # one list decides, all others run in the other format
    if level == "OD":
        built_in = _unless_custom(WHITE, low, "Paddle's own white list", custom)
        default = "fp32"
    else:
        built_in = _unless_custom(BLACK_O2, "fp32", "Paddle's own black list", custom)
        default = low
    rules = reading.rules([*built_in, *custom], "paddle")
    return reading.plan(tuple(r for r in rules if r.format != default), default)


def _custom(
    data: Mapping[str, Any], key: str, form: str, where: str
) -> list[ListedOperator]:
    names = names_of(data.get(key) or [], f"{where}, {key}")
    return [ListedOperator(name, form, key) for name in names]


def _unless_custom(
    names: list[str], form: str, listed: str, custom: list[ListedOperator]
) -> list[ListedOperator]:
    """The entries of a built-in list that no custom list names."""
    named = {entry.name for entry in custom}
    return [ListedOperator(name, form, listed) for name in names if name not in named]


def write(plan: Plan) -> Written:
    """The arguments as JSON: O1 for a plan over autocast's lists, else the level that
    fits its default.
    """
    operators = Operators.of(plan)
    out = Written("", "paddle.amp.auto_cast(**arguments)", operators.left_out)
    low = operators.rest or plan.autocast
    if operators.rest == "fp32":
        halves = [f for f in operators.formats.values() if f in ("bf16", "fp16")]
        if not halves:
            return _write_nothing_cast(operators, out)
        low = halves[0]
    if low not in ("bf16", "fp16"):
        out.left_out.append(f"all others → {low}: Paddle casts to float16 and bfloat16")
        out.text = "{}\n"
        return out
    data = _arguments(operators, low, out.notes)
    out.text = json.dumps({k: v for k, v in data.items() if v}, indent=2) + "\n"
    if FOLLOW in operators.formats.values():
        out.notes.append(
            "Paddle has no list of operators that follow their inputs: under O1 that is what unlisted ones do"
        )
    return out


def _arguments(operators: Operators, low: str, notes: list[str]) -> dict[str, Any]:
    """The level and the two lists, without what the level's own list says already."""
    level = _level(operators)
    asked = {name: f for name, f, _ in operators.to("paddle", (low, "fp32"), notes)}
    white = _in_format(asked, low)
    black = _in_format(asked, "fp32")
    if level == "OD":
        black += [name for name in WHITE if name not in asked]
        white = [name for name in white if name not in WHITE]
    if level == "O2":
        white += [name for name in BLACK_O2 if name not in asked]
        black = [name for name in black if name not in BLACK_O2]
    return {
        "level": level,
        "dtype": "float16" if low == "fp16" else "bfloat16",
        "custom_white_list": white,
        "custom_black_list": black,
    }


def _level(operators: Operators) -> str:
    if not operators.rest:
        return "O1"
    return "OD" if operators.rest == "fp32" else "O2"


def _in_format(asked: Mapping[str, str], form: str) -> list[str]:
    return [name for name, its_format in asked.items() if its_format == form]


def _write_nothing_cast(operators: Operators, out: Written) -> Written:
    """All others in fp32, and no operator in half precision: nothing is cast."""
    formats = operators.formats.items()
    out.left_out += [f"op:{o} → {form}" for o, form in formats if form != "fp32"]
    out.text = json.dumps({"enable": False, "level": "O0"}, indent=2) + "\n"
    return out
