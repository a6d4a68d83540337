"""Writing AMCT's simple configuration, a ``.cfg`` file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roundoff.errors import QuantizationError
from roundoff.export.amct.config import AutoPrune, LayerConfig, Pruning, QuantizeConfig
from roundoff.export.amct.layer_json import write_json
from roundoff.export.amct.read_config import DATA_TYPES
from roundoff.export.amct.text_format import message_class, write_message


def write_config(
    config: QuantizeConfig | AutoPrune,
    path: str | Path,
    layers: Mapping[str, str] | None = None,
) -> list[str]:
    """Write a configuration as AMCT reads it: ``config.json`` for a name that ends in .json, else a ``.cfg``.

    Returns what its file can't say, one line each. ``layers`` (module path → class name) is needed for ``config.json``,
    which has an entry for each.
    """
    if Path(path).suffix == ".json":
        if layers is None or isinstance(config, AutoPrune):
            raise QuantizationError(
                "config.json has an entry for each layer",
                where=str(path),
                expected="layers=",
                do="give the model's layers and their classes, or write a .cfg file",
            )
        return write_json(config, layers, path)
    if isinstance(config, AutoPrune):
        message = message_class("auto_prune")(
            compress_ratio=config.compress_ratio,
            ascend_optimized=config.multiple_of_16,
            max_prune_ratio=config.max_prune_ratio,
            test_iteration=config.test_iteration,
        )
        if config.override_prune_cfg:
            message.override_prune_cfg = config.override_prune_cfg
        write_message(message, path)
        return []
    message = message_class(config.kind)(batch_num=config.batch_num)
    lost: list[str] = []
    fill = {"calibration": _calibration, "retrain": _retrain, "kv_cache": _kv_cache}[
        config.kind
    ]
    fill(message, config, lost)
    write_message(message, path)
    return lost


def _calibration(message: Any, config: QuantizeConfig, lost: list[str]) -> None:
    message.activation_offset = not config.symmetric
    message.do_fusion = config.fold
    for field, names in (
        ("skip_layers", config.skip_layers),
        ("skip_layer_types", config.skip_types),
        ("skip_fusion_layers", config.skip_fold),
    ):
        getattr(message, field).extend(names)
    if config.fp16_scales:
        message.fakequant_precision_mode = 1
    if config.quantize.common is not None:
        _layer(message.common_config, config.quantize.common, "common_config", lost)
    for kind, own in config.quantize.types.items():
        row = message.override_layer_types.add(layer_type=kind)
        row.calibration_config.SetInParent()
        _layer(row.calibration_config, own, kind, lost)
    for name, own in config.quantize.layers.items():
        if name not in config.skip_layers:
            row = message.override_layer_configs.add(layer_name=name)
            row.calibration_config.SetInParent()
            _layer(row.calibration_config, own, name, lost)
    if config.prune.common or config.prune.types or config.prune.layers:
        lost.append("pruning: a calibration file has none, a retrain file has")


def _kv_cache(message: Any, config: QuantizeConfig, lost: list[str]) -> None:
    message.activation_offset = not config.symmetric
    message.kv_cache_quant_config.quant_layers.extend(config.only)
    if config.quantize.common is not None:
        _activation(
            message.kv_cache_quant_config.calibration_config,
            config.quantize.common,
            "common",
            lost,
        )
    for name, own in config.quantize.layers.items():
        _activation(
            message.override_layers_configs.add(layer_name=name).kv_data_quant_config,
            own,
            name,
            lost,
        )


def _retrain(message: Any, config: QuantizeConfig, lost: list[str]) -> None:
    both = {
        "skip_layers": (config.skip_layers, config.prune_skip_layers),
        "skip_layer_types": (config.skip_types, config.prune_skip_types),
    }
    own_names = {
        "skip_layers": ("quant_skip_layers", "regular_prune_skip_layers"),
        "skip_layer_types": ("quant_skip_types", "regular_prune_skip_types"),
    }
    for field, (quantized, pruned) in both.items():
        getattr(message, field).extend(name for name in quantized if name in pruned)
        for own, names, others in zip(
            own_names[field], (quantized, pruned), (pruned, quantized), strict=True
        ):
            getattr(message, own).extend(name for name in names if name not in others)
    if config.fp16_scales:
        message.fakequant_precision_mode = 1
    if config.quantize.common is not None:
        _trained(message, config.quantize.common, "common", lost)
    if config.prune.common is not None:
        _pruned(message.prune_config, config.prune.common)
    for field, key, quantize, prune in (
        (
            "override_layer_types",
            "layer_type",
            config.quantize.types,
            config.prune.types,
        ),
        (
            "override_layer_configs",
            "layer_name",
            config.quantize.layers,
            config.prune.layers,
        ),
    ):
        for name in dict.fromkeys((*quantize, *prune)):
            row = getattr(message, field).add(**{key: name})
            if name in quantize:
                _trained(row, quantize[name], name, lost)
            if name in prune:
                _pruned(row.prune_config, prune[name])


def _layer(message: Any, own: LayerConfig, name: str, lost: list[str]) -> None:
    _activation(message, own, name, lost)
    if own.weight_algorithm == "adaround":
        weight = message.ada_quantize
        weight.SetInParent()
        _set(weight, own.weight_parameters)
        if own.weight_bits != 8:
            lost.append(f"{name}: AdaRound with {own.weight_bits} bits: AMCT's has 8")
    else:
        weight = message.arq_quantize
        weight.SetInParent()
        if own.weight_bits != 8:
            weight.quant_bits = own.weight_bits
        if own.weight_algorithm != "arq":
            lost.append(
                f"{name}: weights by {own.weight_algorithm}: AMCT calibrates with arq or adaround"
            )
    if own.per_channel is not None:
        weight.channel_wise = own.per_channel
    if own.dmq_alpha is not None:
        message.dmq_balancer.migration_strength = own.dmq_alpha


def _activation(message: Any, own: LayerConfig, name: str, lost: list[str]) -> None:
    if own.observer not in ("ifmr", "hfmg"):
        lost.append(
            f"{name}: activations by {own.observer}: AMCT calibrates with ifmr or hfmg"
        )
        return
    observer = getattr(message, f"{own.observer}_quantize")
    observer.SetInParent()
    _set(observer, own.observer_parameters)
    if own.cache_per_channel:
        observer.quant_granularity = 1
    if own.symmetric is not None:
        observer.asymmetric = not own.symmetric
    if own.activation_bits != 8:
        _type(observer, own.activation_bits, f"{name}: activations", lost)


def _trained(message: Any, own: LayerConfig, name: str, lost: list[str]) -> None:
    weight = message.retrain_weight_quant_config
    weight = weight.ulq_retrain if own.weight_algorithm == "ulq" else weight.arq_retrain
    weight.SetInParent()
    if own.per_channel is not None:
        weight.channel_wise = own.per_channel
    if own.weight_bits != 8:
        _type(weight, own.weight_bits, f"{name}: weights", lost)
    data = message.retrain_data_quant_config.ulq_quantize
    data.SetInParent()
    if own.observer != "ulq":
        lost.append(f"{name}: activations by {own.observer}: AMCT trains with ulq")
        return
    if "clip_max" in own.observer_parameters:
        data.clip_max_min.clip_max = own.observer_parameters["clip_max"]
        data.clip_max_min.clip_min = own.observer_parameters["clip_min"]
    if "fixed_min" in own.observer_parameters:
        data.fixed_min = own.observer_parameters["fixed_min"]
    if own.activation_bits != 8:
        _type(data, own.activation_bits, f"{name}: activations", lost)


def _pruned(message: Any, own: Pruning) -> None:
    if own.ratio is None:
        message.n_out_of_m_pruner.l1_selective_prune.update_freq = own.update_freq
    else:
        filters = message.filter_pruner.balanced_l2_norm_filter_prune
        filters.prune_ratio = own.ratio
        filters.ascend_optimized = own.multiple_of_16


def _set(message: Any, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        if isinstance(value, tuple):
            setattr(message, f"{name}_start", value[0])
            setattr(message, f"{name}_end", value[1])
        else:
            setattr(message, name, value)


def _type(message: Any, bits: int, what: str, lost: list[str]) -> None:
    field = message.DESCRIPTOR.fields_by_name.get("dst_type")
    name = next((name for name, b in DATA_TYPES.items() if b == bits), None)
    if field is None or name not in field.enum_type.values_by_name:
        lost.append(f"{what} in {bits} bits: this file of AMCT has no such type")
    else:
        message.dst_type = field.enum_type.values_by_name[name].number
