"""The quantized weights of a model as a checkpoint of codes and scales, and back into a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.export.checkpoint.read import BITS, Compressed, read_compressed
from roundoff.export.checkpoint.write import Sizes, write_compressed
from roundoff.formats import (
    Format,
    PerAxis,
    PerGroup,
    QParams,
    dequantize,
    integer,
    quantize,
)
from roundoff.quantize import Entry, QuantizedModel, Quantizer

#: In config.json: the weights that are stored as (out, in) and whose parameters are (in, out).
TURNED = "roundoff_turned"


def write_checkpoint(
    model: QuantizedModel,
    folder: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
) -> Sizes:
    """Write a calibrated model's weights as compressed-tensors has them (``compressed.py``); returns the bytes.

    Codes and scales come from the quantizers of weights; all other parameters and buffers are stored as they are. Integers
    of another width than 2, 4 or 8 bits take the next of these. Parameters that lie as (in, out), such as those of GPT-2's
    Conv1D, are stored as (out, in), and ``config.json`` names them.

    Args:
        model: calibrated, its weights in integers or fp8_e4m3fn.
        folder: made if missing.
        config: the model's ``config.json``; by default that of a transformers model, or of the folder.

    Raises:
        QuantizationError: a weight that has no place there (blocks, other than two axes), no quantized weight at all, or
            values that are divided before some layers (``smooth_`` with ``explicit``), which a checkpoint cannot say.
        OutputError: the folder can't be written to.
    """
    if model.factors:
        raise QuantizationError(
            "a checkpoint of weights has no place for divisions of values",
            where="write_checkpoint",
            got=f"{len(model.factors)} values divided before they are read",
            do="smooth_(..., explicit=False), or export_onnx",
        )
    tensors: dict[str, tuple[Tensor, QParams, Format]] = {}
    inputs: dict[str, Entry] = {}
    turned = []
    held = dict(model.model.named_parameters())
    for name, quantizer in model.named():
        if not quantizer.weight:
            continue
        if name not in held or quantizer.dynamic:
            raise QuantizationError(
                "a weight that has no codes of its own",
                where=name,
                expected="a parameter with scales",
                got=f"{quantizer.fmt.name}, its scales chosen inside the format",
            )
        weight, qparams = held[name].detach(), quantizer.qparams()
        codes = quantize(weight, qparams, quantizer.fmt)
        if weight.ndim == 2 and quantizer.operand.reduce % 2 == 0:
            codes, qparams = codes.T.contiguous(), _turned(qparams)
            turned.append(name)
        tensors[name] = codes, qparams, _stored_format(quantizer.fmt)
        entry = _input(model, quantizer)
        if entry is not None:
            inputs[name] = entry
    if not tensors:
        raise QuantizationError(
            "no weight of this model is quantized",
            where="write_checkpoint",
            expected="a model from roundoff.quantize",
        )
    whole = dict(config) if config is not None else _config(model.model)
    if turned:
        whole = {**(whole or {}), TURNED: turned}
    others = {name: p.detach() for name, p in held.items() if name not in tensors}
    known = {id(b) for b in model.model.buffers()}
    others |= {
        n: t
        for n, t in model.model.state_dict().items()
        if id(_buffer(model.model, n)) in known and n not in others
    }
    return write_compressed(tensors, others, folder, inputs=inputs, config=whole)


def load_checkpoint_(model: nn.Module, folder: str | Path) -> Compressed:
    """Put what ``write_checkpoint`` wrote into a model of the same shape, in place: weights are the values of their codes.

    Returns what was read. Raises ``QuantizationError`` where names or shapes do not fit; the model is then as before.
    """
    read = read_compressed(folder)
    turned = set(read.config.get(TURNED, ()))
    found = {
        name: dequantize(codes, qparams)
        for name, (codes, qparams, _) in read.tensors.items()
    }
    found = {
        name: tensor.T if name in turned else tensor for name, tensor in found.items()
    } | read.others
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    missing = sorted(set(dict(model.named_parameters())) - set(found))
    foreign = sorted(
        name
        for name, tensor in found.items()
        if name not in own or own[name].shape != tensor.shape
    )
    if missing or foreign:
        what = (
            f"{missing[0]} is missing"
            if missing
            else f"{foreign[0]} has no place in the model"
        )
        raise QuantizationError(
            "a checkpoint of another model",
            where=str(folder),
            got=what,
            expected=f"the {len(own)} parameters and buffers of {type(model).__name__}",
        )
    with torch.no_grad():
        for name, tensor in found.items():
            own[name].copy_(tensor)
    return read


def _turned(qparams: QParams) -> QParams:
    """Of a weight (in, out), for the same as (out, in)."""
    own, turned, move = qparams.granularity, qparams.granularity, (0, 1)
    if isinstance(
        own, PerGroup
    ):  # the view is (sets, size, out): one axis more than the weight has
        turned, move = PerGroup(own.group_size, 1), (-1, 0)
    elif isinstance(own, PerAxis):
        turned = PerAxis(1 - own.axis % 2)
    zero_point = qparams.zero_point
    return QParams(
        qparams.scale.movedim(*move),
        None if zero_point is None else zero_point.movedim(*move),
        turned,
    )


def _stored_format(fmt: Format) -> Format:
    """The format whose container holds the codes."""
    if fmt.one_quantum != 1.0 or fmt.width in BITS or fmt.width > max(BITS):
        return fmt
    return integer(min(b for b in BITS if b >= fmt.width), symmetric=fmt.symmetric)


def _input(model: QuantizedModel, weight: Quantizer) -> Entry | None:
    """How the input beside a weight is quantized, where all that read the weight have it alike."""
    routes = [model.routes[site] for site in weight.sites if site in model.routes]
    names = {
        n
        for route in routes
        for n in route.uses.values()
        if not model.quantizer(n).weight
    }
    if not names:
        return None
    own = model.quantizer(sorted(names)[0])
    return Entry.of(
        own.name,
        "activation",
        own.fmt,
        None if own.dynamic else own.qparams(),
        granularity=own.granularity,
        sites=own.sites,
        observer=own.observer,
        dynamic=own.dynamic,
    )


def _config(model: nn.Module) -> dict[str, Any] | None:
    """The ``config.json`` of a transformers model."""
    text = getattr(getattr(model, "config", None), "to_json_string", None)
    if not callable(text):
        return None
    found: dict[str, Any] = json.loads(text())
    return found


def _buffer(model: nn.Module, name: str) -> Tensor | None:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path)._buffers.get(last)
