"""Reading AMCT's simple configuration.

That is a ``.cfg`` file for calibration, training, the KV cache or automatic pruning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from roundoff.errors import QuantizationError
from roundoff.export.amct.config import (
    ADAROUND,
    HFMG,
    IFMR,
    AutoPrune,
    LayerConfig,
    Levels,
    Pruning,
    QuantizeConfig,
    check_ranges,
)
from roundoff.export.amct.layer_json import parse_json
from roundoff.export.amct.text_format import Lines, parse_text
from roundoff.foreign import read_text
from roundoff.plan import Name

#: Fields that only one kind of file has; a file without any is for calibration.
_MARKS = {
    "auto_prune": {"compress_ratio", "max_prune_ratio", "override_prune_cfg"},
    "kv_cache": {
        "kv_cache_quant_config",
        "override_layers_configs",
        "kv_data_quant_config",
        "quant_layers",
    },
    "retrain": {
        "retrain_data_quant_config",
        "retrain_weight_quant_config",
        "prune_config",
        "quant_skip_layers",
        "quant_skip_types",
        "regular_prune_skip_layers",
        "regular_prune_skip_types",
    },
}
#: Names of activation and weight types → bits.
DATA_TYPES = {"INT4": 4, "INT8": 8, "INT16": 16}
#: Path of a field in a message, as in :data:`roundoff.export.amct.text_format.Lines`.
_Key = tuple[str | int, ...]


def read_config(
    path: str | Path, kind: str | None = None
) -> QuantizeConfig | AutoPrune:
    """Read a ``.cfg`` file or a ``config.json``.

    Args:
        path: the file.
        kind: ``calibration``, ``retrain``, ``kv_cache`` or ``auto_prune``; by default
            its fields say which.

    Raises:
        QuantizationError: an unknown field or key (with the nearest), one that stands
            twice, a value that AMCT refuses, a layer or type named twice: always with
            the line. Names of layers are compared with a model in
            :meth:`QuantizeConfig.for_layers`.
    """
    try:
        text = read_text(Path(path), "utf-8-sig")
    except (OSError, ValueError) as error:
        raise QuantizationError(
            f"not a readable file: {error}", where=str(path)
        ) from error
    if Path(path).suffix == ".json" or text.lstrip().startswith("{"):
        return parse_json(text, str(path))
    kind = kind or _kind(text)
    message, lines = parse_text(text, kind, str(path))
    if kind == "auto_prune":
        return _auto_prune(message, lines, str(path))
    return _Reader(lines, str(path)).config(message, kind)


def _kind(text: str) -> str:
    """Return the kind of file that has the fields of a text."""
    without_comments = re.sub(r"#[^\n]*", "", text)
    fields = set(re.findall(r"\b([A-Za-z_]\w*)\s*[:{<]", without_comments))
    for kind, marks in _MARKS.items():
        if marks & fields:
            return kind
    return "calibration"


class _Reader:
    """Turns the messages of one file into our configuration; errors name the line."""

    def __init__(self, lines: Lines, path: str) -> None:
        self.lines = lines
        self.path = path

    def at(self, key: _Key) -> str:
        while key and key not in self.lines:
            key = key[:-2]
        return f"{self.path}, line {self.lines[key]}" if key else self.path

    def names(self, message: Any, field: str) -> tuple[str, ...]:
        """Return the names in a repeated field; none where the message lacks it."""
        if field not in message.DESCRIPTOR.fields_by_name:
            return ()
        first_lines: dict[str, int] = {}
        return tuple(
            self.new_name(first_lines, name, (field, index))
            for index, name in enumerate(getattr(message, field))
        )

    def new_name(self, first_lines: dict[str, int], name: str, key: _Key) -> Name:
        """Enter a name with its line. Raises ``QuantizationError`` for a second one."""
        if name in first_lines:
            raise QuantizationError(
                f"{name} is named twice",
                where=self.at(key),
                got=f"the first is at line {first_lines[name]}",
                do="keep one",
            )
        first_lines[name] = self.lines.get(key, 0)
        return Name.at(name, first_lines[name])

    def config(self, message: Any, kind: str) -> QuantizeConfig:
        if message.batch_num < 1:
            raise QuantizationError(
                "batch_num out of range",
                where=self.at(("batch_num", 0)),
                expected="1 or more",
                got="0",
            )
        read = {
            "calibration": self.calibration_config,
            "retrain": self.retrain_config,
            "kv_cache": self.cache_config,
        }[kind]
        return read(message)

    def calibration_config(self, message: Any) -> QuantizeConfig:
        common = self.calibration(message.common_config, ("common_config", 0))
        inside = "calibration_config"
        types = self.overrides(message, "override_layer_types", "layer_type", inside)
        layers = self.overrides(message, "override_layer_configs", "layer_name", inside)
        return QuantizeConfig(
            "calibration",
            message.batch_num,
            not message.activation_offset,
            Levels(common, types, layers),
            skip_layers=self.names(message, "skip_layers"),
            skip_types=self.names(message, "skip_layer_types"),
            fold=message.do_fusion,
            skip_fold=self.names(message, "skip_fusion_layers"),
            fp16_scales=message.HasField("fakequant_precision_mode"),
        )

    def retrain_config(self, message: Any) -> QuantizeConfig:
        common = self.trained(message, ())
        if common is None:
            common = LayerConfig(observer="ulq", observer_parameters={})
        pruned = self.pruned(message, ())
        types, pruned_types = self.retrain_overrides(
            message, "override_layer_types", "layer_type"
        )
        layers, pruned_layers = self.retrain_overrides(
            message, "override_layer_configs", "layer_name"
        )
        skip_layers = self.names(message, "skip_layers")
        skip_types = self.names(message, "skip_layer_types")
        return QuantizeConfig(
            "retrain",
            message.batch_num,
            False,
            Levels(common, types, layers),
            Levels(pruned, pruned_types, pruned_layers),
            skip_layers + self.names(message, "quant_skip_layers"),
            skip_types + self.names(message, "quant_skip_types"),
            skip_layers + self.names(message, "regular_prune_skip_layers"),
            skip_types + self.names(message, "regular_prune_skip_types"),
            fp16_scales=message.HasField("fakequant_precision_mode"),
        )

    def cache_config(self, message: Any) -> QuantizeConfig:
        inner = message.kv_cache_quant_config
        prefix = ("kv_cache_quant_config", 0)
        key = (*prefix, "calibration_config", 0)
        common = self.calibration(inner.calibration_config, key)
        layers = self.overrides(
            message, "override_layers_configs", "layer_name", "kv_data_quant_config"
        )
        inner_lines = {
            key[2:]: line for key, line in self.lines.items() if key[:2] == prefix
        }
        return QuantizeConfig(
            "kv_cache",
            message.batch_num,
            not message.activation_offset,
            Levels(common, {}, layers),
            only=_Reader(inner_lines, self.path).names(inner, "quant_layers"),
        )

    def overrides(
        self, message: Any, field: str, name: str, inside: str
    ) -> dict[str, LayerConfig]:
        """Return the settings of single layers or types, by name.

        Args:
            message: of the whole file.
            field: with the overrides.
            name: field of an override with its layer or type.
            inside: field of an override with its ``CalibrationConfig``.
        """
        configs: dict[str, LayerConfig] = {}
        first_lines: dict[str, int] = {}
        for index, row in enumerate(getattr(message, field)):
            place = (field, index, name, 0)
            key = self.new_name(first_lines, getattr(row, name), place)
            inner = (field, index, inside, 0)
            configs[key] = self.calibration(getattr(row, inside), inner)
        return configs

    def retrain_overrides(
        self, message: Any, field: str, name: str
    ) -> tuple[dict[str, LayerConfig], dict[str, Pruning]]:
        """Return how single layers or types are quantized and pruned, by name."""
        quantized: dict[str, LayerConfig] = {}
        pruned: dict[str, Pruning] = {}
        first_lines: dict[str, int] = {}
        for index, row in enumerate(getattr(message, field)):
            place = (field, index, name, 0)
            key = self.new_name(first_lines, getattr(row, name), place)
            config = self.trained(row, (field, index))
            if config is not None:
                quantized[key] = config
            pruning = self.pruned(row, (field, index))
            if pruning is not None:
                pruned[key] = pruning
        return quantized, pruned

    def calibration(self, message: Any, key: _Key) -> LayerConfig:
        """Read a ``CalibrationConfig``."""
        settings = _activation_settings(message)
        if "arq_quantize" in message.DESCRIPTOR.fields_by_name:
            settings |= _weight_settings(message)
        else:
            settings["cache_per_channel"] = _is_per_channel(message)
        return check_ranges(LayerConfig(**settings), self.at(key))

    def trained(self, message: Any, key: _Key) -> LayerConfig | None:
        """Read how a retrain file, or one of its overrides, quantizes; None if not."""
        has_data = message.HasField("retrain_data_quant_config")
        if not has_data and not message.HasField("retrain_weight_quant_config"):
            return None
        data = message.retrain_data_quant_config.ulq_quantize
        parameters = _ulq_parameters(data)
        clip_max = parameters.get("clip_max", 1.0)
        clip_min = parameters.get("clip_min", -1.0)
        if clip_max <= 0 or clip_min > 0:
            raise QuantizationError(
                "clip_max_min out of range",
                where=self.at((*key, "retrain_data_quant_config", 0)),
                expected="clip_max > 0 >= clip_min",
                got=str(parameters),
            )
        weights = message.retrain_weight_quant_config
        is_learned = weights.HasField("ulq_retrain")
        weight = weights.ulq_retrain if is_learned else weights.arq_retrain
        config = LayerConfig(
            weight_bits=_bits(weight, "dst_type"),
            per_channel=_channel_wise(weight),
            weight_algorithm="ulq" if is_learned else "arq",
            activation_bits=_bits(data, "dst_type"),
            observer="ulq",
            observer_parameters=parameters,
        )
        return check_ranges(config, self.at(key))

    def pruned(self, message: Any, key: _Key) -> Pruning | None:
        """Read how a retrain file, or one of its overrides, prunes; None if not."""
        pruners = message.prune_config
        if pruners.HasField("n_out_of_m_pruner"):
            selective = pruners.n_out_of_m_pruner.l1_selective_prune
            return Pruning(None, False, selective.update_freq)
        if not pruners.HasField("filter_pruner"):
            return None
        filters = pruners.filter_pruner.balanced_l2_norm_filter_prune
        ratio = _number(filters.prune_ratio)
        if not 0 < filters.prune_ratio < 1:
            raise QuantizationError(
                "prune_ratio out of range",
                where=self.at((*key, "prune_config", 0)),
                expected="between 0 and 1",
                got=str(ratio),
            )
        return Pruning(ratio, filters.ascend_optimized)


def _activation_settings(message: Any) -> dict[str, Any]:
    """Return the fields of ``LayerConfig`` about the input; none if the file has none."""
    if message.HasField("ifmr_quantize"):
        name = "ifmr"
        observer = message.ifmr_quantize
        defaults = IFMR
    elif message.HasField("hfmg_quantize"):
        name = "hfmg"
        observer = message.hfmg_quantize
        defaults = HFMG
    else:
        return {}
    settings: dict[str, Any] = {
        "observer": name,
        "observer_parameters": _fields(observer, defaults),
    }
    if observer.HasField("asymmetric"):
        settings["symmetric"] = not observer.asymmetric
    if "dst_type" in observer.DESCRIPTOR.fields_by_name:
        settings["activation_bits"] = _bits(observer, "dst_type")
    return settings


def _weight_settings(message: Any) -> dict[str, Any]:
    """Return the fields of ``LayerConfig`` about the weight, and the balance."""
    settings: dict[str, Any] = {}
    if message.HasField("ada_quantize"):
        weight = message.ada_quantize
        settings["weight_algorithm"] = "adaround"
        settings["weight_parameters"] = _fields(weight, ADAROUND)
    else:
        weight = message.arq_quantize
        settings["weight_bits"] = weight.quant_bits
    settings["per_channel"] = _channel_wise(weight)
    if message.HasField("dmq_balancer"):
        settings["dmq_alpha"] = _number(message.dmq_balancer.migration_strength)
    return settings


def _is_per_channel(message: Any) -> bool:
    """Return True if a KV cache has a scale for each channel."""
    is_hfmg = message.HasField("hfmg_quantize")
    observer = message.hfmg_quantize if is_hfmg else message.ifmr_quantize
    return bool(observer.quant_granularity == 1)


def _channel_wise(weight: Any) -> bool | None:
    return weight.channel_wise if weight.HasField("channel_wise") else None


def _ulq_parameters(data: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    if data.HasField("clip_max_min"):
        parameters["clip_max"] = _number(data.clip_max_min.clip_max)
        parameters["clip_min"] = _number(data.clip_max_min.clip_min)
    if data.HasField("fixed_min"):
        parameters["fixed_min"] = data.fixed_min
    return parameters


def _auto_prune(message: Any, lines: Lines, path: str) -> AutoPrune:
    search = AutoPrune(
        _number(message.compress_ratio),
        message.ascend_optimized,
        _number(message.max_prune_ratio),
        message.test_iteration,
        message.override_prune_cfg,
    )
    fits = {
        "compress_ratio": search.compress_ratio > 1,
        "max_prune_ratio": 0 < search.max_prune_ratio <= 1,
        "test_iteration": search.test_iteration >= 1,
    }
    for name, is_fit in fits.items():
        if not is_fit:
            raise QuantizationError(
                f"{name} out of range",
                where=f"{path}, line {lines.get((name, 0), 0)}",
                expected="compress_ratio > 1, 0 < max_prune_ratio <= 1, test_iteration >= 1",
                got=str(getattr(search, name)),
            )
    return search


def _fields(message: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters by AMCT's names; a range has a field for each end."""
    parameters: dict[str, Any] = {}
    for name, default in defaults.items():
        if isinstance(default, tuple):
            start = _number(getattr(message, f"{name}_start"))
            end = _number(getattr(message, f"{name}_end"))
            parameters[name] = (start, end)
        else:
            parameters[name] = _number(getattr(message, name))
    return parameters


def _number(value: float | int) -> float | int:
    """Return the decimal number that the file has.

    Protobuf gives 0.7 as its nearest fp32 number, 0.699999988.
    """
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _bits(message: Any, field: str) -> int:
    types = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number
    return DATA_TYPES[types[getattr(message, field)].name]
