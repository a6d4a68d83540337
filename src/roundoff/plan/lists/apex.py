"""Apex: ``opt_level`` and the keyword arguments of ``apex.amp.initialize``, as a
mapping or a JSON or TOML file of them.

O0 fp32; O1 casts around functions (what torch.autocast became); O2 the model in half
precision but for batch norm, with fp32 master weights; O3 all in half precision. The
lists of O1 are changed by calls before ``initialize``: ``register_half_function(module,
name)``, ``register_float_function`` and ``register_promote_function``; here they are
keys of the same file, each with the functions as ``module.name``.
Source: apex/amp/frontend.py, apex/amp/amp.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from roundoff.errors import PlanError
from roundoff.ops import Operator, facts, operator_names
from roundoff.plan.lists.fold import (
    FORMATS,
    ListedOperator,
    Operators,
    Read,
    Written,
)
from roundoff.plan.lists.source import Name, check_keys, names_of
from roundoff.plan.rules import FOLLOW, Plan

_DEFAULTS: dict[str, dict[str, Any]] = {
    "O0": {
        "cast_model_type": "float32",
        "patch_torch_functions": False,
        "master_weights": False,
        "loss_scale": 1.0,
    },
    "O1": {"patch_torch_functions": True, "loss_scale": "dynamic"},
    "O2": {
        "cast_model_type": "float16",
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": "dynamic",
    },
    "O3": {
        "cast_model_type": "float16",
        "patch_torch_functions": False,
        "keep_batchnorm_fp32": False,
        "master_weights": False,
        "loss_scale": 1.0,
    },
}
_OVERRIDES = (
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)
_OTHER = {
    "cast_model_outputs": "cast the outputs in the script",
    "num_losses": "a scaler for each loss",
    "verbosity": "nothing is printed",
    "min_loss_scale": "an option of the loss scaler",
    "max_loss_scale": "an option of the loss scaler",
}
#: What registers a function of torch → what it then runs in.
REGISTERS = {
    "register_half_function": "fp16",
    "register_float_function": "fp32",
    "register_promote_function": FOLLOW,
}
INITIALIZE = "apex.amp.initialize(model, optimizer, **arguments)"
#: Where Apex patches functions by name.
MODULES = ("torch", "torch.nn.functional", "torch.Tensor")
KEYS = ("opt_level", "enabled", *_OVERRIDES, *_OTHER, *REGISTERS)


def recognise(data: Any) -> bool:
    """Return True if these are arguments of ``apex.amp.initialize``."""
    return isinstance(data, Mapping) and "opt_level" in data


def read(data: Mapping[str, Any], where: str, *, partial: bool = False) -> Plan:
    """The plan of an opt level with its overrides; weights and loss scale, which no
    plan has, are said under ``about``.
    """
    check_keys(data, KEYS, where, "argument of apex.amp.initialize")
    reading = Read("apex", where, partial)
    level = _level(data, where)
    for key, reason in _OTHER.items():
        if data.get(key) is not None:
            reading.left_out.append(f"{key}={data[key]}: {reason}")
    if data.get("enabled") is False:
        return reading.plan()
    overrides = {key: data[key] for key in _OVERRIDES if data.get(key) is not None}
    _check(level, overrides, where)
    settings = _DEFAULTS[level] | overrides
    reading.left_out += _no_formats(settings)
    registered = _registered(data, reading)
    if settings["patch_torch_functions"]:
        return _patched(reading, registered)
    if registered:
        reading.left_out.append(
            f"{len(registered)} registered functions: {level} patches no functions"
        )
    low = _cast_model_type(settings, where)
    if low != "fp32" and settings.get("keep_batchnorm_fp32") in (True, "True"):
        batch_norm = ("batch_norm", "fp32", "keep_batchnorm_fp32")
        return reading.plan(reading.named([batch_norm]), low)
    return reading.plan(default=low)


def _level(data: Mapping[str, Any], where: str) -> str:
    """The opt level, O1 where none is given."""
    level = str(data.get("opt_level", "O1"))
    if level not in _DEFAULTS:
        raise PlanError(
            "no such opt level",
            where=f"{where}, opt_level",
            expected=", ".join(_DEFAULTS),
            got=repr(level),
            do="the letter O, not the digit 0" if level.startswith("0") else None,
        )
    return level


def _patched(reading: Read, registered: list[ListedOperator]) -> Plan:
    """The plan of O1: autocast's lists, changed by the registered functions."""
    reading.notes.append(
        "Apex's lists became torch.autocast's: operators follow those of the device"
    )
    reading.check(registered, "torch")
    asked = [
        (entry.name, entry.format, entry.listed)
        for entry in registered
        if entry.name in operator_names("torch")
    ]
    return reading.plan(reading.named(asked), autocast="fp16")


def _registered(data: Mapping[str, Any], reading: Read) -> list[ListedOperator]:
    """The functions of the three lists, by the name of their operator."""
    entries = []
    for key, form in REGISTERS.items():
        functions = names_of(data.get(key) or [], f"{reading.where}, {key}")
        for function in functions:
            module, _, name = function.rpartition(".")
            operator = Name.at(_operator(module, name), getattr(function, "line", 0))
            entries.append(ListedOperator(operator, form, f"{key} {function}"))
    return list({(e.name, e.format): e for e in entries}.values())


def _operator(module: str, name: str) -> str:
    """The operator that calls of a function of torch are; the name itself for none."""
    return _operators().get(f"{module}.{name}", name)


@functools.cache
def _operators() -> dict[str, str]:
    """Every function that Apex patches by name, and the operator that its calls are.

    In-place functions are not among them: what they write into keeps its format.
    """
    import torch

    namespaces = (torch, torch.nn.functional, torch.Tensor)
    operators: dict[str, str] = {}
    for module, namespace in zip(MODULES, namespaces, strict=True):
        for name in dir(namespace):
            function = getattr(namespace, name, None)
            if not callable(function) or isinstance(function, type):
                continue
            operator = Operator.of(function)
            if not operator.inplace:
                operators[f"{module}.{name}"] = _site_operator(operator.name)
    return operators


def _site_operator(name: str) -> str:
    """The operator that sites have for it: cross_entropy is cross_entropy_loss."""
    if name in operator_names("torch"):
        return name
    return facts(name).decided_by or name


def _functions(operator: str) -> list[str]:
    """The functions of torch that are this operator."""
    return [function for function, name in _operators().items() if name == operator]


def _register(formats: dict[str, str], out: Written) -> dict[str, list[str]]:
    """The lists of functions that give operators these formats; takes them out of
    ``formats``, and leaves out what is no function of torch.
    """
    keys = {form: key for key, form in REGISTERS.items()}
    lists: dict[str, list[str]] = {}
    for operator, form in list(formats.items()):
        if form not in keys:
            continue
        functions = _functions(operator)
        if functions:
            lists.setdefault(keys[form], []).extend(functions)
        else:
            out.left_out.append(
                f"op:{operator} → {form}: no function of torch that Apex can patch"
            )
        del formats[operator]
    return lists


def _no_formats(settings: Mapping[str, Any]) -> list[str]:
    """What a plan has no words for: loss scale and master weights."""
    left_out = []
    scale = settings["loss_scale"]
    if scale not in (1, 1.0, "1.0", "1"):
        left_out.append(f"loss_scale={scale}: scale the loss with roundoff.LossScaler")
    masters = settings.get("master_weights")
    if masters is not None:
        parameters = "parameters are as the script makes them"
        if masters:
            parameters = "keep the parameters in fp32"
        left_out.append(
            f"master_weights={masters}: a plan says what operators compute in; {parameters}"
        )
    return left_out


def _cast_model_type(settings: Mapping[str, Any], where: str) -> str:
    low = FORMATS.get(str(settings.get("cast_model_type")).rpartition(".")[2])
    if low is None:
        raise PlanError(
            "no such format",
            where=f"{where}, cast_model_type",
            got=repr(settings["cast_model_type"]),
            expected="torch.float16, torch.bfloat16 or torch.float32",
        )
    return low


def write(plan: Plan) -> Written:
    """The opt level that is this plan, as JSON."""
    operators = Operators.of(plan)
    out = Written("", INITIALIZE, operators.left_out)
    formats = dict(operators.formats)
    data: dict[str, Any]
    if not operators.rest:
        data = {"opt_level": "O1"}
        if plan.autocast == "bf16":
            out.left_out.append("autocast in bf16: O1 casts to float16 alone")
        else:
            data |= _register(formats, out)
            out.use = _use(data)
    elif operators.rest == "fp32":
        data = {"opt_level": "O0"}
        formats = {o: f for o, f in formats.items() if f != "fp32"}
    else:
        data = _half_model(operators.rest, formats, out.left_out)
    out.left_out += [
        f"op:{o} → {f}: Apex's levels have no lists" for o, f in formats.items()
    ]
    out.text = json.dumps(data, indent=2) + "\n"
    return out


def _use(data: Mapping[str, Any]) -> str:
    """How the file is used: first what registers functions, then the arguments."""
    if not any(key in data for key in REGISTERS):
        return INITIALIZE
    return f"apex.amp.register_...(module, name) for each function, then {INITIALIZE}"


def _half_model(
    low: str, formats: dict[str, str], left_out: list[str]
) -> dict[str, str]:
    """O2 or O3; takes batch norm out of ``formats`` where the level says it."""
    data = {"opt_level": "O3"}
    if formats.get("batch_norm") == "fp32":
        data = {"opt_level": "O2"}
        del formats["batch_norm"]
    if low == "bf16":
        data["cast_model_type"] = "bfloat16"
    elif low != "fp16":
        left_out.append(f"all others → {low}: Apex casts to float16 and bfloat16")
    return data


def _check(level: str, overrides: Mapping[str, Any], where: str) -> None:
    """Raise ``PlanError`` for what ``apex.amp.initialize`` itself refuses."""
    refused = _refused(level, overrides)
    if refused is not None:
        raise PlanError(
            f"{refused}={overrides[refused]} does not go with {level}",
            where=where,
            got="Apex refuses this too",
            do="use O2 or O3" if level == "O1" else "use O1",
        )
    keep = overrides.get("keep_batchnorm_fp32")
    if keep is not None and keep not in (True, False, "True", "False"):
        raise PlanError(
            "no truth value",
            where=f"{where}, keep_batchnorm_fp32",
            expected="true or false",
            got=repr(keep),
        )
    scale = overrides.get("loss_scale", 1.0)
    if not _is_loss_scale(scale):
        raise PlanError(
            "no loss scale",
            where=f"{where}, loss_scale",
            expected='a positive number or "dynamic"',
            got=repr(scale),
        )


def _refused(level: str, overrides: Mapping[str, Any]) -> str | None:
    """The first override that does not go with the level."""
    if level != "O1":
        patched = overrides.get("patch_torch_functions") is True
        return "patch_torch_functions" if patched else None
    model_type = str(overrides.get("cast_model_type", "float32")).rpartition(".")[2]
    if FORMATS.get(model_type) != "fp32":
        return "cast_model_type"
    others = ("keep_batchnorm_fp32", "master_weights")
    return next((key for key in others if key in overrides), None)


def _is_loss_scale(scale: Any) -> bool:
    try:
        return scale == "dynamic" or float(scale) > 0
    except (TypeError, ValueError):
        return False
