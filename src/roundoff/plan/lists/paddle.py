"""Paddle: the keyword arguments of ``paddle.amp.auto_cast``, as a mapping or a JSON or TOML file of them.

Levels: O0 nothing; O1 lists (white low, black fp32, the rest promoted); O2 everything low but the black list; OD only the
white list low. Source: paddle.amp.auto_cast and paddle/amp/amp_lists.py of 3.3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from roundoff.errors import PlanError
from roundoff.plan.lists.fold import Entry, Operators, Read, Written, low_format
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
    """Whether these are arguments of ``auto_cast``."""
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
    found = Read("paddle", where, partial)
    level = str(data.get("level", "O1")).upper()
    if level not in LEVELS:
        raise PlanError(
            "no such level",
            where=f"{where}, level",
            expected=", ".join(LEVELS),
            got=repr(data["level"]),
        )
    low = low_format(data.get("dtype", format or "float16"), f"{where}, dtype")
    custom = [
        Entry(name, asked, key)
        for key, asked in (("custom_white_list", low), ("custom_black_list", "fp32"))
        for name in names_of(data.get(key) or [], f"{where}, {key}")
    ]
    if data.get("use_promote") is False:
        found.left_out.append(
            "use_promote=False: operators without a list run in the widest format of their inputs here"
        )
    if data.get("enable") is False or level == "O0":
        found.left_out += (
            [f"{len(custom)} operators of the custom lists: nothing is cast"]
            if custom
            else []
        )
        return found.plan()
    if level == "O1":
        found.notes.append(
            "operators on no list here follow torch's own lists, not Paddle's"
        )
        return found.plan(found.rules(custom, "paddle"), autocast=low)
    if level == "OD":
        named = {e.name for e in custom}
        own = [
            Entry(name, low, "Paddle's own white list")
            for name in WHITE
            if name not in named
        ]
        return found.plan(
            tuple(
                r for r in found.rules([*own, *custom], "paddle") if r.format != "fp32"
            )
        )
    named = {e.name for e in custom}
    own = [
        Entry(name, "fp32", "Paddle's own black list")
        for name in BLACK_O2
        if name not in named
    ]
    return found.plan(
        tuple(r for r in found.rules([*own, *custom], "paddle") if r.format != low), low
    )


def write(plan: Plan) -> Written:
    """The arguments as JSON: O1 for a plan over autocast's lists, else the level that fits its default."""
    operators = Operators.of(plan)
    out = Written("", "paddle.amp.auto_cast(**arguments)", operators.left_out)
    low = plan.autocast if not operators.rest else operators.rest
    if operators.rest == "fp32":
        low = next((f for f in operators.formats.values() if f in ("bf16", "fp16")), "")
        if not low:
            out.left_out += [
                f"op:{o} → {f}" for o, f in operators.formats.items() if f != "fp32"
            ]
            out.text = json.dumps({"enable": False, "level": "O0"}, indent=2) + "\n"
            return out
    if low not in ("bf16", "fp16"):
        out.left_out.append(f"all others → {low}: Paddle casts to float16 and bfloat16")
        out.text = "{}\n"
        return out
    level = "O1" if not operators.rest else "OD" if operators.rest == "fp32" else "O2"
    own = {"OD": WHITE, "O2": BLACK_O2}.get(level, [])
    asked = {name: f for name, f, _ in operators.to("paddle", (low, "fp32"), out.notes)}
    white = [
        n for n, f in asked.items() if f == low and not (level == "OD" and n in own)
    ]
    black = [
        n for n, f in asked.items() if f == "fp32" and not (level == "O2" and n in own)
    ]
    if level == "OD":  # what Paddle's own list has and this plan has not
        black += [n for n in own if n not in asked]
    if level == "O2":
        white += [n for n in own if n not in asked]
    dtype = "float16" if low == "fp16" else "bfloat16"
    data = {
        "level": level,
        "dtype": dtype,
        "custom_white_list": white,
        "custom_black_list": black,
    }
    out.text = json.dumps({k: v for k, v in data.items() if v}, indent=2) + "\n"
    if any(f == FOLLOW for f in operators.formats.values()):
        out.notes.append(
            "Paddle has no list of operators that follow their inputs: under O1 that is what unlisted ones do"
        )
    return out
