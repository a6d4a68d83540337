"""TensorFlow: the environment variables that edit the lists of its automatic mixed precision.

``TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_<LIST>_<ADD|REMOVE>=Op,Op``; lists: ALLOWLIST
(always low), INFERLIST (low, unless an operator of the deny list is upstream), DENYLIST
(fp32), CLEARLIST (as what is around it); older versions called them WHITELIST,
GRAYLIST, BLACKLIST. Source:
tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h of 2.21.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from roundoff.errors import PlanError
from roundoff.plan.lists.fold import (
    ListedOperator,
    Operators,
    Read,
    Written,
    list_and_line,
    low_format,
)
from roundoff.plan.lists.source import Name, check_keys, place
from roundoff.plan.rules import FOLLOW, Plan

PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
LISTS = {
    "ALLOWLIST": "low",
    "INFERLIST": FOLLOW,
    "DENYLIST": "fp32",
    "CLEARLIST": FOLLOW,
}
_OLD = {"WHITELIST": "ALLOWLIST", "GRAYLIST": "INFERLIST", "BLACKLIST": "DENYLIST"}
_LISTED = tuple(
    f"{PREFIX}{name}_{edit}" for name in (*LISTS, *_OLD) for edit in ("ADD", "REMOVE")
)
_OTHER = tuple(PREFIX + name for name in ("LEVEL", "LOG_PATH", "IGNORE_PERFORMANCE"))


def recognise(data: Any) -> bool:
    """Return True if one of the variables is set here."""
    return isinstance(data, Mapping) and any(
        str(key).startswith(PREFIX) for key in data
    )


def read(
    data: Mapping[str, str],
    where: str,
    *,
    format: str | None = None,
    partial: bool = False,
) -> Plan:
    """The plan of these variables; others than TensorFlow's (an environment has many)
    are not looked at.
    """
    data = {key: value for key, value in data.items() if str(key).startswith(PREFIX)}
    variable = "variable of TensorFlow's automatic mixed precision"
    check_keys(data, (*_LISTED, *_OTHER), where, variable)
    reading = Read("tensorflow", where, partial)
    low = low_format(format or "fp16", "format")
    if format is None:
        reading.notes.append(
            "the variables do not say the format: taken as fp16, as of the graph rewrite on a GPU"
        )
    level = str(data.get(f"{PREFIX}LEVEL", "")).upper()
    if level == "UNSAFE_FORCE_ALL":
        return reading.plan(default=low)
    if level:
        reading.left_out.append(
            f"LEVEL={level}: empties TensorFlow's own lists, which are not part of this plan"
        )
    reading.left_out += [
        f"{key.removeprefix(PREFIX)}: no list" for key in _OTHER[1:] if key in data
    ]
    adds: list[ListedOperator] = []
    removes: list[ListedOperator] = []
    for key, value in data.items():
        if key not in _OTHER:
            edits = adds if key.endswith("_ADD") else removes
            edits += _entries(key, value, low, where)
    _check(adds, removes, where)
    # on no list TensorFlow leaves an operator as it is, in fp32
    added_names = {entry.name for entry in adds}
    off = [e._replace(format="fp32") for e in removes if e.name not in added_names]
    reading.notes.append(
        "operators on no list here follow torch's own lists, not TensorFlow's"
    )
    return reading.plan(reading.rules([*adds, *off], "tensorflow"), autocast=low)


def _entries(key: str, value: Any, low: str, where: str) -> Iterator[ListedOperator]:
    """The operators of one variable."""
    name, _, edit = key.removeprefix(PREFIX).rpartition("_")
    name = _OLD.get(name, name)
    asked = low if LISTS[name] == "low" else LISTS[name]
    for part in str(value).split(","):
        text = part.strip()
        if "|" in text:
            raise PlanError(
                "TensorFlow splits a list at commas alone",
                got=repr(text),
                do="write commas",
                where=", ".join(part for part in (where, place(key), key) if part),
            )
        if text:
            operator = Name.at(text, getattr(key, "line", 0))
            yield ListedOperator(operator, asked, f"{name}_{edit}")


def write(plan: Plan) -> Written:
    """The variables, one a line.

    An operator added to one list is taken off the others: TensorFlow allows no two.
    """
    operators = Operators.of(plan)
    mode = "auto_mixed_precision"
    if plan.autocast == "bf16":
        mode = "auto_mixed_precision_onednn_bfloat16"
    use = f"set -a; . FILE; set +a, then tf.config.optimizer.set_experimental_options({{'{mode}': True}})"
    out = Written("", use, operators.left_out)
    if operators.rest == "fp16" and not operators.formats:
        out.text = f"{PREFIX}LEVEL=UNSAFE_FORCE_ALL\n"
        return out
    if operators.rest:
        out.left_out.append(
            f"all others → {operators.rest}: the variables edit lists (a plan with autocast)"
        )
        return out
    lists: dict[str, list[str]] = {}
    formats = (plan.autocast, "fp32", FOLLOW)
    for name, asked, _ in operators.to("tensorflow", formats, out.notes):
        target = {"fp32": "DENYLIST", FOLLOW: "INFERLIST"}.get(asked, "ALLOWLIST")
        lists.setdefault(f"{target}_ADD", []).append(name)
        for other in LISTS:
            if other != target:
                lists.setdefault(f"{other}_REMOVE", []).append(name)
    edits = itertools.product(LISTS, ("ADD", "REMOVE"))
    order = [key for key in map("_".join, edits) if key in lists]
    out.text = "".join(f"{PREFIX}{key}={','.join(lists[key])}\n" for key in order)
    return out


def _check(
    adds: list[ListedOperator], removes: list[ListedOperator], where: str
) -> None:
    """Raise ``PlanError`` for what is added to and removed from one list.

    TensorFlow removes last, so the addition is lost.
    """
    for add, remove in itertools.product(adds, removes):
        same_list = _list_of(add) == _list_of(remove)
        if add.name == remove.name and same_list:
            raise PlanError(
                f"{add.name} is added to a list and removed from it",
                where=where,
                got=f"{list_and_line(add)} and {list_and_line(remove)}",
                do="TensorFlow removes last: leave the one out that is not meant",
            )


def _list_of(entry: ListedOperator) -> str:
    return entry.listed.partition("_")[0]
