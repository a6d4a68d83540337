"""Weights as codes in safetensors, as the compressed-tensors library and the runtimes that read its checkpoints have them.

A folder of a Hugging Face model: ``model.safetensors`` and, in ``config.json``, ``quantization_config`` with a group for
each way of quantizing. Of a weight ``NAME.weight`` the file holds, by the group's format,

- ``pack-quantized`` (integers of 2, 4 or 8 bits, weights alone): ``NAME.weight_packed``, int32 words of ``32 / bits`` codes
  along the input axis, the first in the lowest bits, each with ``2**(bits - 1)`` added; ``NAME.weight_shape``;
- ``int-quantized``, ``float-quantized`` (inputs too) and ``naive-quantized`` (fp8 weights alone): ``NAME.weight``, the codes
  themselves in int8 or float8_e4m3fn;

and always ``NAME.weight_scale``, for asymmetric ones ``NAME.weight_zero_point`` (packed like the weight, along the output
axis, where scales are per channel or group), for static inputs ``NAME.input_scale`` and ``NAME.input_zero_point``. Checked
against compressed-tensors 0.20.
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
from roundoff.export.checkpoint.read import Compressed as Compressed
from roundoff.export.checkpoint.read import read_compressed as read_compressed
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
        tensors: parameter name (it ends in ``.weight``) → codes, as :func:`roundoff.formats.quantize` gives them, of shape
            ``(out, in)``, their qparams (per tensor, ``PerAxis(0)``, ``PerGroup`` along the input, or ``PerBlock`` of two
            sizes) and format (integers of 2, 4 or 8 bits, fp8_e4m3fn).
        others: embeddings, norms, biases.
        folder: made if missing; what it holds under the same names is replaced, its ``config.json`` added to.
        inputs: how inputs of layers are quantized: static per tensor, or dynamic per token or tensor.
        config: the model's ``config.json``; by default that of the folder, or an empty one.
        format: one of ``FORMATS`` for all; by default what compressed-tensors itself chooses (see this file's head).

    Raises:
        QuantizationError: a weight that these formats can't hold; nothing is written.
        OutputError: the folder can't be written to.
    """
    inputs = inputs or {}
    stored: dict[str, Tensor] = {}
    groups: dict[str, dict[str, Any]] = {}
    sizes = [0, 0]
    for name, (codes, qparams, fmt) in tensors.items():
        module, dot, last = name.rpartition(".")
        if last != "weight" or not dot:
            raise QuantizationError(
                "not the name of a layer's weight", where=name, expected="NAME.weight"
            )
        entry = inputs.get(name)
        kind = format or _format(fmt, entry)
        _check(name, codes, qparams, fmt, kind)
        made = _stored(codes, qparams, fmt, kind)
        if entry is not None:
            made |= _stored_input(entry, name)
        sizes[0] += sum(
            _bytes(t) for k, t in made.items() if k in ("weight", "weight_packed")
        )
        sizes[1] += sum(
            _bytes(t) for k, t in made.items() if k not in ("weight", "weight_packed")
        )
        stored |= {f"{module}.{suffix}": tensor for suffix, tensor in made.items()}
        scheme = {
            "weights": _weight_arguments(fmt, qparams),
            "input_activations": _input_arguments(entry),
            "output_activations": None,
            "format": kind,
        }
        groups.setdefault(json.dumps(scheme), {**scheme, "targets": []})[
            "targets"
        ].append(module)
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
    place = check_folder(folder)
    whole = dict(config) if config is not None else model_config(place, missing_ok=True)
    used = {group["format"] for group in groups.values()}
    whole["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": next(iter(used)) if len(used) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{i}": group for i, group in enumerate(groups.values())
        },
        "ignore": [],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    write_tensors({**stored, **others}, place)
    write_text(place / "config.json", json.dumps(whole, indent=2) + "\n")
    rest = sum(map(_bytes, others.values()))
    return Sizes(
        sizes[0],
        sizes[1],
        rest,
        rest + 2 * sum(codes.numel() for codes, _, _ in tensors.values()),
    )


def _format(fmt: Format, entry: Entry | None) -> str:
    whole = fmt.one_quantum == 1.0
    if entry is None:
        return "pack-quantized" if whole else "naive-quantized"
    return "int-quantized" if whole else "float-quantized"


def _check(name: str, codes: Tensor, qparams: QParams, fmt: Format, kind: str) -> None:
    granularity = qparams.granularity or PerTensor()
    whole = fmt.one_quantum == 1.0
    problem = None
    if kind not in FORMATS:
        problem = ("no such way of storing", ", ".join(FORMATS), kind)
    elif codes.ndim != 2:
        problem = (
            "weights of linear layers alone have a place",
            "codes of shape (out, in)",
            f"shape {tuple(codes.shape)}",
        )
    elif (
        (fmt.width not in BITS or codes.is_floating_point())
        if whole
        else codes.dtype != torch.float8_e4m3fn
    ):
        problem = (
            "codes that have no place",
            "integers of 2, 4 or 8 bits, or fp8_e4m3fn",
            f"{fmt.name}, {codes.dtype}",
        )
    elif not whole and kind in ("pack-quantized", "int-quantized"):
        problem = (
            f"{kind} holds integers",
            "float-quantized or naive-quantized",
            fmt.name,
        )
    elif not _fits(granularity):
        problem = (
            "no words for this granularity",
            "PerTensor(), PerAxis(0), PerGroup(size) or PerBlock of two sizes",
            str(granularity),
        )
    elif (
        whole
        and codes.numel()
        and not (
            fmt.min_finite <= int(codes.min()) and int(codes.max()) <= fmt.max_finite
        )
    ):
        problem = (
            f"codes that {fmt.name} does not have",
            f"{fmt.min_finite:g} to {fmt.max_finite:g}",
            f"{int(codes.min())} to {int(codes.max())}",
        )
    if problem is not None:
        raise QuantizationError(
            problem[0], where=name, expected=problem[1], got=problem[2]
        )


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
    """The tensors of one weight, by suffix."""
    view, axes = (qparams.granularity or PerTensor()).split(codes.shape)
    per_tensor = isinstance(qparams.granularity or PerTensor(), PerTensor)
    shape = (
        (1,) if per_tensor else tuple(n for i, n in enumerate(view) if i not in axes)
    )
    shape = (*shape, 1) if len(shape) == 1 and not per_tensor else shape
    found = {"weight_scale": qparams.scale.detach().reshape(shape).contiguous()}
    packed = kind == "pack-quantized"
    if packed:
        found |= {
            "weight_packed": pack(codes, fmt.width),
            "weight_shape": torch.tensor(codes.shape),
        }
    else:
        found["weight"] = (
            codes.to(torch.int8).contiguous()
            if fmt.one_quantum == 1.0
            else codes.contiguous()
        )
    if qparams.zero_point is not None or not fmt.symmetric:
        points = (
            torch.zeros(shape)
            if qparams.zero_point is None
            else qparams.zero_point.detach().reshape(shape)
        )
        points = points.to(torch.int8).contiguous()
        by_row = isinstance(qparams.granularity, PerAxis | PerGroup)
        found["weight_zero_point"] = (
            pack(points, fmt.width, axis=0) if packed and by_row else points
        )
    return found


def _stored_input(entry: Entry, name: str) -> dict[str, Tensor]:
    granularity, fmt = (
        granularity_named(entry.granularity, name),
        format_named(entry.format, name),
    )
    if fmt.width != 8 or not isinstance(granularity, PerTensor | PerToken):
        raise QuantizationError(
            "no words for this input",
            where=name,
            got=f"{entry.format} {entry.granularity}",
            expected="int8 or fp8_e4m3fn, static per tensor or dynamic per token or tensor",
        )
    if entry.dynamic:
        return {}
    found = {"input_scale": torch.tensor(entry.scale[:1])}
    if entry.zero_point is not None:
        found["input_zero_point"] = torch.tensor(entry.zero_point[:1], dtype=torch.int8)
    return found


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
