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
    own: Mapping[str, Tensor], group: Mapping[str, Any], whole: str, where: str
) -> tuple[Tensor, QParams, Format]:
    said = group.get("weights") or {}
    kind = str(group.get("format") or whole)
    bits, symmetric = int(said.get("num_bits", 8)), bool(said.get("symmetric", True))
    if kind not in FORMATS or bits not in BITS:
        raise QuantizationError(
            "a way of storing that is not read here",
            where=where,
            got=f"{kind}, {bits} bits",
            expected=f"{', '.join(FORMATS)} with 2, 4 or 8 bits",
        )
    fmt = (
        parse_format("fp8_e4m3fn")
        if said.get("type") == "float"
        else integer(
            bits, symmetric=symmetric, narrow_range=False if symmetric else None
        )
    )
    packed = kind == "pack-quantized"
    needed = {
        "weight_scale",
        *(("weight_packed", "weight_shape") if packed else ("weight",)),
        *(() if symmetric else ("weight_zero_point",)),
    }
    missing = sorted(needed - set(own))
    if missing:
        raise QuantizationError(
            "a tensor is missing",
            where=where,
            expected=", ".join(missing),
            got=", ".join(sorted(own)),
        )
    strategy = str(
        said.get("strategy") or ("group" if said.get("group_size") else "tensor")
    )
    granularity = _granularity(strategy, said, where)
    codes = (
        unpack(own["weight_packed"], bits, own["weight_shape"].tolist(), where=where)
        if packed
        else own["weight"]
    )
    _check_order(own.get("weight_g_idx"), granularity, where)
    view, axes = granularity.split(codes.shape)
    per_set = torch.Size(1 if i in axes else n for i, n in enumerate(view))
    scale = own["weight_scale"]
    if scale.numel() != per_set.numel():
        raise QuantizationError(
            "the scales do not fit the weight",
            where=where,
            got=f"shape {tuple(scale.shape)}",
            expected=f"{per_set.numel()}: {strategy} of shape {tuple(codes.shape)}",
        )
    zero_point = None
    if not symmetric:
        points = own["weight_zero_point"]
        if packed and isinstance(granularity, PerAxis | PerGroup):
            points = unpack(
                points,
                bits,
                (codes.shape[0], scale.numel() // max(codes.shape[0], 1)),
                axis=0,
                where=where,
            )
        zero_point = points.reshape(per_set).to(torch.float32)
    return (
        codes,
        QParams(scale.to(torch.float32).reshape(per_set), zero_point, granularity),
        fmt,
    )


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
    module: str, own: Mapping[str, Tensor], said: Mapping[str, Any], where: str
) -> Entry:
    fmt = (
        "fp8_e4m3fn"
        if said.get("type") == "float"
        else f"int{said.get('num_bits', 8)}"
        + ("_full" if said.get("symmetric", True) else "_asym")
    )
    granularity = "per_token" if said.get("strategy") == "token" else "per_tensor"
    dynamic = bool(said.get("dynamic"))
    site = (f"{module}/linear",)
    if dynamic:
        return Entry(
            f"{module}/linear:0",
            "activation",
            fmt,
            granularity,
            sites=site,
            dynamic=True,
        )
    if "input_scale" not in own:
        raise QuantizationError(
            "a tensor is missing",
            where=where,
            expected="input_scale",
            got=", ".join(sorted(own)),
        )
    scale = tuple(own["input_scale"].float().flatten().tolist())
    points = own.get("input_zero_point")
    zero_point = (
        tuple(int(z) for z in points.flatten().tolist())
        if points is not None and fmt.endswith("asym")
        else None
    )
    return Entry(
        f"{module}/linear:0", "activation", fmt, granularity, scale, zero_point, site
    )
