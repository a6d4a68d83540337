"""MindSpore: the arguments of ``mindspore.amp.custom_mixed_precision``, a white or a
black list of cells and primitives.

With a white list only its members run in half precision, with a black list all cells
but its members. Cells become classes of torch modules, primitives operators. Source:
mindspore.amp.custom_mixed_precision, 2.x.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundoff.errors import PlanError
from roundoff.ops import operator_names, unknown_operators
from roundoff.plan.lists.fold import ListedOperator, Read, low_format
from roundoff.plan.lists.source import Name, check_keys, names_of, place
from roundoff.plan.rules import Plan, Rule

KEYS = ("white_list", "black_list", "dtype")
#: Cells whose name is another than that of torch's module.
_CELLS = {
    "Dense": "Linear",
    "Conv2dTranspose": "ConvTranspose2d",
    "Conv1dTranspose": "ConvTranspose1d",
}
_SAME = (
    "Conv1d Conv2d Conv3d BatchNorm1d BatchNorm2d BatchNorm3d LayerNorm GroupNorm InstanceNorm1d InstanceNorm2d "
    "Embedding LSTM GRU RNN Softmax LogSoftmax Flatten ReLU GELU SiLU MultiheadAttention Dropout"
).split()
_PRIMITIVES = {
    "ReLU": "Relu",
    "GeLU": "Gelu",
    "Softmax": "SoftmaxV2",
    "LogSoftmax": "LogSoftmaxV2",
    "Conv2DBackpropInput": "Conv2DTranspose",
    "Gather": "GatherV2",
    "BiasAdd": "BiasAdd",
}


def recognise(data: Any) -> bool:
    """Return True if these are arguments of ``custom_mixed_precision``."""
    return isinstance(data, Mapping) and any(
        key in data for key in ("white_list", "black_list")
    )


def _the_list(data: Mapping[str, Any], where: str) -> str:
    lists = [key for key in KEYS[:2] if data.get(key) is not None]
    if len(lists) != 1:
        raise PlanError(
            "one of white_list and black_list",
            where=where,
            got=" and ".join(lists) or "neither",
            do="MindSpore takes one of them",
        )
    return lists[0]


def read(
    data: Mapping[str, Any],
    where: str,
    *,
    format: str | None = None,
    partial: bool = False,
) -> Plan:
    """The plan of one list; names are written ``nn.Conv2d``, ``ops.MatMul`` or without
    the module.
    """
    check_keys(data, KEYS, where, "argument of custom_mixed_precision")
    key = _the_list(data, where)
    low = low_format(data.get("dtype", format or "float16"), f"{where}, dtype")
    asked = low if key == "white_list" else "fp32"
    reading = Read("mindspore", where, partial)
    cells: list[str] = []
    primitives: list[ListedOperator] = []
    lost: list[Name] = []
    for written in names_of(data[key], f"{where}, {key}"):
        short = Name.at(written.rpartition(".")[2], getattr(written, "line", 0))
        primitive = _PRIMITIVES.get(short, short)
        if _is_cell(written):
            cells.append(f"class:{_CELLS.get(short, short)}")
            places = ", ".join(part for part in (place(written), key) if part)
            reading.origin[cells[-1]] = f"{written} ({places})"
        elif primitive in operator_names("cann"):
            primitives.append(
                ListedOperator(Name.at(primitive, short.line), asked, key)
            )
        elif partial:
            reading.left_out.append(f"{written}: not in the table of names")
        else:
            lost.append(short)
    if lost:
        raise unknown_operators(
            lost, "cann", [place(name) or key for name in lost], where
        )
    rules = reading.rules(primitives, "cann")
    if cells:
        rules = (Rule(asked, tuple(cells)), *rules)
    return reading.plan(rules, "fp32" if asked == low else low)


def _is_cell(written: str) -> bool:
    """Return True for a class of modules; ``ops.Softmax`` is a primitive."""
    module, _, short = written.rpartition(".")
    return not module.endswith("ops") and (short in _CELLS or short in _SAME)
