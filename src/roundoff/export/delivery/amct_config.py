"""AMCT's configuration files as an ``Ask``, with notes on what has no counterpart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

from roundoff.errors import QuantizationError
from roundoff.export.amct.config import AutoPrune, LayerConfig, QuantizeConfig
from roundoff.export.amct.read_config import read_config
from roundoff.export.delivery.request import Ask
from roundoff.plan import Plan, Rule
from roundoff.quantize import Options, Rounding


def with_config(ask: Ask, path: str | Path, model: nn.Module) -> Ask:
    """Return the request with what an AMCT file (``.cfg``, ``.json``) says of each layer.

    Its plan names every layer that AMCT would quantize. Each of these has the file's
    bits, observer and its parameters, symmetry, granularity and rounding of weights, and
    balancing, for its input and its weight; as many batches are calibrated on as it says,
    unless the request has a number of samples. A note for what is done in another way.

    Raises:
        QuantizationError: a file for automatic pruning, a target or plan beside it,
            layers that the model lacks, or what ``read_config`` refuses.
    """
    if ask.target is not None or ask.plan is not None:
        raise QuantizationError(
            "the configuration decides which layer runs in how many bits",
            where="--config",
            got="a target or a plan too",
            do="leave one of them out",
        )
    config = read_config(path)
    if isinstance(config, AutoPrune):
        raise QuantizationError(
            "this file asks for automatic pruning, not for quantization",
            where=str(path),
            do="use --prune channel:0.3",
        )
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    layers = _quantized_layers(config, kinds)
    if not layers:
        raise QuantizationError(
            "the configuration skips every layer",
            where=str(path),
            expected="a layer to quantize",
        )
    prunes = bool(config.pruning(kinds))
    notes = _notes(config, list(layers.values()), ask.samples, prunes)
    common = _rounding(replace(config.quantize.common or LayerConfig(), dmq_alpha=None))
    roundings = {f"{name}/*": _rounding(layer) for name, layer in layers.items()}
    options = {f"{name}/*": _options(layer) for name, layer in layers.items()}
    return replace(
        ask,
        formats=(),
        plan=_plan(layers, Path(path).name),
        rounding=replace(common, layers=roundings),
        fold=config.fold,
        notes=(*ask.notes, *notes),
        options=replace(ask.options, symmetric=config.symmetric, layers=options),
        batches=config.batch_num if ask.samples is None else None,
    )


def _quantized_layers(
    config: QuantizeConfig, kinds: Mapping[str, str]
) -> dict[str, LayerConfig]:
    """Return the layers with weights that AMCT would quantize."""
    return {
        name: layer
        for name, layer in config.for_layers(kinds).items()
        if not layer.skip and "Pool" not in kinds[name]
    }


def _plan(layers: Mapping[str, LayerConfig], source: str) -> Plan:
    sites_of: dict[str, list[str]] = {}
    for name, layer in layers.items():
        sites_of.setdefault(_format(layer), []).append(f"{name}/*")
    rules = [Rule(fmt, tuple(sites)) for fmt, sites in sites_of.items()]
    return Plan(tuple(rules), about={"source": source})


def _format(layer: LayerConfig) -> str:
    if layer.weight_bits == layer.activation_bits == 8:
        return "int8"
    return f"w{layer.weight_bits}a{layer.activation_bits}"


def _rounding(layer: LayerConfig) -> Rounding:
    """Return how a layer's input and weight choose their scales and codes."""
    trained = layer.observer == "ulq"
    rounding = Rounding(
        observer="minmax" if trained else layer.observer,
        parameters={} if trained else dict(layer.observer_parameters),
        weights="gptq" if layer.weight_algorithm == "adaround" else "nearest",
        scales="minmax",
    )
    if layer.dmq_alpha is None:
        return rounding
    return replace(rounding, balance="dmq", strength=layer.dmq_alpha)


def _options(layer: LayerConfig) -> Options:
    return Options(
        symmetric=bool(layer.symmetric),
        weight="format" if layer.per_channel else "tensor",
    )


def _notes(
    config: QuantizeConfig, layers: list[LayerConfig], samples: int | None, prunes: bool
) -> Iterator[str]:
    """Yield what of a file is done in another way, or is easily overlooked."""
    if samples is not None:
        yield f"batch_num {config.batch_num} of the file is not used: --samples {samples} was given"
    else:
        yield f"calibrated on the first {config.batch_num} of the batches, as batch_num says; --samples for more"
    yield from _algorithm_notes(layers)
    if prunes:
        yield "the file also prunes: use --prune 2:4 or --prune channel:SHARE for that"
    if config.fp16_scales:
        yield "scales are not rounded to fp16 (FORCE_FP16_QUANT)"
    if config.fold and config.skip_fold:
        yield f"skip_fusion_layers: BatchNorm behind {', '.join(config.skip_fold)} is folded too, the function is the same"
    if config.kind == "kv_cache":
        yield "the layers' inputs and weights are quantized; for a cache of keys and values use Options(kv_cache=...)"


def _algorithm_notes(layers: list[LayerConfig]) -> Iterator[str]:
    algorithms = {layer.weight_algorithm for layer in layers}
    if "adaround" in algorithms:
        yield "AMCT's adaround: weights are rounded by gptq, which learns from the same data"
    if any(layer.observer == "ulq" for layer in layers):
        yield "AMCT's ulq learns ranges in training: they are calibrated by minmax, and --qat trains them"
    if "ulq" in algorithms:
        yield "AMCT's ulq_retrain learns scales of weights in training: they are minmax's, and --qat trains them"
