"""Transformer Engine: the YAML of its debug features (nvidia-dlfw-inspect), section by section.

A section names layers (a regular expression searched in the layer's name, or parts of
names) and features. Those that decide a format: DisableFP8Layer, DisableFP8GEMM (and
their successors DisableQuantization...) and FakeQuant. Source:
nvdlfw_inspect/config_manager.py and transformer_engine/debug/features.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roundoff.errors import PlanError, examples
from roundoff.foreign_patterns import names_matched
from roundoff.plan.lists.fold import Read, Written, low_format, patterns
from roundoff.plan.lists.source import check_keys, names_of
from roundoff.plan.rules import Plan, Rule

if TYPE_CHECKING:
    from torch import nn

#: What the layers run in that no section names: the recipe is in the program, not in
#: the file.
RECIPE = "fp8_e4m3fn"
FORMATS = {
    "FP8E4M3": "fp8_e4m3fn",
    "E4M3": "fp8_e4m3fn",
    "FP8E5M2": "fp8_e5m2",
    "E5M2": "fp8_e5m2",
    "MXFP8E4M3": "mxfp8_e4m3",
    "MXFP8E5M2": "mxfp8_e5m2",
}
_HIGH = ("bf16", "fp16", "fp32")
_SECTION = ("enabled", "layers", "transformer_engine")
_EXPRESSION = "layer_name_regex_pattern"
_LAYERS = (
    _EXPRESSION,
    "layer_types",
    "layer_numbers",
    "exact_layer_names",
)
_DISABLE = (
    "DisableFP8Layer",
    "DisableFP8GEMM",
    "DisableQuantizationLayer",
    "DisableQuantizationGEMM",
)
_FAKE = ("FakeQuant", "FakeQuantFp8")
_OTHER = {
    "PerTensorScaling": "how the scale is found, not the format",
    "LogTensorStats": "statistics, not a format",
    "LogFp8TensorStats": "statistics, not a format",
    "LogNvfp4TensorStats": "statistics, not a format",
    "DumpTensors": "writes tensors, no format",
}
#: Without regard to case: older versions wrote DisableFp8Gemm.
_FEATURES = {name.lower(): name for name in (*_DISABLE, *_FAKE, *_OTHER)}


def recognise(data: Any) -> bool:
    """Return True if these are sections of such a file."""
    if not isinstance(data, Mapping):
        return False
    return any(isinstance(v, Mapping) and "layers" in v for v in data.values())


def read(
    data: Mapping[str, Any],
    where: str,
    *,
    model: nn.Module | Iterable[str] | None,
    format: str | None = None,
    partial: bool = False,
) -> Plan:
    """The plan: the layers of the sections in the format they ask for, ``format``
    (bf16) where they disable FP8, all other ``linear`` in fp8, and the rest as
    torch.autocast has it.

    ``model`` is the module, or its layers' names, in which the file's expressions are
    searched.
    """
    reading = Read("transformer_engine", where, partial)
    high = low_format(format or "bf16", "format")
    if model is None:
        raise PlanError(
            "the file names layers by expressions, and there is no model to search",
            where=where,
            do="give the model, or the names of its layers: model=, --model WORKLOAD.py",
        )
    layers = _layers(model)
    matched_by = _matched_by_expressions(data, layers, where)
    rules: list[Rule] = []
    owner: dict[str, str] = {}
    for section, settings in data.items():
        at = f"{where}, {section}"
        _check_section(settings, at)
        if not settings["enabled"]:
            reading.notes.append(f"{section}: not enabled")
            continue
        matched = _matched(settings["layers"], layers, matched_by, at)
        _own(matched, section, owner, where)
        reading.left_out += [
            f"{section}, {name}: outside the transformer_engine namespace"
            for name in settings
            if name not in _SECTION
        ]
        features = settings.get("transformer_engine") or {}
        asked = _asked(features, high, section, reading, at)
        if asked:
            sites = tuple(f"{glob.escape(layer)}/*" for layer in matched)
            rules.append(Rule(asked, sites))
            reading.origin |= dict.fromkeys(sites, section)
    reading.notes.append(
        f"the recipe is in the program: all other linear layers are taken as {RECIPE}"
    )
    return reading.plan((*rules, Rule(RECIPE, ("op:linear",))), autocast=high)


def _check_section(settings: Any, where: str) -> None:
    is_section = isinstance(settings, Mapping)
    if not is_section or "enabled" not in settings or "layers" not in settings:
        raise PlanError(
            "not a section",
            where=where,
            expected="enabled, layers and features",
            got=repr(settings)[:60],
        )


def _own(
    layers: Iterable[str], section: str, owner: dict[str, str], where: str
) -> None:
    """Enter a section as the owner of its layers; raise ``PlanError`` for a second owner."""
    for layer in layers:
        if layer in owner:
            raise PlanError(
                f"the layer {layer} is in two sections",
                where=where,
                got=f"{owner[layer]} and {section}",
                do="a layer belongs to one: narrow one of the expressions",
            )
        owner[layer] = section


def write(plan: Plan) -> Written:
    """A section for each format: layers of half or full precision have FP8 disabled,
    8-bit ones are fake-quantized.
    """
    out = Written(
        "",
        f"nvdlfw_inspect.api.initialize(config_file=FILE); the recipe ({RECIPE}) is set in the program",
    )
    layers: dict[str, str] = {}
    for number, pattern, name in patterns(plan):
        if (pattern, name) == ("op:linear", RECIPE):
            continue
        layer = _regex(pattern)
        if layer is None:
            out.left_out.append(
                f"rule {number}, {pattern} → {name}: not a module (path/*, path.*)"
            )
        elif name not in (*_HIGH, *FORMATS.values()):
            out.left_out.append(
                f"rule {number}, {pattern} → {name}: no such format there"
            )
        else:
            layers.setdefault(layer, name)  # the first rule decides
    groups: dict[str, list[str]] = {}
    for layer, name in layers.items():
        groups.setdefault(name, []).append(layer)
    program = plan.autocast or "bf16"
    out.notes += [
        f"{name}: disabled layers run in the format of the program ({program})"
        for name in sorted(groups)
        if name in _HIGH and name != program
    ]
    sections = [_section(name, names) for name, names in groups.items()]
    out.text = "".join(sections) or "{}\n"
    return out


def _section(form: str, layers: list[str]) -> str:
    """The YAML of the layers that run in one format."""
    expression = json.dumps(f"^({'|'.join(layers)})$")
    lines = [
        f"{form}_layers:",
        "  enabled: True",
        "  layers:",
        f"    layer_name_regex_pattern: {expression}",
        "  transformer_engine:",
    ]
    if form in _HIGH:
        lines += ["    DisableFP8Layer:", "      enabled: True"]
    else:
        quant_format = next(key for key, name in FORMATS.items() if name == form)
        lines += [
            "    FakeQuant:",
            "      enabled: True",
            f"      quant_format: {quant_format}",
            "      gemms: [fprop]",
            "      tensors: [activation, weight]",
        ]
    return "\n".join(lines) + "\n"


def _layers(model: nn.Module | Iterable[str]) -> list[str]:
    """The modules with a matrix of weights: those are what Transformer Engine's layers are."""
    if not hasattr(model, "named_modules"):
        return list(model)
    return [
        path
        for path, module in model.named_modules()
        if any(p.dim() >= 2 for p in module.parameters(recurse=False)) and path
    ]


def _matched_by_expressions(
    data: Mapping[str, Any], layers: Sequence[str], where: str
) -> Mapping[str, frozenset[str]]:
    """The layers that each regular expression of the enabled sections is found in."""
    sections = [each for each in data.values() if isinstance(each, Mapping)]
    specs = [each.get("layers") for each in sections if each.get("enabled")]
    expressions = [
        str(spec[_EXPRESSION])
        for spec in specs
        if isinstance(spec, Mapping) and _EXPRESSION in spec
    ]
    try:
        return names_matched(expressions, layers, "search")
    except ValueError as error:
        raise PlanError(str(error), where=f"{where}, layers") from error


def _matched(
    spec: Any,
    layers: Sequence[str],
    matched_by: Mapping[str, frozenset[str]],
    where: str,
) -> list[str]:
    if not isinstance(spec, Mapping) or not spec:
        raise PlanError(
            "names no layers",
            where=f"{where}, layers",
            expected=" or ".join(_LAYERS[:2]),
            got=repr(spec)[:60],
        )
    check_keys(spec, _LAYERS, f"{where}, layers")
    shown = str(next(iter(spec.values())))
    test = _layer_test(spec, matched_by, where)
    matched = [name for name in layers if test(name)]
    if not matched:
        raise PlanError(
            f"no layer of the model matches {shown}",
            where=f"{where}, layers",
            expected=f"the name of one of {len(layers)} layers, such as {examples(shown, layers)}",
        )
    return matched


def _layer_test(
    spec: Mapping[str, Any], matched_by: Mapping[str, frozenset[str]], where: str
) -> Callable[[str], bool]:
    """What says of a layer's name that the section means it."""
    if "exact_layer_names" in spec:
        place = f"{where}, layers, exact_layer_names"
        exact = frozenset(names_of(spec["exact_layer_names"], place))
        return exact.__contains__
    if _EXPRESSION in spec:
        return matched_by[str(spec[_EXPRESSION])].__contains__
    place = f"{where}, layers, layer_types"
    types = names_of(spec.get("layer_types", ["all"]), place)
    numbers = _numbers(spec.get("layer_numbers", "all"), where)

    def by_type_and_number(name: str) -> bool:
        chosen = "all" in types or any(t in name for t in types)
        return chosen and _numbered(name, numbers)

    return by_type_and_number


def _numbers(value: Any, where: str) -> list[range] | None:
    """The layer numbers; None for all."""
    values = value if isinstance(value, list) else [value]
    if "all" in values:
        return None
    try:
        ends = [[int(end) for end in str(v).split("-")] for v in values]
    except ValueError as error:
        raise PlanError(
            "not layer numbers",
            where=f"{where}, layers, layer_numbers",
            got=repr(value)[:60],
            expected='a number, "3-5", a list of them, or "all"',
        ) from error
    return [range(pair[0], pair[-1] + 1) for pair in ends]


def _numbered(name: str, numbers: Sequence[range] | None) -> bool:
    if numbers is None:
        return True
    digits = re.findall(r"(?<!fc)\d+", name)
    return any(int(number) in each for number in digits for each in numbers)


def _asked(features: Any, high: str, section: str, reading: Read, where: str) -> str:
    """The format that a section's features ask for; empty if none does."""
    if not isinstance(features, Mapping):
        raise PlanError(
            "no features", where=f"{where}, transformer_engine", got=repr(features)[:60]
        )
    asked = ""
    for written, settings in features.items():
        name = _FEATURES.get(str(written).lower(), "")
        if not name:
            check_keys({written: 0}, tuple(_FEATURES.values()), where, "feature")
        settings = settings if isinstance(settings, Mapping) else {}
        place = f"{section}, {written}"
        if not settings.get("enabled"):
            reading.notes.append(f"{place}: not enabled")
        elif name in _OTHER:
            reading.left_out.append(f"{place}: {_OTHER[name]}")
        elif name.endswith("Layer") or _forward(settings, place, where, reading):
            disables = name not in _FAKE
            asked = asked or (high if disables else _quant_format(settings, where))
    return asked


def _forward(
    settings: Mapping[str, Any], place: str, where: str, reading: Read
) -> bool:
    """Return True if a feature covers the forward product; what else it does is left out."""
    gemms = _gemms(settings, f"{where}, {place.rpartition(', ')[2]}")
    if "fprop" not in gemms:
        named = ", ".join(gemms) or "no"
        reading.left_out.append(f"{place}: {named} gemms only; a plan is about forward")
        return False
    missing = {"dgrad", "wgrad"} - set(gemms)
    if missing:
        backward = ", ".join(sorted(missing))
        reading.left_out.append(f"{place}: {backward} stay in fp8 there, not here")
    return True


def _gemms(settings: Mapping[str, Any], where: str) -> list[str]:
    structs = settings.get("gemms_struct") or []
    is_list = isinstance(structs, list)
    if not is_list or not all(isinstance(s, Mapping) and "gemm" in s for s in structs):
        raise PlanError(
            "no gemms_struct",
            where=where,
            expected="a list of entries with gemm",
            got=repr(structs)[:60],
        )
    return [
        *names_of(settings.get("gemms") or [], f"{where}, gemms"),
        *(str(s["gemm"]) for s in structs),
    ]


def _quant_format(settings: Mapping[str, Any], where: str) -> str:
    nested = [*(settings.get("gemms_struct") or [])]
    nested += settings.get("tensors_struct") or []
    for struct in tuple(nested):
        nested += struct.get("tensors_struct") or []
    candidates = [settings, *nested]
    written = next(
        (c["quant_format"] for c in candidates if c.get("quant_format")), None
    )
    if str(written) not in FORMATS:
        raise PlanError(
            "no such quant_format",
            where=f"{where}, FakeQuant",
            expected=", ".join(FORMATS),
            got=repr(written),
        )
    return FORMATS[str(written)]


def _regex(pattern: str) -> str | None:
    """A pattern over all sites of a module, or of it and those below, as an expression
    over layer names.
    """
    over_a_module = pattern.endswith(("/*", ".*")) and pattern != "/*"
    if pattern.startswith(("op:", "class:")) or not over_a_module:
        return None
    parts = re.findall(r"\[[*?[]\]|.", pattern[:-2])
    path = "".join(map(_regex_of_part, parts))
    return path if pattern.endswith("/*") else path + r"\..*"


def _regex_of_part(part: str) -> str:
    """A character of a glob, or an escaped one in brackets, as an expression."""
    if part[0] == "[":
        return part[1]
    return {"*": ".*", "?": "."}.get(part, re.escape(part))
