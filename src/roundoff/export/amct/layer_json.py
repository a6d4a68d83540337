"""AMCT's layer configuration, ``config.json``: every parameter of every layer.

AMCT's tool writes this file, and users edit it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundoff.errors import PlanError, QuantizationError
from roundoff.export.amct.config import (
    ADAROUND,
    CHANNEL_WISE,
    HFMG,
    IFMR,
    LayerConfig,
    Levels,
    QuantizeConfig,
    check_ranges,
)
from roundoff.files import write_text
from roundoff.plan import check_keys, place, read_json

_GLOBALS = (
    "version",
    "batch_num",
    "activation_offset",
    "do_fusion",
    "skip_fusion_layers",
    "fakequant_precision_mode",
)
_LAYER = (
    "quant_enable",
    "dmq_balancer_param",
    "activation_quant_params",
    "weight_quant_params",
)
_ACTIVATION = ("num_bits", "act_algo", "asymmetric", *IFMR, *HFMG)
_WEIGHT = ("num_bits", "wts_algo", "channel_wise", *ADAROUND)


#: AMCT's weight algorithms → ours.
_WEIGHT_ALGORITHMS = {"arq_quantize": "arq", "ada_quantize": "adaround"}
#: Observer → the defaults of its parameters.
_OBSERVERS: dict[str, Mapping[str, Any]] = {"ifmr": IFMR, "hfmg": HFMG}


def parse_json(text: str, where: str) -> QuantizeConfig:
    """Return the configuration of a ``config.json``'s text.

    Raises:
        QuantizationError: as of
            :func:`roundoff.export.amct.read_config.read_config`.
    """
    try:
        return _config(read_json(text, where), where)
    except PlanError as error:  # the reader of files is the operator lists' too
        raise QuantizationError(
            error.what,
            where=error.where,
            expected=error.expected,
            got=error.got,
            do=error.do,
        ) from error


def _config(data: Any, path: str) -> QuantizeConfig:
    """Read the outermost object; every key that holds an object is a layer."""
    if not isinstance(data, Mapping):
        raise QuantizationError(
            "not a layer configuration",
            where=path,
            got=type(data).__name__,
            expected="an object",
        )
    layers: dict[str, LayerConfig] = {}
    skipped = []
    for key, entry in data.items():
        if not isinstance(entry, Mapping):
            check_keys({key: 0}, _GLOBALS, path, "parameter (layers hold objects)")
            continue
        layers[key] = _checked_layer(key, entry, path)
        if entry.get("quant_enable", True) is False:
            skipped.append(key)
    _check_globals(data, path)
    return QuantizeConfig(
        "calibration",
        data.get("batch_num", 1),
        not data.get("activation_offset", True),
        Levels(None, {}, layers),
        skip_layers=tuple(skipped),
        fold=bool(data.get("do_fusion", True)),
        skip_fold=tuple(data.get("skip_fusion_layers", ())),
        fp16_scales=data.get("fakequant_precision_mode") == "FORCE_FP16_QUANT",
    )


def _checked_layer(key: str, entry: Mapping[str, Any], path: str) -> LayerConfig:
    where = ", ".join(part for part in (path, place(key)) if part)
    check_keys(entry, _LAYER, path, f"parameter of layer {key}")
    activation = entry.get("activation_quant_params", {})
    weight = entry.get("weight_quant_params", {})
    check_keys(activation, _ACTIVATION, path, f"parameter of {key}'s activation")
    check_keys(weight, _WEIGHT, path, f"parameter of {key}'s weight")
    try:
        return check_ranges(_layer(entry, activation, weight), where)
    except (TypeError, ValueError, KeyError) as error:
        raise QuantizationError(
            f"layer {key} cannot be read: {error}", where=where
        ) from error


def _check_globals(data: Mapping[str, Any], path: str) -> None:
    batch_num = data.get("batch_num", 1)
    if not isinstance(batch_num, int) or batch_num < 1:
        raise QuantizationError(
            "batch_num out of range",
            where=path,
            expected="1 or more",
            got=repr(batch_num),
        )
    if data.get("version", 1) != 1:
        raise QuantizationError(
            "not a version that AMCT has",
            where=path,
            expected="version 1",
            got=repr(data["version"]),
        )


def _layer(
    entry: Mapping[str, Any], activation: Mapping[str, Any], weight: Mapping[str, Any]
) -> LayerConfig:
    default_observer = "hfmg" if "num_of_bins" in activation else "ifmr"
    observer = str(activation.get("act_algo", default_observer))
    defaults = _OBSERVERS[observer]
    algorithm = _WEIGHT_ALGORITHMS[weight.get("wts_algo", "arq_quantize")]
    _check_parameters(activation, observer, weight, algorithm)
    weight_parameters = _parameters(weight, ADAROUND) if algorithm == "adaround" else {}
    symmetric = None
    if "asymmetric" in activation:
        symmetric = not activation["asymmetric"]
    alpha = entry.get("dmq_balancer_param")
    return LayerConfig(
        weight_bits=weight.get("num_bits", 8),
        per_channel=weight.get("channel_wise"),
        weight_algorithm=algorithm,
        weight_parameters=weight_parameters,
        activation_bits=activation.get("num_bits", 8),
        symmetric=symmetric,
        observer=observer,
        observer_parameters=_parameters(activation, defaults),
        dmq_alpha=None if alpha is None else float(alpha),
    )


def _check_parameters(
    activation: Mapping[str, Any],
    observer: str,
    weight: Mapping[str, Any],
    algorithm: str,
) -> None:
    """Raise ``ValueError`` for a parameter of another algorithm than the layer's."""
    for name in (*IFMR, *HFMG):
        if name in activation and name not in _OBSERVERS[observer]:
            raise ValueError(f"{name} is no parameter of {observer}")
    for name in ADAROUND:
        if name in weight and algorithm == "arq":
            raise ValueError(f"{name} is no parameter of arq_quantize")


def _parameters(
    section: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a value for each default; JSON's lists are ranges, which are tuples here."""
    values = {name: section.get(name, default) for name, default in defaults.items()}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
    }


def write_json(
    config: QuantizeConfig, layers: Mapping[str, str], path: str | Path
) -> list[str]:
    """Write ``config.json`` for these layers; return what AMCT would refuse of it.

    Args:
        config: of calibration.
        layers: module path → class name.
        path: the file.

    Raises:
        QuantizationError: a configuration of training or of the KV cache, which have no
            such file, and as :meth:`QuantizeConfig.for_layers`.
    """
    if config.kind != "calibration":
        raise QuantizationError(
            "a layer configuration is for calibration",
            where=str(path),
            got=config.kind,
            do="write a .cfg file",
        )
    of_layers = config.for_layers(layers)
    data: dict[str, Any] = {
        "version": 1,
        "batch_num": config.batch_num,
        "activation_offset": not config.symmetric,
        "do_fusion": config.fold,
        "skip_fusion_layers": list(config.skip_fold),
    }
    if config.fp16_scales:
        data["fakequant_precision_mode"] = "FORCE_FP16_QUANT"
    for name, layer in of_layers.items():
        data[name] = _layer_entry(layer)
    write_text(path, json.dumps(data, indent=4) + "\n")
    return [
        f"{name}: a scale for each channel of a {layers[name]} layer, which AMCT refuses"
        for name, layer in of_layers.items()
        if layer.per_channel and layers[name] not in CHANNEL_WISE
    ]


def _layer_entry(layer: LayerConfig) -> dict[str, Any]:
    entry: dict[str, Any] = {"quant_enable": not layer.skip}
    if layer.dmq_alpha is not None:
        entry["dmq_balancer_param"] = layer.dmq_alpha
    entry["activation_quant_params"] = {
        "num_bits": layer.activation_bits,
        **layer.observer_parameters,
        "act_algo": layer.observer,
        "asymmetric": not layer.symmetric,
    }
    is_adaround = layer.weight_algorithm == "adaround"
    entry["weight_quant_params"] = {
        "num_bits": layer.weight_bits,
        "wts_algo": "ada_quantize" if is_adaround else "arq_quantize",
        "channel_wise": layer.per_channel,
        **layer.weight_parameters,
    }
    return entry
