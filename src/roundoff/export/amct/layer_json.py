"""AMCT's layer configuration, ``config.json``: every parameter of every layer, as its tool writes it and users edit it."""

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


def parse_json(text: str, where: str) -> QuantizeConfig:
    """The configuration of a ``config.json``'s text; errors as of :func:`roundoff.export.amct.read_config.read_config`."""
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
    """Every key that holds an object is a layer."""
    if not isinstance(data, Mapping):
        raise QuantizationError(
            "not a layer configuration",
            where=path,
            got=type(data).__name__,
            expected="an object",
        )
    layers: dict[str, LayerConfig] = {}
    skipped = []
    for key, said in data.items():
        if not isinstance(said, Mapping):
            check_keys({key: 0}, _GLOBALS, path, "parameter (layers hold objects)")
            continue
        where = ", ".join(part for part in (path, place(key)) if part)
        check_keys(said, _LAYER, path, f"parameter of layer {key}")
        activation = said.get("activation_quant_params", {})
        weight = said.get("weight_quant_params", {})
        check_keys(activation, _ACTIVATION, path, f"parameter of {key}'s activation")
        check_keys(weight, _WEIGHT, path, f"parameter of {key}'s weight")
        if said.get("quant_enable", True) is False:
            skipped.append(key)
        try:
            layers[key] = check_ranges(_json_layer(said, activation, weight), where)
        except (TypeError, ValueError, KeyError) as error:
            raise QuantizationError(
                f"layer {key} cannot be read: {error}", where=where
            ) from error
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
    return QuantizeConfig(
        "calibration",
        batch_num,
        not data.get("activation_offset", True),
        Levels(None, {}, layers),
        skip_layers=tuple(skipped),
        fold=bool(data.get("do_fusion", True)),
        skip_fold=tuple(data.get("skip_fusion_layers", ())),
        fp16_scales=data.get("fakequant_precision_mode") == "FORCE_FP16_QUANT",
    )


def _json_layer(
    said: Mapping[str, Any], activation: Mapping[str, Any], weight: Mapping[str, Any]
) -> LayerConfig:
    observer = str(
        activation.get("act_algo", "hfmg" if "num_of_bins" in activation else "ifmr")
    )
    algorithms: dict[str, Mapping[str, Any]] = {"ifmr": IFMR, "hfmg": HFMG}
    defaults = algorithms[observer]
    foreign = [
        name for name in (*IFMR, *HFMG) if name in activation and name not in defaults
    ]
    algorithm = {"arq_quantize": "arq", "ada_quantize": "adaround"}[
        weight.get("wts_algo", "arq_quantize")
    ]
    foreign += [name for name in ADAROUND if name in weight and algorithm == "arq"]
    if foreign:
        raise ValueError(
            f"{foreign[0]} is no parameter of {'arq_quantize' if foreign[0] in ADAROUND else observer}"
        )
    alpha = said.get("dmq_balancer_param")
    return LayerConfig(
        False,
        weight.get("num_bits", 8),
        weight.get("channel_wise"),
        algorithm,
        {k: _plain(weight.get(k, v)) for k, v in ADAROUND.items()}
        if algorithm == "adaround"
        else {},
        activation.get("num_bits", 8),
        not activation["asymmetric"] if "asymmetric" in activation else None,
        observer,
        {k: _plain(activation.get(k, v)) for k, v in defaults.items()},
        None if alpha is None else float(alpha),
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def write_json(
    config: QuantizeConfig, layers: Mapping[str, str], path: str | Path
) -> list[str]:
    """Write ``config.json`` for these layers (module path → class name); returns what AMCT would refuse of it.

    Raises ``QuantizationError`` for a configuration of training or of the KV cache, which have no such file, and as
    :meth:`QuantizeConfig.for_layers` does.
    """
    if config.kind != "calibration":
        raise QuantizationError(
            "a layer configuration is for calibration",
            where=str(path),
            got=config.kind,
            do="write a .cfg file",
        )
    of = config.for_layers(layers)
    data: dict[str, Any] = {
        "version": 1,
        "batch_num": config.batch_num,
        "activation_offset": not config.symmetric,
        "do_fusion": config.fold,
        "skip_fusion_layers": list(config.skip_fold),
    } | ({"fakequant_precision_mode": "FORCE_FP16_QUANT"} if config.fp16_scales else {})
    for name, own in of.items():
        algorithm = (
            "ada_quantize" if own.weight_algorithm == "adaround" else "arq_quantize"
        )
        data[name] = {
            "quant_enable": not own.skip,
            **(
                {"dmq_balancer_param": own.dmq_alpha}
                if own.dmq_alpha is not None
                else {}
            ),
            "activation_quant_params": {
                "num_bits": own.activation_bits,
                **own.observer_parameters,
                "act_algo": own.observer,
                "asymmetric": not own.symmetric,
            },
            "weight_quant_params": {
                "num_bits": own.weight_bits,
                "wts_algo": algorithm,
                "channel_wise": own.per_channel,
                **own.weight_parameters,
            },
        }
    write_text(path, json.dumps(data, indent=4) + "\n")
    return [
        f"{name}: a scale for each channel of a {layers[name]} layer, which AMCT refuses"
        for name, own in of.items()
        if own.per_channel and layers[name] not in CHANNEL_WISE
    ]
