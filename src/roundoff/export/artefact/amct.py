"""AMCT's configuration files as an ``Ask``: what they say of each layer, and what of it has no counterpart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from roundoff.errors import QuantizationError
from roundoff.export.amct import AutoPrune, LayerConfig, read_config
from roundoff.export.artefact.ask import Ask
from roundoff.plan.plan import Plan, Rule
from roundoff.quantize.options import Options
from roundoff.quantize.sequential import Rounding


def with_config(ask: Ask, path: str | Path, model: nn.Module) -> Ask:
    """The same ask with the layers, bits, observer and weights that an AMCT file (``.cfg`` or ``.json``) gives.

    Its plan names every layer that AMCT would quantize. Observer, symmetry and granularity of weights are one for the whole
    model here: where layers differ, what most of them say holds, and a note says so.

    Raises:
        QuantizationError: a file for automatic pruning, a target or plan beside it, layers that the model hasn't, or what
            ``read_config`` refuses.
    """
    if ask.target is not None or ask.plan is not None:
        raise QuantizationError("the configuration decides which layer runs in how many bits", where="--config",
                                got="a target or a plan too", do="leave one of them out")  # fmt: skip
    config = read_config(path)
    if isinstance(config, AutoPrune):
        raise QuantizationError("this file asks for automatic pruning, not for quantization", where=str(path),
                                do="use --prune channel:0.3")  # fmt: skip
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    layers = {name: layer for name, layer in config.for_layers(kinds).items() if not layer.skip}
    layers = {name: layer for name, layer in layers.items() if "Pool" not in kinds[name]}
    if not layers:
        raise QuantizationError("the configuration skips every layer", where=str(path), expected="a layer to quantize")
    notes = list(ask.notes)
    by: dict[str, list[str]] = {}
    for name, layer in layers.items():
        by.setdefault(_format(layer), []).append(f"{name}/*")
    plan = Plan(tuple(Rule(fmt, tuple(sites)) for fmt, sites in by.items()), about={"source": Path(path).name})
    own = list(layers.values())
    observer = _most("observer", [(c.observer, tuple(sorted(c.observer_parameters.items()))) for c in own], notes)
    symmetric = _most("symmetric activations", [bool(c.symmetric) for c in own], notes)
    channel = _most("a scale for each channel of weights", [c.per_channel for c in own], notes)
    weights = _most("algorithm of weights", [c.weight_algorithm for c in own], notes)
    if weights == "adaround":
        notes.append("AMCT's adaround: weights are rounded by gptq, which learns from the same data")
    if any(c.dmq_alpha is not None for c in own):
        notes.append("AMCT's DMQ balancing: channels are rescaled by what they cost the output instead")
    if config.pruning(kinds):
        notes.append("the file also prunes: use --prune 2:4 or --prune channel:SHARE for that")
    if config.fp16_scales:
        notes.append("scales are not rounded to fp16 (FORCE_FP16_QUANT)")
    name, parameters = observer
    known = dict(parameters)
    if name == "ulq":
        name, known = "minmax", {}
        notes.append("AMCT's ulq learns ranges in training: they are calibrated by minmax, and --qat trains them")
    rounding = Rounding(observer=name, weights="gptq" if weights == "adaround" else "nearest", parameters=known,
                        scales="minmax")  # fmt: skip
    options = Options(symmetric=symmetric, weight="format" if channel else "tensor")
    return replace(ask, formats=(), plan=plan, rounding=rounding, options=options, notes=tuple(notes))


def _format(layer: LayerConfig) -> str:
    if layer.weight_bits == layer.activation_bits == 8:
        return "int8"
    return f"w{layer.weight_bits}a{layer.activation_bits}"


def _most(what: str, values: Iterable[Any], notes: list[str]) -> Any:
    counted = Counter(values).most_common()
    if len(counted) > 1:
        notes.append(f"{what} differs between layers in the file: {counted[0][0]} is used for all")
    return counted[0][0]
