"""Reading AMCT's simple configuration: ``.cfg`` files for calibration, training, the KV cache and automatic pruning."""

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
from roundoff.plan import Name

#: fields that only one kind of file has; a file without any is a calibration configuration
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
#: names of activation and weight types → bits
DATA_TYPES = {"INT4": 4, "INT8": 8, "INT16": 16}


def read_config(
    path: str | Path, kind: str | None = None
) -> QuantizeConfig | AutoPrune:
    """Read a ``.cfg`` of calibration, training, the KV cache or automatic pruning, or a ``config.json``.

    ``kind`` (``calibration``, ``retrain``, ``kv_cache``, ``auto_prune``) is told from the fields where it is not given.

    Raises:
        QuantizationError: an unknown field or key (with the nearest), one that stands twice, a value that AMCT refuses,
            a layer or type named twice: always with the line. Names of layers are compared with a model in
            :meth:`QuantizeConfig.for_layers`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizationError(
            f"not a readable file: {error}", where=str(path)
        ) from error
    if Path(path).suffix == ".json" or text.lstrip().startswith("{"):
        return parse_json(text, str(path))
    fields = set(re.findall(r"\b([A-Za-z_]\w*)\s*[:{<]", re.sub(r"#[^\n]*", "", text)))
    kind = kind or next(
        (k for k, marks in _MARKS.items() if marks & fields), "calibration"
    )
    message, lines = parse_text(text, kind, str(path))
    if kind == "auto_prune":
        return _auto_prune(message, lines, str(path))
    return _Reader(lines, str(path)).config(message, kind)


class _Reader:
    """The messages of one file as our configuration; each value's line is at hand for an error."""

    def __init__(self, lines: Lines, path: str) -> None:
        self.lines = lines
        self.path = path

    def at(self, key: tuple[str | int, ...]) -> str:
        while key and key not in self.lines:
            key = key[:-2]
        return f"{self.path}, line {self.lines[key]}" if key else self.path

    def names(self, message: Any, field: str) -> tuple[str, ...]:
        if field not in message.DESCRIPTOR.fields_by_name:
            return ()
        found: dict[str, int] = {}
        for index, name in enumerate(getattr(message, field)):
            self.once(found, name, (field, index))
        return tuple(Name.at(name, line) for name, line in found.items())

    def once(
        self, found: dict[str, int], name: str, key: tuple[str | int, ...]
    ) -> Name:
        if name in found:
            raise QuantizationError(
                f"{name} is named twice",
                where=self.at(key),
                got=f"the first is at line {found[name]}",
                do="keep one",
            )
        found[name] = self.lines.get(key, 0)
        return Name.at(name, found[name])

    def config(self, message: Any, kind: str) -> QuantizeConfig:
        if message.batch_num < 1:
            raise QuantizationError(
                "batch_num out of range",
                where=self.at(("batch_num", 0)),
                expected="1 or more",
                got="0",
            )
        if kind == "kv_cache":
            inner = message.kv_cache_quant_config
            prefix: tuple[str | int, ...] = ("kv_cache_quant_config", 0)
            common = self.calibration(
                inner.calibration_config, (*prefix, "calibration_config", 0)
            )
            layers, _ = self.overrides(
                message, "override_layers_configs", "layer_name", kind
            )
            own = _Reader(
                {
                    key[2:]: line
                    for key, line in self.lines.items()
                    if key[:2] == prefix
                },
                self.path,
            )
            return QuantizeConfig(
                kind,
                message.batch_num,
                not message.activation_offset,
                Levels(common, {}, layers),
                only=own.names(inner, "quant_layers"),
            )
        quantized: LayerConfig | None
        pruned: Pruning | None = None
        if kind == "calibration":
            quantized = self.calibration(message.common_config, ("common_config", 0))
        else:
            quantized, pruned = self.retrain(message, ())
        types, prune_types = self.overrides(
            message, "override_layer_types", "layer_type", kind
        )
        layers, prune_layers = self.overrides(
            message, "override_layer_configs", "layer_name", kind
        )
        skip_layers = self.names(message, "skip_layers")
        skip_types = self.names(message, "skip_layer_types")
        training = kind == "retrain"
        return QuantizeConfig(
            kind,
            message.batch_num,
            not training and not message.activation_offset,
            Levels(quantized, types, layers),
            Levels(pruned, prune_types, prune_layers),
            skip_layers + self.names(message, "quant_skip_layers"),
            skip_types + self.names(message, "quant_skip_types"),
            (skip_layers if training else ())
            + self.names(message, "regular_prune_skip_layers"),
            (skip_types if training else ())
            + self.names(message, "regular_prune_skip_types"),
            fold=training or message.do_fusion,
            skip_fold=self.names(message, "skip_fusion_layers"),
            fp16_scales=message.HasField("fakequant_precision_mode"),
        )

    def overrides(
        self, message: Any, field: str, name: str, kind: str
    ) -> tuple[dict[str, LayerConfig], dict[str, Pruning]]:
        quantized: dict[str, LayerConfig] = {}
        pruned: dict[str, Pruning] = {}
        seen: dict[str, int] = {}
        inside = "kv_data_quant_config" if kind == "kv_cache" else "calibration_config"
        for index, row in enumerate(getattr(message, field)):
            key = self.once(seen, getattr(row, name), (field, index, name, 0))
            if kind != "retrain":
                quantized[key] = self.calibration(
                    getattr(row, inside), (field, index, inside, 0)
                )
                continue
            own, prune = self.retrain(row, (field, index))
            if own is not None:
                quantized[key] = own
            if prune is not None:
                pruned[key] = prune
        return quantized, pruned

    def calibration(self, said: Any, key: tuple[str | int, ...]) -> LayerConfig:
        """A ``CalibrationConfig``."""
        given: dict[str, Any] = {}
        if said.HasField("ifmr_quantize") or said.HasField("hfmg_quantize"):
            given["observer"] = "ifmr" if said.HasField("ifmr_quantize") else "hfmg"
            own = getattr(said, f"{given['observer']}_quantize")
            given["observer_parameters"] = _fields(
                own, IFMR if given["observer"] == "ifmr" else HFMG
            )
            if own.HasField("asymmetric"):
                given["symmetric"] = not own.asymmetric
            if "dst_type" in own.DESCRIPTOR.fields_by_name:
                given["activation_bits"] = _bits(own, "dst_type")
        if "arq_quantize" not in said.DESCRIPTOR.fields_by_name:  # a KV cache
            granularity = getattr(
                said, f"{given.get('observer', 'ifmr')}_quantize"
            ).quant_granularity
            given["cache_per_channel"] = granularity == 1
        else:
            adaround = said.HasField("ada_quantize")
            weight = said.ada_quantize if adaround else said.arq_quantize
            given["per_channel"] = (
                weight.channel_wise if weight.HasField("channel_wise") else None
            )
            if adaround:
                given |= {
                    "weight_algorithm": "adaround",
                    "weight_parameters": _fields(weight, ADAROUND),
                }
            else:
                given["weight_bits"] = weight.quant_bits
            if said.HasField("dmq_balancer"):
                given["dmq_alpha"] = _number(said.dmq_balancer.migration_strength)
        return check_ranges(LayerConfig(**given), self.at(key))

    def retrain(
        self, said: Any, key: tuple[str | int, ...]
    ) -> tuple[LayerConfig | None, Pruning | None]:
        """What a retrain file or one of its overrides says of quantization and of pruning."""
        quantized = None
        if said.HasField("retrain_data_quant_config") or said.HasField(
            "retrain_weight_quant_config"
        ):
            data = said.retrain_data_quant_config.ulq_quantize
            weight = said.retrain_weight_quant_config
            learned = weight.HasField("ulq_retrain")
            own = weight.ulq_retrain if learned else weight.arq_retrain
            clip = data.clip_max_min
            parameters = (
                {"clip_max": _number(clip.clip_max), "clip_min": _number(clip.clip_min)}
                if data.HasField("clip_max_min")
                else {}
            )
            if data.HasField("fixed_min"):
                parameters["fixed_min"] = data.fixed_min
            if (
                parameters.get("clip_max", 1.0) <= 0
                or parameters.get("clip_min", -1.0) > 0
            ):
                raise QuantizationError(
                    "clip_max_min out of range",
                    where=self.at((*key, "retrain_data_quant_config", 0)),
                    expected="clip_max > 0 >= clip_min",
                    got=str(parameters),
                )
            quantized = check_ranges(
                LayerConfig(
                    weight_bits=_bits(own, "dst_type"),
                    per_channel=own.channel_wise
                    if own.HasField("channel_wise")
                    else None,
                    weight_algorithm="ulq" if learned else "arq",
                    activation_bits=_bits(data, "dst_type"),
                    observer="ulq",
                    observer_parameters=parameters,
                ),
                self.at(key),
            )
        elif not key:
            quantized = LayerConfig(observer="ulq", observer_parameters={})
        if said.prune_config.HasField("n_out_of_m_pruner"):
            return quantized, Pruning(
                None,
                False,
                said.prune_config.n_out_of_m_pruner.l1_selective_prune.update_freq,
            )
        if not said.prune_config.HasField("filter_pruner"):
            return quantized, None
        filters = said.prune_config.filter_pruner.balanced_l2_norm_filter_prune
        if not 0 < filters.prune_ratio < 1:
            raise QuantizationError(
                "prune_ratio out of range",
                where=self.at((*key, "prune_config", 0)),
                expected="between 0 and 1",
                got=str(_number(filters.prune_ratio)),
            )
        return quantized, Pruning(
            _number(filters.prune_ratio), filters.ascend_optimized
        )


def _auto_prune(message: Any, lines: Lines, path: str) -> AutoPrune:
    found = AutoPrune(
        _number(message.compress_ratio),
        message.ascend_optimized,
        _number(message.max_prune_ratio),
        message.test_iteration,
        message.override_prune_cfg,
    )
    bad = {
        "compress_ratio": not found.compress_ratio > 1,
        "max_prune_ratio": not 0 < found.max_prune_ratio <= 1,
        "test_iteration": found.test_iteration < 1,
    }
    for name in (name for name, is_bad in bad.items() if is_bad):
        raise QuantizationError(
            f"{name} out of range",
            where=f"{path}, line {lines.get((name, 0), 0)}",
            expected="compress_ratio > 1, 0 < max_prune_ratio <= 1, test_iteration >= 1",
            got=str(getattr(found, name)),
        )
    return found


def _fields(message: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters by AMCT's names; a range has a field for each end."""
    return {
        name: tuple(
            _number(getattr(message, f"{name}_{end}")) for end in ("start", "end")
        )
        if isinstance(value, tuple)
        else _number(getattr(message, name))
        for name, value in defaults.items()
    }


def _number(value: float | int) -> float | int:
    """The decimal number that the file has: protobuf gives the fp32 number next to 0.7 as 0.699999988."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _bits(message: Any, field: str) -> int:
    return DATA_TYPES[
        message.DESCRIPTOR.fields_by_name[field]
        .enum_type.values_by_number[getattr(message, field)]
        .name
    ]
