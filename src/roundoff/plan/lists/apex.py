"""Apex: ``opt_level`` and the keyword arguments of ``apex.amp.initialize``, as a mapping or a JSON or TOML file of them.

O0 fp32; O1 casts around functions (what torch.autocast became); O2 the model in half precision but for batch norm, with
fp32 master weights; O3 all in half precision. Source: apex/amp/frontend.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from roundoff.errors import PlanError
from roundoff.plan.lists.fold import FORMATS, Operators, Read, Written
from roundoff.plan.lists.source import check_keys
from roundoff.plan.rules import Plan

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
KEYS = ("opt_level", "enabled", *_OVERRIDES, *_OTHER)


def recognise(data: Any) -> bool:
    """Whether these are arguments of ``apex.amp.initialize``."""
    return isinstance(data, Mapping) and "opt_level" in data


def read(data: Mapping[str, Any], where: str, *, partial: bool = False) -> Plan:
    """The plan of an opt level with its overrides; weights and loss scale, which no plan has, are said under ``about``."""
    check_keys(data, KEYS, where, "argument of apex.amp.initialize")
    found = Read("apex", where, partial)
    level = str(data.get("opt_level", "O1"))
    if level not in _DEFAULTS:
        raise PlanError(
            "no such opt level",
            where=f"{where}, opt_level",
            expected=", ".join(_DEFAULTS),
            got=repr(level),
            do="the letter O, not the digit 0" if level.startswith("0") else None,
        )
    found.left_out += [
        f"{key}={data[key]}: {why}"
        for key, why in _OTHER.items()
        if data.get(key) is not None
    ]
    if data.get("enabled") is False:
        return found.plan()
    given = {key: data[key] for key in _OVERRIDES if data.get(key) is not None}
    _check(level, given, where)
    settings = _DEFAULTS[level] | given
    scale = settings["loss_scale"]
    if scale not in (1, 1.0, "1.0", "1"):
        found.left_out.append(
            f"loss_scale={scale}: scale the loss with roundoff.LossScaler"
        )
    if settings.get("master_weights") is not None:
        found.left_out.append(
            f"master_weights={settings['master_weights']}: a plan says what operators compute in; "
            + (
                "keep the parameters in fp32"
                if settings["master_weights"]
                else "parameters are as the script makes them"
            )
        )
    if settings["patch_torch_functions"]:
        found.notes.append(
            "Apex's lists became torch.autocast's: operators follow those of the device"
        )
        return found.plan(autocast="fp16")
    low = FORMATS.get(str(settings.get("cast_model_type")).rpartition(".")[2])
    if low is None:
        raise PlanError(
            "no such format",
            where=f"{where}, cast_model_type",
            got=repr(settings["cast_model_type"]),
            expected="torch.float16, torch.bfloat16 or torch.float32",
        )
    if low != "fp32" and settings.get("keep_batchnorm_fp32") in (True, "True"):
        return found.plan(
            found.named([("batch_norm", "fp32", "keep_batchnorm_fp32")]), low
        )
    return found.plan(default=low)


def write(plan: Plan) -> Written:
    """The opt level that is this plan, as JSON."""
    operators = Operators.of(plan)
    out = Written(
        "", "apex.amp.initialize(model, optimizer, **arguments)", operators.left_out
    )
    formats = dict(operators.formats)
    if not operators.rest:
        data: dict[str, Any] = {"opt_level": "O1"}
        if plan.autocast == "bf16":
            out.left_out.append("autocast in bf16: O1 casts to float16 alone")
    elif operators.rest == "fp32":
        data = {"opt_level": "O0"}
        formats = {o: f for o, f in formats.items() if f != "fp32"}
    else:
        keeps = formats.get("batch_norm") == "fp32"
        data = {"opt_level": "O2" if keeps else "O3"}
        if keeps:
            del formats["batch_norm"]
        if operators.rest == "bf16":
            data["cast_model_type"] = "bfloat16"
        elif operators.rest != "fp16":
            out.left_out.append(
                f"all others → {operators.rest}: Apex casts to float16 and bfloat16"
            )
    out.left_out += [
        f"op:{o} → {f}: Apex's levels have no lists" for o, f in formats.items()
    ]
    out.text = json.dumps(data, indent=2) + "\n"
    return out


def _check(level: str, given: Mapping[str, Any], where: str) -> None:
    """What ``apex.amp.initialize`` itself refuses."""
    o1 = level == "O1"
    wrong = {
        "cast_model_type": o1
        and FORMATS.get(str(given.get("cast_model_type", "float32")).rpartition(".")[2])
        != "fp32",
        "keep_batchnorm_fp32": o1,
        "master_weights": o1,
        "patch_torch_functions": not o1 and given.get("patch_torch_functions") is True,
    }
    for key, bad in wrong.items():
        if bad and key in given:
            raise PlanError(
                f"{key}={given[key]} does not go with {level}",
                where=where,
                got="Apex refuses this too",
                do="use O2 or O3" if o1 else "use O1",
            )
    keep = given.get("keep_batchnorm_fp32")
    if keep is not None and keep not in (True, False, "True", "False"):
        raise PlanError(
            "no truth value",
            where=f"{where}, keep_batchnorm_fp32",
            expected="true or false",
            got=repr(keep),
        )
    scale = given.get("loss_scale", 1.0)
    try:
        bad = scale != "dynamic" and not float(scale) > 0
    except (TypeError, ValueError):
        bad = True
    if bad:
        raise PlanError(
            "no loss scale",
            where=f"{where}, loss_scale",
            expected='a positive number or "dynamic"',
            got=repr(scale),
        )
