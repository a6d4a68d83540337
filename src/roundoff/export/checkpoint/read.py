"""Reading weights that compressed-tensors, or ``write_compressed``, put into a folder; ``compressed.py`` says its files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.export.checkpoint.packing import unpack
from roundoff.export.checkpoint.shards import read_tensors
from roundoff.formats import (
    Format,
    Granularity,
    PerAxis,
    PerBlock,
    PerGroup,
    PerTensor,
    QParams,
    integer,
    parse_format,
)
from roundoff.quantize import Entry

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_SUFFIXES = (
    "weight_packed",
    "weight_shape",
    "weight_scale",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
    "input_zero_point",
)
BITS = (2, 4, 8)


@dataclass(frozen=True)
class Compressed:
    """What a folder holds.

    Attributes:
        tensors: name of a weight → its codes (integers, or float8_e4m3fn), qparams and format.
        others: every other tensor.
        inputs: name of a weight → how the input of its layer is quantized.
        config: ``config.json``.
    """

    tensors: dict[str, tuple[Tensor, QParams, Format]]
    others: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Entry] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def read_compressed(folder: str | Path) -> Compressed:
    """Read such a folder, of one file or of shards with an index.

    Integers come back with the full range (``int4_full``), which the files have.

    Raises:
        QuantizationError: no such folder, a damaged file, a quantized weight that no group names, a way of storing that is
            not among ``FORMATS``, tensors that are missing or have another shape.
    """
    place = Path(folder)
    config = model_config(place)
    said = config.get("quantization_config") or config.get("compression_config")
    if (
        not isinstance(said, Mapping)
        or said.get("quant_method", "compressed-tensors") != "compressed-tensors"
    ):
        raise QuantizationError(
            "not compressed by compressed-tensors",
            where=str(place / "config.json"),
            expected='quantization_config with "quant_method": "compressed-tensors"',
        )
    held = read_tensors(place)
    modules = dict.fromkeys(
        name.rpartition(".")[0]
        for name in held
        if name.endswith((".weight_packed", ".weight_scale"))
    )
    found = Compressed({}, {}, {}, config)
    for module in modules:
        own = {
            s: held[f"{module}.{s}"]
            for s in (*_SUFFIXES, "weight")
            if f"{module}.{s}" in held
        }
        group = _group(module, said)
        where = f"{place}, {module}"
        found.tensors[f"{module}.weight"] = _read(
            own, group, str(said.get("format", "")), where
        )
        if group.get("input_activations"):
            found.inputs[f"{module}.weight"] = _read_input(
                module, own, group["input_activations"], where
            )
    taken = {
        f"{module}.{suffix}" for module in modules for suffix in (*_SUFFIXES, "weight")
    }
    found.others.update(
        {name: tensor for name, tensor in held.items() if name not in taken}
    )
    return found


def model_config(place: Path, missing_ok: bool = False) -> dict[str, Any]:
    """The folder's ``config.json``. Raises ``QuantizationError`` where it is no object, or missing unless that is fine."""
    path = place / "config.json"
    if missing_ok and not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise QuantizationError(
            f"no readable config.json: {error}",
            where=str(place),
            expected="the folder of a model, with config.json",
        ) from error
    if not isinstance(data, dict):
        raise QuantizationError(
            "config.json is no object", where=str(path), got=type(data).__name__
        )
    return data


def _group(module: str, said: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group that names a module: by name, else by a pattern, else by a class, which the file does not say."""
    groups = [
        g for g in said.get("config_groups", {}).values() if isinstance(g, Mapping)
    ]
    ways: tuple[Callable[[str], bool], ...] = (
        lambda target: target == module,
        lambda target: (
            target.startswith("re:") and re.match(target[3:], module) is not None
        ),
        lambda target: re.fullmatch(r"[A-Z]\w*", target) is not None,
    )
    for matches in ways:
        for group in groups:
            if any(matches(str(target)) for target in group.get("targets", ())):
                return group
    raise QuantizationError(
        "no group of quantization_config names this layer",
        where=module,
        expected="a target that is its name, a pattern re:..., or a class",
    )


def _read(
    stored: Mapping[str, Tensor], group: Mapping[str, Any], whole: str, where: str
) -> tuple[Tensor, QParams, Format]:
    """Return the codes, qparams and format of one weight, from its tensors by suffix."""
    arguments = group.get("weights") or {}
    kind = str(group.get("format") or whole)
    bits = int(arguments.get("num_bits", 8))
    symmetric = bool(arguments.get("symmetric", True))
    packed = kind == "pack-quantized"
    if kind not in FORMATS or bits not in BITS:
        raise QuantizationError(
            "a way of storing that is not read here",
            where=where,
            got=f"{kind}, {bits} bits",
            expected=f"{', '.join(FORMATS)} with 2, 4 or 8 bits",
        )
    _check_tensors(stored, packed, symmetric, where)
    if packed:
        shape = stored["weight_shape"].tolist()
        codes = unpack(stored["weight_packed"], bits, shape, where=where)
    else:
        codes = stored["weight"]
    strategy = _strategy(arguments)
    granularity = _granularity(strategy, arguments, where)
    _check_order(stored.get("weight_g_idx"), granularity, where)
    view, axes = granularity.split(codes.shape)
    per_set = torch.Size(1 if i in axes else n for i, n in enumerate(view))
    scale = stored["weight_scale"]
    if scale.numel() != per_set.numel():
        raise QuantizationError(
            "the scales do not fit the weight",
            where=where,
            got=f"shape {tuple(scale.shape)}",
            expected=f"{per_set.numel()}: {strategy} of shape {tuple(codes.shape)}",
        )
    zero_point = None
    if not symmetric:
        points = stored["weight_zero_point"]
        if packed and isinstance(granularity, PerAxis | PerGroup):
            rows = codes.shape[0]
            points_shape = (rows, scale.numel() // max(rows, 1))
            points = unpack(points, bits, points_shape, axis=0, where=where)
        zero_point = points.reshape(per_set).to(torch.float32)
    scale = scale.to(torch.float32).reshape(per_set)
    fmt = _weight_format(arguments, bits, symmetric)
    return codes, QParams(scale, zero_point, granularity), fmt


def _check_tensors(
    stored: Mapping[str, Tensor], packed: bool, symmetric: bool, where: str
) -> None:
    needed = {"weight_scale"}
    needed |= {"weight_packed", "weight_shape"} if packed else {"weight"}
    if not symmetric:
        needed.add("weight_zero_point")
    missing = sorted(needed - set(stored))
    if missing:
        raise QuantizationError(
            "a tensor is missing",
            where=where,
            expected=", ".join(missing),
            got=", ".join(sorted(stored)),
        )


def _weight_format(arguments: Mapping[str, Any], bits: int, symmetric: bool) -> Format:
    if arguments.get("type") == "float":
        return parse_format("fp8_e4m3fn")
    if symmetric:
        return integer(bits, symmetric=True, narrow_range=False)
    return integer(bits, symmetric=False)


def _strategy(arguments: Mapping[str, Any]) -> str:
    by_size = "group" if arguments.get("group_size") else "tensor"
    return str(arguments.get("strategy") or by_size)


def _granularity(strategy: str, said: Mapping[str, Any], where: str) -> Granularity:
    if strategy == "tensor":
        return PerTensor()
    if strategy == "channel":
        return PerAxis(0)
    if strategy == "group" and said.get("group_size"):
        return PerGroup(int(said["group_size"]))
    if strategy == "block" and said.get("block_structure"):
        return PerBlock(tuple(int(size) for size in said["block_structure"]))
    raise QuantizationError(
        "no such strategy",
        where=where,
        got=strategy,
        expected="tensor, channel, group with group_size, or block with block_structure",
    )


def _check_order(index: Tensor | None, granularity: Any, where: str) -> None:
    """Groups of columns in another order than they lie (GPTQ's activation order) are no granularity of ours."""
    if index is None or bool((index < 0).all()):
        return
    size = (
        granularity.group_size if isinstance(granularity, PerGroup) else index.numel()
    )
    if not torch.equal(index.long().cpu(), torch.arange(index.numel()) // size):
        raise QuantizationError(
            "columns are grouped in another order than they lie",
            where=where,
            got="weight_g_idx",
            expected="groups of neighbouring columns",
            do="quantize with actorder null or static",
        )


def _read_input(
    module: str, stored: Mapping[str, Tensor], arguments: Mapping[str, Any], where: str
) -> Entry:
    """Return how the input of a layer is quantized."""
    fmt = _input_format(arguments)
    granularity = "per_token" if arguments.get("strategy") == "token" else "per_tensor"
    name = f"{module}/linear:0"
    sites = (f"{module}/linear",)
    if arguments.get("dynamic"):
        return Entry(name, "activation", fmt, granularity, sites=sites, dynamic=True)
    if "input_scale" not in stored:
        raise QuantizationError(
            "a tensor is missing",
            where=where,
            expected="input_scale",
            got=", ".join(sorted(stored)),
        )
    scale = tuple(stored["input_scale"].float().flatten().tolist())
    points = stored.get("input_zero_point")
    zero_point = None
    if points is not None and fmt.endswith("asym"):
        zero_point = tuple(int(point) for point in points.flatten().tolist())
    return Entry(name, "activation", fmt, granularity, scale, zero_point, sites)


def _input_format(arguments: Mapping[str, Any]) -> str:
    if arguments.get("type") == "float":
        return "fp8_e4m3fn"
    ending = "full" if arguments.get("symmetric", True) else "asym"
    return f"int{arguments.get('num_bits', 8)}_{ending}"
