"""Training configurations by name, such as ``bf16+compile``: what each changes in the way a workload trains."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from roundoff.errors import FormatError, WorkloadError, did_you_mean, nearest
from roundoff.formats import parse_format
from roundoff.plan import (
    Change,
    channels_last,
    double,
    find_device,
    moved,
    setting_of,
    with_batches,
)
from roundoff.workload import Workload

#: ``step(model, optimizer, batch)`` -> loss: a training step that the user wrote, with everything in it.
Step = Callable[[nn.Module, torch.optim.Optimizer, Any], Tensor]

FORMATS = ("fp32", "bf16", "fp16", "tf32", "fp64")
WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZER = ("foreach", "fused", "capturable")
WORDS = (
    *FORMATS,
    "compile",
    "compile=aot_eager",
    "channels_last",
    "checkpoint",
    *OPTIMIZER,
    "weights=bf16",
    "accumulate=2",
    "scale=dynamic",
    "scale=static:1024",
    "scale=off",
    "threads=1",
    "mkldnn=off",
    "cpu",
    "cuda",
)
#: Where torch's GradScaler begins.
INITIAL_SCALE = 65536.0


@dataclass(frozen=True)
class Config:
    """One way to train a workload.

    Attributes:
        name: as the user calls it.
        format: fp32, bf16, fp16, tf32 or fp64; ``plan`` where ``plan`` names a file; ``by hand`` where ``step`` is given.
        plan: the plan file that autocast obeys.
        backend: of torch.compile, the empty string for the default one; None where nothing is compiled.
        changes: what is done to the copy of the workload, in order.
        settings: what is set in torch around each step; undone after it.
        optimizer: arguments that the optimizer is made again with.
        accumulate: parts that a batch is cut into, whose gradients are added up.
        scale: the loss scale to begin with; None for none.
        static: whether the loss scale stays there.
        step: a training step of the user's own.
    """

    name: str
    format: str = "fp32"
    plan: str | None = None
    backend: str | None = None
    changes: tuple[Change, ...] = ()
    settings: tuple[Callable[[], None], ...] = ()
    optimizer: dict[str, bool] = field(default_factory=dict)
    accumulate: int = 1
    scale: float | None = None
    static: bool = False
    step: Step | None = None


def parse_configs(given: Iterable[str | Step]) -> list[Config]:
    """The configurations that names and functions stand for; one that is given twice gets a number.

    Raises ``WorkloadError`` for an unknown word, listing the nearest, and where none is given.

    >>> [(c.name, c.format, c.scale) for c in parse_configs(["fp32", "fp16+channels_last", "fp32"])]
    [('fp32', 'fp32', None), ('fp16+channels_last', 'fp16', 65536.0), ('fp32 (2)', 'fp32', None)]
    """
    found = [parse_config(one) for one in given]
    if not found:
        raise WorkloadError(
            "there is nothing to train",
            where="configs",
            expected="fp32,bf16 or other configurations",
        )
    seen: Counter[str] = Counter()
    for number, config in enumerate(found):
        seen[config.name] += 1
        if seen[config.name] > 1:
            found[number] = replace(config, name=f"{config.name} ({seen[config.name]})")
    return found


def parse_config(given: str | Step) -> Config:
    """One configuration; see ``parse_configs``."""
    if not isinstance(given, str):
        return Config(
            str(getattr(given, "__name__", "step")).replace("_", " "),
            "by hand",
            step=given,
        )
    formats: list[str] = []
    parts: dict[str, Any] = {"changes": [], "settings": [], "optimizer": {}}
    for word in (
        [given] if _is_plan(given) and Path(given).exists() else given.split("+")
    ):
        _read(word.strip(), given, formats, parts)
    if len(formats) > 1:
        raise WorkloadError(
            "two formats in one configuration",
            where=given,
            expected="one of them",
            got=", ".join(formats),
        )
    name = formats[0] if formats else "fp32"
    plan = name if _is_plan(name) else None
    parts["settings"].append(partial(_tf32, name == "tf32"))
    if name == "fp64":
        parts["settings"].append(partial(torch.set_default_dtype, torch.float64))
        parts["changes"].insert(0, double)
    if name == "fp16" and "scale" not in parts:
        parts["scale"] = INITIAL_SCALE
    parts |= {key: tuple(parts[key]) for key in ("changes", "settings")}
    return Config(given.strip(), "plan" if plan else name, plan, **parts)


def _read(word: str, given: str, formats: list[str], parts: dict[str, Any]) -> None:
    """One word of a configuration, into ``formats`` or ``parts``."""
    key, mark, value = word.partition("=")
    kind, _, start = value.partition(":")
    if _is_plan(word):
        formats.append(word)
    elif key == "compile":
        parts["backend"] = _known_backend(value, given)
    elif word == "channels_last":
        parts["changes"].append(channels_last)
    elif word == "checkpoint":
        parts["changes"].append(checkpointed)
    elif word in OPTIMIZER:
        parts["optimizer"][word] = True
    elif key == "weights" and value in WEIGHTS:
        parts["changes"].append(partial(_in_format, dtype=WEIGHTS[value]))
    elif key == "accumulate" and value.isdigit() and int(value):
        parts["accumulate"] = int(value)
    elif (
        key == "scale"
        and kind in ("dynamic", "static", "off")
        and (not start or _positive(start))
    ):
        parts["scale"] = None if kind == "off" else float(start or INITIAL_SCALE)
        parts["static"] = kind == "static"
    elif key in ("threads", "mkldnn") and mark:
        parts["settings"].append(setting_of(word, key, value))
    elif re.fullmatch(r"(cpu|cuda|xpu|mps|npu|hpu)(:\d+)?", word):
        parts["changes"].append(partial(_on, device=word))
    else:
        formats.append(_format(word, given))


def _format(word: str, given: str) -> str:
    try:
        name = parse_format(word).name
    except FormatError:
        raise WorkloadError(
            f"{word!r} is no part of a configuration",
            where=given,
            expected="fp32, bf16, fp16, tf32, fp64 or a plan file (.toml, .json), joined by + with any of "
            + ", ".join(w for w in WORDS if w not in FORMATS),
            do=did_you_mean(nearest(word, WORDS)),
        ) from None
    if name not in FORMATS:
        raise WorkloadError(
            f"torch cannot train in {name} by itself",
            where=given,
            expected=", ".join(FORMATS),
            do="write a plan that simulates it, and give the plan's file as the configuration",
        )
    return name


def _is_plan(word: str) -> bool:
    return word.endswith((".toml", ".json"))


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _known_backend(name: str, given: str) -> str:
    if not name:
        return name
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        raise WorkloadError(
            "torch.compile has no such backend",
            where=given,
            expected=", ".join(known),
            got=repr(name),
            do=did_you_mean(nearest(name, known)),
        )
    return name


def remade(
    optimizer: torch.optim.Optimizer, flags: dict[str, bool]
) -> torch.optim.Optimizer:
    """The same optimizer, not yet stepped, made with other arguments such as ``fused=True``.

    Raises ``WorkloadError`` for one that takes no such argument.
    """
    if not flags:
        return optimizer
    kind: Any = type(optimizer)
    takes = inspect.signature(kind).parameters
    missing = [flag for flag in flags if flag not in takes]
    if missing:
        raise WorkloadError(
            f"{kind.__name__} has no {missing[0]}",
            where="optimizer",
            expected=f"one that takes {missing[0]}, such as Adam or SGD",
        )
    own = {key: value for key, value in optimizer.defaults.items() if key in takes}
    groups = [
        {
            key: value
            for key, value in group.items()
            if key == "params" or key in takes and key not in flags
        }
        for group in optimizer.param_groups
    ]
    if "fused" in flags or "foreach" in flags:  # the two exclude each other
        own |= {"foreach": None, "fused": None}
        groups = [
            {
                key: value
                for key, value in group.items()
                if key not in ("foreach", "fused")
            }
            for group in groups
        ]
    made: torch.optim.Optimizer = kind(groups, **(own | flags))
    return made


def checkpointed(workload: Workload) -> Workload:
    """The workload with every block of its model run again in the backward pass instead of kept.

    Blocks are the members of the outermost ``ModuleList`` and ``Sequential`` containers, or the whole model without any.
    Running a block again updates running statistics of BatchNorm a second time.
    """
    for block in _blocks(workload.model) or [workload.model]:
        object.__setattr__(
            block, "forward", partial(checkpoint, block.forward, use_reentrant=False)
        )
    return workload


def _blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [block for block in module if any(True for _ in block.parameters())]
    return [block for child in module.children() for block in _blocks(child)]


def _in_format(workload: Workload, dtype: torch.dtype) -> Workload:
    workload.model.to(dtype)
    return with_batches(workload, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _on(workload: Workload, device: str) -> Workload:
    return moved(workload, find_device(device))


def _tf32(on: bool) -> None:
    """TF32 for matrix products and convolutions, or none. Nothing is written that stands so already."""
    precision = "high" if on else "highest"
    if torch.get_float32_matmul_precision() != precision:
        torch.set_float32_matmul_precision(precision)
    if torch.cuda.is_available() and torch.backends.cudnn.allow_tf32 != on:
        torch.backends.cudnn.allow_tf32 = on
