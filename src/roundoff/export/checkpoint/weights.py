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

#: In config.json: the weights stored as (out, in) whose parameters are (in, out).
TURNED = "roundoff_turned"


def write_checkpoint(
    model: QuantizedModel,
    folder: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
) -> Sizes:
    """Write a calibrated model's weights as compressed-tensors; return the bytes.

    Codes and scales come from the quantizers of weights; all other parameters and
    buffers are stored as they are. Integers of another width than 2, 4 or 8 bits take
    the next of these. Parameters that lie as (in, out), such as those of GPT-2's Conv1D,
    are stored as (out, in), and ``config.json`` names them.

    Args:
        model: calibrated, its weights in integers or fp8_e4m3fn.
        folder: made if missing.
        config: the model's ``config.json``; by default that of a transformers model, or
            of the folder.

    Raises:
        QuantizationError: a weight that has no place there (blocks, other than two
            axes), no quantized weight at all, or values that are divided before some
            layers (``smooth_`` with ``explicit``), which a checkpoint cannot say.
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
    turned: list[str] = []
    parameters = dict(model.model.named_parameters())
    for name, quantizer in model.named():
        if not quantizer.weight:
            continue
        weight = _weight(name, quantizer, parameters)
        qparams = quantizer.qparams()
        codes = quantize(weight, qparams, quantizer.fmt)
        if weight.ndim == 2 and quantizer.operand.reduce % 2 == 0:
            codes = codes.T.contiguous()
            qparams = _turned(qparams)
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
    others = _other_tensors(model.model, tensors)
    return write_compressed(tensors, others, folder, inputs=inputs, config=whole)


def _weight(
    name: str, quantizer: Quantizer, parameters: Mapping[str, nn.Parameter]
) -> Tensor:
    if name not in parameters or quantizer.dynamic:
        raise QuantizationError(
            "a weight that has no codes of its own",
            where=name,
            expected="a parameter with scales",
            got=f"{quantizer.fmt.name}, its scales chosen inside the format",
        )
    return parameters[name].detach()


def _other_tensors(model: nn.Module, quantized: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the parameters that are not quantized, and the buffers of the state dict."""
    others = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if name not in quantized
    }
    buffers = {id(buffer) for buffer in model.buffers()}
    for name, tensor in model.state_dict().items():
        if name not in others and id(_buffer(model, name)) in buffers:
            others[name] = tensor
    return others


def load_checkpoint_(model: nn.Module, folder: str | Path) -> Compressed:
    """Put a checkpoint of ``write_checkpoint`` into a model of the same shape, in place.

    Weights become the values of their codes. Returns the checkpoint.

    Raises:
        QuantizationError: names or shapes do not fit; the model is then as before.
    """
    checkpoint = read_compressed(folder)
    turned = _names_of_turned(checkpoint.config, folder)
    tensors = dict(checkpoint.others)
    for name, (codes, qparams, _) in checkpoint.tensors.items():
        values = dequantize(codes, qparams)
        tensors[name] = values.T if name in turned else values
    _check_fit(model, tensors, folder)
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in tensors.items():
            places[name].copy_(tensor)
    return checkpoint


def _check_fit(
    model: nn.Module, tensors: Mapping[str, Tensor], folder: str | Path
) -> None:
    parameters = dict(model.named_parameters())
    places = {**parameters, **dict(model.named_buffers())}
    missing = sorted(set(parameters) - set(tensors))
    foreign = sorted(
        name
        for name, tensor in tensors.items()
        if name not in places or places[name].shape != tensor.shape
    )
    if not missing and not foreign:
        return
    if missing:
        problem = f"{missing[0]} is missing"
    else:
        problem = f"{foreign[0]} has no place in the model"
    raise QuantizationError(
        "a checkpoint of another model",
        where=str(folder),
        got=problem,
        expected=f"the {len(places)} parameters and buffers of {type(model).__name__}",
    )


def _names_of_turned(config: Mapping[str, Any], folder: str | Path) -> set[str]:
    names = config.get(TURNED, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise QuantizationError(
            f"{TURNED} is no list of names",
            where=str(Path(folder) / "config.json"),
            got=type(names).__name__,
        )
    return set(names)


def _turned(qparams: QParams) -> QParams:
    """Return the qparams of a weight (in, out) for the same as (out, in)."""
    granularity = qparams.granularity
    move = (0, 1)
    if isinstance(granularity, PerGroup):
        # the view is (sets, size, out): one axis more than the weight has
        granularity = PerGroup(granularity.group_size, 1)
        move = (-1, 0)
    elif isinstance(granularity, PerAxis):
        granularity = PerAxis(1 - granularity.axis % 2)
    scale = qparams.scale.movedim(*move)
    if qparams.zero_point is None:
        return QParams(scale, None, granularity)
    return QParams(scale, qparams.zero_point.movedim(*move), granularity)


def _stored_format(fmt: Format) -> Format:
    """Return the format whose container holds the codes."""
    if fmt.one_quantum != 1.0 or fmt.width in BITS or fmt.width > max(BITS):
        return fmt
    return integer(min(b for b in BITS if b >= fmt.width), symmetric=fmt.symmetric)


def _input(model: QuantizedModel, weight: Quantizer) -> Entry | None:
    """Return how the input beside a weight is quantized.

    All sites that read the weight share it.
    """
    names: set[str] = set()
    for site in weight.sites:
        if site in model.routes:
            names.update(model.routes[site].uses.values())
    activations = sorted(name for name in names if not model.quantizer(name).weight)
    if not activations:
        return None
    quantizer = model.quantizer(activations[0])
    return Entry.of(
        quantizer.name,
        "activation",
        quantizer.fmt,
        None if quantizer.dynamic else quantizer.qparams(),
        granularity=quantizer.granularity,
        sites=quantizer.sites,
        observer=quantizer.observer,
        dynamic=quantizer.dynamic,
    )


def _config(model: nn.Module) -> dict[str, Any] | None:
    """Return the ``config.json`` of a transformers model."""
    text = getattr(getattr(model, "config", None), "to_json_string", None)
    if not callable(text):
        return None
    config: dict[str, Any] = json.loads(text())
    return config


def _buffer(model: nn.Module, name: str) -> Tensor | None:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path)._buffers.get(last)
