"""Reading a folder of weights from compressed-tensors, or from ``write_compressed``.

``write.py`` describes its files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.export.checkpoint.packing import unpack
from roundoff.export.checkpoint.shards import read_tensors
from roundoff.foreign import parse_json, read_text
from roundoff.foreign_patterns import names_matched
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
        tensors: name of a weight → its codes (integers, or float8_e4m3fn), qparams and
            format.
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
        QuantizationError: no such folder, a damaged file, a quantized weight that no
            group names, a way of storing that is not among ``FORMATS``, tensors that
            are missing or have another shape.
    """
    place = Path(folder)
    try:
        return _read(place)
    except QuantizationError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # a value of another type or size than a writer puts there
        raise QuantizationError(
            f"not a readable model: {type(error).__name__}: {error}",
            where=str(place),
            expected="a folder as compressed-tensors writes it",
        ) from error


def _read(place: Path) -> Compressed:
    config = model_config(place)
    scheme = _scheme(config, place)
    stored = read_tensors(place)
    group_of = _groups(_quantized_modules(stored), scheme)
    compressed = Compressed({}, {}, {}, config)
    taken: set[str] = set()
    for module, group in group_of.items():
        module_tensors = _tensors_of(module, stored)
        taken.update(f"{module}.{suffix}" for suffix in module_tensors)
        where = f"{place}, {module}"
        storing = str(group.get("format") or scheme.get("format", ""))
        weight = _read_weight(module_tensors, group, storing, where)
        compressed.tensors[f"{module}.weight"] = weight
        activations = group.get("input_activations")
        if activations:
            entry = _read_input(module, module_tensors, activations, where)
            compressed.inputs[f"{module}.weight"] = entry
    others = {name: t for name, t in stored.items() if name not in taken}
    compressed.others.update(others)
    return compressed


def _scheme(config: Mapping[str, Any], place: Path) -> Mapping[str, Any]:
    """Return the part of ``config.json`` that describes the quantization."""
    scheme = config.get("quantization_config") or config.get("compression_config")
    if isinstance(scheme, Mapping):
        method = scheme.get("quant_method", "compressed-tensors")
        if method == "compressed-tensors":
            return scheme
    raise QuantizationError(
        "not compressed by compressed-tensors",
        where=str(place / "config.json"),
        expected='quantization_config with "quant_method": "compressed-tensors"',
    )


def _quantized_modules(stored: Iterable[str]) -> list[str]:
    quantized = [n for n in stored if n.endswith((".weight_packed", ".weight_scale"))]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in quantized))


def _tensors_of(module: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of one module by suffix."""
    return {
        suffix: stored[f"{module}.{suffix}"]
        for suffix in (*_SUFFIXES, "weight")
        if f"{module}.{suffix}" in stored
    }


def model_config(place: Path, missing_ok: bool = False) -> dict[str, Any]:
    """Return the folder's ``config.json``; with ``missing_ok`` an empty one if missing.

    Raises:
        QuantizationError: it is missing, damaged, or no object.
    """
    path = place / "config.json"
    if missing_ok and not path.exists():
        return {}
    try:
        data = parse_json(read_text(path))
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


def _groups(
    modules: Sequence[str], scheme: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Return the group that names each module.

    By its name, else by a pattern, else by a class, which the file does not say.
    """
    group_of_target: dict[str, Mapping[str, Any]] = {}
    for group in scheme.get("config_groups", {}).values():
        if isinstance(group, Mapping):
            for target in group.get("targets", ()):
                group_of_target.setdefault(str(target), group)
    patterns = [text for text in group_of_target if text.startswith("re:")]
    matched_by = names_matched([text[len("re:") :] for text in patterns], modules)
    classes = (text for text in group_of_target if re.fullmatch(r"[A-Z]\w*", text))
    targets = dict.fromkeys(modules, next(classes, None))
    for pattern in reversed(patterns):
        targets |= dict.fromkeys(matched_by[pattern[len("re:") :]], pattern)
    targets |= {name: name for name in modules if name in group_of_target}
    return {name: _of_target(name, targets[name], group_of_target) for name in modules}


def _of_target(
    module: str, target: str | None, group_of_target: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any]:
    if target is None:
        raise QuantizationError(
            "no group of quantization_config names this layer",
            where=module,
            expected="a target that is its name, a pattern re:..., or a class",
        )
    return group_of_target[target]


def _read_weight(
    stored: Mapping[str, Tensor], group: Mapping[str, Any], storing: str, where: str
) -> tuple[Tensor, QParams, Format]:
    """Return the codes, qparams and format of one weight, from its tensors by suffix."""
    arguments = group.get("weights") or {}
    bits = int(arguments.get("num_bits", 8))
    symmetric = bool(arguments.get("symmetric", True))
    packed = storing == "pack-quantized"
    if storing not in FORMATS or bits not in BITS:
        raise QuantizationError(
            "a way of storing that is not read here",
            where=where,
            got=f"{storing}, {bits} bits",
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
    scale = scale.to(torch.float32).reshape(per_set)
    zero_point = None
    if not symmetric:
        points = stored["weight_zero_point"]
        if packed and isinstance(granularity, PerAxis | PerGroup):
            rows = codes.shape[0]
            points_shape = (rows, scale.numel() // max(rows, 1))
            points = unpack(points, bits, points_shape, axis=0, where=where)
        zero_point = points.reshape(per_set).to(torch.float32)
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


def _granularity(
    strategy: str, arguments: Mapping[str, Any], where: str
) -> Granularity:
    if strategy == "tensor":
        return PerTensor()
    if strategy == "channel":
        return PerAxis(0)
    if strategy == "group" and arguments.get("group_size"):
        return PerGroup(int(arguments["group_size"]))
    if strategy == "block" and arguments.get("block_structure"):
        return PerBlock(tuple(int(size) for size in arguments["block_structure"]))
    raise QuantizationError(
        "no such strategy",
        where=where,
        got=strategy,
        expected="tensor, channel, group with group_size, or block with block_structure",
    )


def _check_order(index: Tensor | None, granularity: Any, where: str) -> None:
    """Check that groups of columns lie together.

    Raises:
        QuantizationError: they don't, as in GPTQ's activation order, and so are no
            granularity of ours.
    """
    if index is None or bool((index < 0).all()):
        return
    size = index.numel()
    if isinstance(granularity, PerGroup):
        size = granularity.group_size
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
