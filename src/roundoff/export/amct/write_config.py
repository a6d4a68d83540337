"""Writing AMCT's simple configuration, a ``.cfg`` file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
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
    """Write a configuration as AMCT reads it; return a line for all its file can't say.

    Args:
        config: of any kind; ``config.json`` is for calibration only.
        path: a name that ends in .json gives a ``config.json``, another a ``.cfg``.
        layers: module path → class name; needed for ``config.json``, which has an entry
            for each.
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
        write_message(_auto_prune(config), path)
        return []
    message = message_class(config.kind)(batch_num=config.batch_num)
    lost: list[str] = []
    fill = {"calibration": _calibration, "retrain": _retrain, "kv_cache": _kv_cache}[
        config.kind
    ]
    fill(message, config, lost)
    write_message(message, path)
    return lost


def _auto_prune(config: AutoPrune) -> Any:
    message = message_class("auto_prune")(
        compress_ratio=config.compress_ratio,
        ascend_optimized=config.multiple_of_16,
        max_prune_ratio=config.max_prune_ratio,
        test_iteration=config.test_iteration,
    )
    if config.override_prune_cfg:
        message.override_prune_cfg = config.override_prune_cfg
    return message


def _calibration(message: Any, config: QuantizeConfig, lost: list[str]) -> None:
    message.activation_offset = not config.symmetric
    message.do_fusion = config.fold
    message.skip_layers.extend(config.skip_layers)
    message.skip_layer_types.extend(config.skip_types)
    message.skip_fusion_layers.extend(config.skip_fold)
    if config.fp16_scales:
        message.fakequant_precision_mode = 1
    if config.quantize.common is not None:
        _layer(message.common_config, config.quantize.common, "common_config", lost)
    for kind, layer in config.quantize.types.items():
        row = message.override_layer_types.add(layer_type=kind)
        row.calibration_config.SetInParent()
        _layer(row.calibration_config, layer, kind, lost)
    for name, layer in config.quantize.layers.items():
        if name not in config.skip_layers:
            row = message.override_layer_configs.add(layer_name=name)
            row.calibration_config.SetInParent()
            _layer(row.calibration_config, layer, name, lost)
    if config.prune.common or config.prune.types or config.prune.layers:
        lost.append("pruning: a calibration file has none, a retrain file has")


def _kv_cache(message: Any, config: QuantizeConfig, lost: list[str]) -> None:
    message.activation_offset = not config.symmetric
    message.kv_cache_quant_config.quant_layers.extend(config.only)
    common = config.quantize.common
    if common is not None:
        inner = message.kv_cache_quant_config.calibration_config
        _activation(inner, common, "common", lost)
    for name, layer in config.quantize.layers.items():
        row = message.override_layers_configs.add(layer_name=name)
        _activation(row.kv_data_quant_config, layer, name, lost)


def _retrain(message: Any, config: QuantizeConfig, lost: list[str]) -> None:
    quantized = config.skip_layers
    pruned = config.prune_skip_layers
    message.skip_layers.extend(_both(quantized, pruned))
    message.quant_skip_layers.extend(_only_first(quantized, pruned))
    message.regular_prune_skip_layers.extend(_only_first(pruned, quantized))
    quantized = config.skip_types
    pruned = config.prune_skip_types
    message.skip_layer_types.extend(_both(quantized, pruned))
    message.quant_skip_types.extend(_only_first(quantized, pruned))
    message.regular_prune_skip_types.extend(_only_first(pruned, quantized))
    if config.fp16_scales:
        message.fakequant_precision_mode = 1
    if config.quantize.common is not None:
        _trained(message, config.quantize.common, "common", lost)
    if config.prune.common is not None:
        _pruned(message.prune_config, config.prune.common)
    for name in _named_in(config.quantize.types, config.prune.types):
        row = message.override_layer_types.add(layer_type=name)
        _override(row, name, config.quantize.types, config.prune.types, lost)
    for name in _named_in(config.quantize.layers, config.prune.layers):
        row = message.override_layer_configs.add(layer_name=name)
        _override(row, name, config.quantize.layers, config.prune.layers, lost)


def _both(names: Sequence[str], others: Sequence[str]) -> list[str]:
    return [name for name in names if name in others]


def _only_first(names: Sequence[str], others: Sequence[str]) -> list[str]:
    return [name for name in names if name not in others]


def _named_in(*levels: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(itertools.chain(*levels)))


def _override(
    row: Any,
    name: str,
    quantize: Mapping[str, LayerConfig],
    prune: Mapping[str, Pruning],
    lost: list[str],
) -> None:
    if name in quantize:
        _trained(row, quantize[name], name, lost)
    if name in prune:
        _pruned(row.prune_config, prune[name])


def _layer(message: Any, layer: LayerConfig, name: str, lost: list[str]) -> None:
    _activation(message, layer, name, lost)
    if layer.weight_algorithm == "adaround":
        weight = message.ada_quantize
        weight.SetInParent()
        _set(weight, layer.weight_parameters)
        if layer.weight_bits != 8:
            lost.append(f"{name}: AdaRound with {layer.weight_bits} bits: AMCT's has 8")
    else:
        weight = message.arq_quantize
        weight.SetInParent()
        if layer.weight_bits != 8:
            weight.quant_bits = layer.weight_bits
        if layer.weight_algorithm != "arq":
            lost.append(
                f"{name}: weights by {layer.weight_algorithm}: AMCT calibrates with arq or adaround"
            )
    if layer.per_channel is not None:
        weight.channel_wise = layer.per_channel
    if layer.dmq_alpha is not None:
        message.dmq_balancer.migration_strength = layer.dmq_alpha


def _activation(message: Any, layer: LayerConfig, name: str, lost: list[str]) -> None:
    if layer.observer not in ("ifmr", "hfmg"):
        lost.append(
            f"{name}: activations by {layer.observer}: AMCT calibrates with ifmr or hfmg"
        )
        return
    observer = getattr(message, f"{layer.observer}_quantize")
    observer.SetInParent()
    _set(observer, layer.observer_parameters)
    if layer.cache_per_channel:
        observer.quant_granularity = 1
    if layer.symmetric is not None:
        observer.asymmetric = not layer.symmetric
    if layer.activation_bits != 8:
        _type(observer, layer.activation_bits, f"{name}: activations", lost)


def _trained(message: Any, layer: LayerConfig, name: str, lost: list[str]) -> None:
    weight = message.retrain_weight_quant_config
    weight = (
        weight.ulq_retrain if layer.weight_algorithm == "ulq" else weight.arq_retrain
    )
    weight.SetInParent()
    if layer.per_channel is not None:
        weight.channel_wise = layer.per_channel
    if layer.weight_bits != 8:
        _type(weight, layer.weight_bits, f"{name}: weights", lost)
    data = message.retrain_data_quant_config.ulq_quantize
    data.SetInParent()
    if layer.observer != "ulq":
        lost.append(f"{name}: activations by {layer.observer}: AMCT trains with ulq")
        return
    if "clip_max" in layer.observer_parameters:
        data.clip_max_min.clip_max = layer.observer_parameters["clip_max"]
        data.clip_max_min.clip_min = layer.observer_parameters["clip_min"]
    if "fixed_min" in layer.observer_parameters:
        data.fixed_min = layer.observer_parameters["fixed_min"]
    if layer.activation_bits != 8:
        _type(data, layer.activation_bits, f"{name}: activations", lost)


def _pruned(message: Any, pruning: Pruning) -> None:
    if pruning.ratio is None:
        message.n_out_of_m_pruner.l1_selective_prune.update_freq = pruning.update_freq
    else:
        filters = message.filter_pruner.balanced_l2_norm_filter_prune
        filters.prune_ratio = pruning.ratio
        filters.ascend_optimized = pruning.multiple_of_16


def _set(message: Any, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        if isinstance(value, tuple):
            setattr(message, f"{name}_start", value[0])
            setattr(message, f"{name}_end", value[1])
        else:
            setattr(message, name, value)


def _type(message: Any, bits: int, operand: str, lost: list[str]) -> None:
    field = message.DESCRIPTOR.fields_by_name.get("dst_type")
    names = {width: name for name, width in DATA_TYPES.items()}
    name = names.get(bits)
    if field is None or name not in field.enum_type.values_by_name:
        lost.append(f"{operand} in {bits} bits: this file of AMCT has no such type")
    else:
        message.dst_type = field.enum_type.values_by_name[name].number
