"""Weights as codes in safetensors, as the compressed-tensors library and the runtimes
that read its checkpoints have them.

A folder of a Hugging Face model: ``model.safetensors`` and, in ``config.json``,
``quantization_config`` with a group for each way of quantizing. Of a weight
``NAME.weight`` the file holds, by the group's format,

- ``pack-quantized`` (integers of 2, 4 or 8 bits, weights alone):
  ``NAME.weight_packed``, int32 words of ``32 / bits`` codes along the input axis, the
  first in the lowest bits, each with ``2**(bits - 1)`` added; ``NAME.weight_shape``;
- ``int-quantized``, ``float-quantized`` (inputs too) and ``naive-quantized`` (fp8
  weights alone): ``NAME.weight``, the codes themselves in int8 or float8_e4m3fn;

and always ``NAME.weight_scale``, for asymmetric ones ``NAME.weight_zero_point`` (packed
like the weight, along the output axis, where scales are per channel or group), for
static inputs ``NAME.input_scale`` and ``NAME.input_zero_point``. Checked against
compressed-tensors 0.20.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.export.checkpoint.packing import pack
from roundoff.export.checkpoint.read import BITS, FORMATS, model_config
from roundoff.export.checkpoint.shards import write_tensors
from roundoff.files import check_folder, write_text
from roundoff.formats import (
    Format,
    PerAxis,
    PerBlock,
    PerGroup,
    PerTensor,
    PerToken,
    QParams,
)
from roundoff.quantize import Entry, format_named, granularity_named


@dataclass(frozen=True)
class Sizes:
    """Bytes on disk; ``as_bf16``: what the same tensors have with every weight in bf16."""

    weights: int
    qparams: int
    others: int
    as_bf16: int


def write_compressed(
    tensors: Mapping[str, tuple[Tensor, QParams, Format]],
    others: Mapping[str, Tensor],
    folder: str | Path,
    *,
    inputs: Mapping[str, Entry] | None = None,
    config: Mapping[str, Any] | None = None,
    format: str | None = None,
) -> Sizes:
    """Write quantized weights, and all other tensors as they are, into a folder; returns the bytes.

    Args:
        tensors: parameter name (it ends in ``.weight``) → codes, as
            :func:`roundoff.formats.quantize` gives them, of shape ``(out, in)``, their
            qparams (per tensor, ``PerAxis(0)``, ``PerGroup`` along the input, or
            ``PerBlock`` of two sizes) and format (integers of 2, 4 or 8 bits,
            fp8_e4m3fn).
        others: embeddings, norms, biases.
        folder: made if missing; what it holds under the same names is replaced, its
            ``config.json`` added to.
        inputs: how inputs of layers are quantized: static per tensor, or dynamic per
            token or tensor.
        config: the model's ``config.json``; by default that of the folder, or an empty one.
        format: one of ``FORMATS`` for all; by default what compressed-tensors itself
            chooses (see this file's head).

    Raises:
        QuantizationError: a weight that these formats can't hold; nothing is written.
        OutputError: the folder can't be written to.
    """
    inputs = inputs or {}
    stored: dict[str, Tensor] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, (codes, qparams, fmt) in tensors.items():
        module = _module_of(name)
        entry = inputs.get(name)
        kind = format or _format(fmt, entry)
        _check(name, codes, qparams, fmt, kind)
        parts = _stored(codes, qparams, fmt, kind)
        if entry is not None:
            parts |= _stored_input(entry, name)
        stored |= {f"{module}.{suffix}": tensor for suffix, tensor in parts.items()}
        scheme = {
            "weights": _weight_arguments(fmt, qparams),
            "input_activations": _input_arguments(entry),
            "output_activations": None,
            "format": kind,
        }
        group = groups.setdefault(json.dumps(scheme), {**scheme, "targets": []})
        group["targets"].append(module)
    _check_names(inputs, tensors, stored, others)
    place = check_folder(folder)
    whole = dict(config) if config is not None else model_config(place, missing_ok=True)
    whole["quantization_config"] = _quantization_config(list(groups.values()))
    write_tensors({**stored, **others}, place)
    write_text(place / "config.json", json.dumps(whole, indent=2) + "\n")
    codes_bytes = sum(
        _bytes(tensor)
        for name, tensor in stored.items()
        if name.endswith((".weight", ".weight_packed"))
    )
    other_bytes = sum(map(_bytes, others.values()))
    in_bf16 = 2 * sum(codes.numel() for codes, _, _ in tensors.values())
    return Sizes(
        weights=codes_bytes,
        qparams=sum(map(_bytes, stored.values())) - codes_bytes,
        others=other_bytes,
        as_bf16=other_bytes + in_bf16,
    )


def _module_of(name: str) -> str:
    """Return ``NAME`` of ``NAME.weight``."""
    module, dot, last = name.rpartition(".")
    if last != "weight" or not dot:
        raise QuantizationError(
            "not the name of a layer's weight", where=name, expected="NAME.weight"
        )
    return module


def _check_names(
    inputs: Mapping[str, Entry],
    tensors: Mapping[str, Any],
    stored: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
) -> None:
    foreign = [name for name in inputs if name not in tensors]
    if foreign:
        raise QuantizationError(
            "inputs of a layer without a quantized weight",
            where=foreign[0],
            expected="a key of tensors",
        )
    clash = sorted(set(stored) & set(others))
    if clash:
        raise QuantizationError(
            "a tensor is both quantized and not",
            where=clash[0],
            do="take it out of others",
        )


def _quantization_config(groups: list[dict[str, Any]]) -> dict[str, Any]:
    formats = {group["format"] for group in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": next(iter(formats)) if len(formats) == 1 else "mixed-precision",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": [],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _format(fmt: Format, entry: Entry | None) -> str:
    whole = fmt.one_quantum == 1.0
    if entry is None:
        return "pack-quantized" if whole else "naive-quantized"
    return "int-quantized" if whole else "float-quantized"


def _check(name: str, codes: Tensor, qparams: QParams, fmt: Format, kind: str) -> None:
    """Raise ``QuantizationError`` for a weight that has no place."""
    problem = _problem(codes, qparams, fmt, kind)
    if problem is not None:
        what, expected, got = problem
        raise QuantizationError(what, where=name, expected=expected, got=got)


def _problem(
    codes: Tensor, qparams: QParams, fmt: Format, kind: str
) -> tuple[str, str, str] | None:
    """Return what is wrong, what is expected and what was given; None where all fits."""
    granularity = qparams.granularity or PerTensor()
    whole = fmt.one_quantum == 1.0
    if kind not in FORMATS:
        return "no such way of storing", ", ".join(FORMATS), kind
    if codes.ndim != 2:
        return (
            "weights of linear layers alone have a place",
            "codes of shape (out, in)",
            f"shape {tuple(codes.shape)}",
        )
    if not _has_place(codes, fmt):
        return (
            "codes that have no place",
            "integers of 2, 4 or 8 bits, or fp8_e4m3fn",
            f"{fmt.name}, {codes.dtype}",
        )
    if not whole and kind in ("pack-quantized", "int-quantized"):
        return f"{kind} holds integers", "float-quantized or naive-quantized", fmt.name
    if not _fits(granularity):
        return (
            "no words for this granularity",
            "PerTensor(), PerAxis(0), PerGroup(size) or PerBlock of two sizes",
            str(granularity),
        )
    if whole and codes.numel():
        lowest = int(codes.min())
        highest = int(codes.max())
        if lowest < fmt.min_finite or highest > fmt.max_finite:
            return (
                f"codes that {fmt.name} does not have",
                f"{fmt.min_finite:g} to {fmt.max_finite:g}",
                f"{lowest} to {highest}",
            )
    return None


def _has_place(codes: Tensor, fmt: Format) -> bool:
    if fmt.one_quantum == 1.0:
        return fmt.width in BITS and not codes.is_floating_point()
    return codes.dtype == torch.float8_e4m3fn


def _fits(granularity: Any) -> bool:
    if isinstance(granularity, PerAxis):
        return granularity.axis in (0, -2)
    if isinstance(granularity, PerGroup):
        return granularity.axis in (1, -1)
    return isinstance(granularity, PerTensor) or (
        isinstance(granularity, PerBlock) and len(granularity.block_size) == 2
    )


def _stored(
    codes: Tensor, qparams: QParams, fmt: Format, kind: str
) -> dict[str, Tensor]:
    """Return the tensors of one weight, by suffix."""
    shape = _scale_shape(codes, qparams)
    packed = kind == "pack-quantized"
    tensors = {"weight_scale": qparams.scale.detach().reshape(shape).contiguous()}
    if packed:
        tensors["weight_packed"] = pack(codes, fmt.width)
        tensors["weight_shape"] = torch.tensor(codes.shape)
    elif fmt.one_quantum == 1.0:
        tensors["weight"] = codes.to(torch.int8).contiguous()
    else:
        tensors["weight"] = codes.contiguous()
    if qparams.zero_point is not None or not fmt.symmetric:
        points = torch.zeros(shape)
        if qparams.zero_point is not None:
            points = qparams.zero_point.detach().reshape(shape)
        points = points.to(torch.int8).contiguous()
        if packed and isinstance(qparams.granularity, PerAxis | PerGroup):
            points = pack(points, fmt.width, axis=0)
        tensors["weight_zero_point"] = points
    return tensors


def _scale_shape(codes: Tensor, qparams: QParams) -> tuple[int, ...]:
    """Return the shape of the scales in the file: at least two axes but for one scale."""
    granularity = qparams.granularity or PerTensor()
    if isinstance(granularity, PerTensor):
        return (1,)
    view, axes = granularity.split(codes.shape)
    shape = tuple(n for i, n in enumerate(view) if i not in axes)
    return (*shape, 1) if len(shape) == 1 else shape


def _stored_input(entry: Entry, name: str) -> dict[str, Tensor]:
    granularity = granularity_named(entry.granularity, name)
    fmt = format_named(entry.format, name)
    if fmt.width != 8 or not isinstance(granularity, PerTensor | PerToken):
        raise QuantizationError(
            "no words for this input",
            where=name,
            got=f"{entry.format} {entry.granularity}",
            expected="int8 or fp8_e4m3fn, static per tensor or dynamic per token or tensor",
        )
    if entry.dynamic:
        return {}
    tensors = {"input_scale": torch.tensor(entry.scale[:1])}
    if entry.zero_point is not None:
        points = torch.tensor(entry.zero_point[:1], dtype=torch.int8)
        tensors["input_zero_point"] = points
    return tensors


def _weight_arguments(fmt: Format, qparams: QParams) -> dict[str, Any]:
    granularity = qparams.granularity or PerTensor()
    strategy = {
        PerTensor: "tensor",
        PerAxis: "channel",
        PerGroup: "group",
        PerBlock: "block",
    }[type(granularity)]
    return {
        "num_bits": fmt.width,
        "type": "int" if fmt.one_quantum == 1.0 else "float",
        "symmetric": fmt.symmetric and qparams.zero_point is None,
        "strategy": strategy,
        "group_size": granularity.group_size
        if isinstance(granularity, PerGroup)
        else None,
        "block_structure": list(granularity.block_size)
        if isinstance(granularity, PerBlock)
        else None,
        "dynamic": False,
        "actorder": None,
    }


def _input_arguments(entry: Entry | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    fmt = format_named(entry.format)
    return {
        "num_bits": fmt.width,
        "type": "int" if fmt.one_quantum == 1.0 else "float",
        "symmetric": fmt.symmetric and entry.zero_point is None,
        "strategy": "token" if entry.granularity == "per_token" else "tensor",
        "group_size": None,
        "block_structure": None,
        "dynamic": entry.dynamic,
        "actorder": None,
    }


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
