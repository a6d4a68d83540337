"""Training configurations by name, such as ``bf16+compile``: how each changes the
training of a workload.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
from roundoff.train.low_precision import METHODS
from roundoff.workload import Workload

#: ``step(model, optimizer, batch)`` -> loss: a whole training step that the user wrote.
TrainingStep = Callable[[nn.Module, torch.optim.Optimizer, Any], Tensor]

FORMATS = ("fp32", "bf16", "fp16", "tf32", "fp64")
WEIGHT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZER_FLAGS = ("foreach", "fused", "capturable")
#: Flags that exclude each other.
EXCLUSIVE = ("foreach", "fused")
SCALE_RULES = ("dynamic", "static", "off")
#: Examples of every word but the formats, for messages.
WORDS = (
    "compile",
    "compile=aot_eager",
    "channels_last",
    "checkpoint",
    *OPTIMIZER_FLAGS,
    "weights=bf16",
    *(f"updates={method}" for method in METHODS),
    "accumulate=2",
    "scale=dynamic",
    "scale=static:1024",
    "scale=off",
    "threads=1",
    "mkldnn=off",
    "cpu",
    "cuda",
)
DEVICE = re.compile(r"(cpu|cuda|xpu|mps|npu|hpu)(:\d+)?")
#: Where torch's GradScaler begins.
INITIAL_SCALE = 65536.0


@dataclass(frozen=True)
class BenchConfig:
    """One way to train a workload.

    Attributes:
        name: as the user calls it.
        format: fp32, bf16, fp16, tf32 or fp64; ``plan`` where ``plan`` names a file;
            ``by hand`` where ``step`` is given.
        plan: the plan file that autocast obeys.
        backend: of torch.compile, the empty string for the default one; None where
            nothing is compiled.
        changes: what is done to the copy of the workload, in order.
        settings: what is set in torch around each step; undone after it.
        optimizer: arguments to build the optimizer with once more.
        updates: how new low-precision weights are rounded (see ``round_updates_``);
            None where the optimizer writes them itself.
        accumulate: number of parts that a batch is cut into; gradients are added up.
        scale: the loss scale to begin with; None for none.
        static: the loss scale stays there.
        step: a training step of the user's own.
    """

    name: str
    format: str = "fp32"
    plan: str | None = None
    backend: str | None = None
    changes: tuple[Change, ...] = ()
    settings: tuple[Callable[[], None], ...] = ()
    optimizer: Mapping[str, bool] = field(default_factory=dict)
    updates: str | None = None
    accumulate: int = 1
    scale: float | None = None
    static: bool = False
    step: TrainingStep | None = None


def parse_configs(names: Iterable[str | TrainingStep]) -> list[BenchConfig]:
    """Parse names and functions; number those that come more than once.

    Raises ``WorkloadError`` for an unknown word, listing the nearest, and for an
    empty list.

    >>> configs = parse_configs(["fp32", "fp16+channels_last", "fp32"])
    >>> [(config.name, config.format, config.scale) for config in configs]
    [('fp32', 'fp32', None), ('fp16+channels_last', 'fp16', 65536.0), ('fp32 (2)', 'fp32', None)]
    """
    configs = [parse_config(name) for name in names]
    if not configs:
        raise WorkloadError(
            "there is nothing to train",
            where="configs",
            expected="fp32,bf16 or other configurations",
        )
    times: Counter[str] = Counter()
    for index, config in enumerate(configs):
        times[config.name] += 1
        if times[config.name] > 1:
            name = f"{config.name} ({times[config.name]})"
            configs[index] = replace(config, name=name)
    return configs


def parse_config(name: str | TrainingStep) -> BenchConfig:
    """Parse one configuration; see ``parse_configs``."""
    if not isinstance(name, str):
        title = str(getattr(name, "__name__", "step")).replace("_", " ")
        return BenchConfig(title, "by hand", step=name)
    parts = _Parts(name)
    is_one_file = _is_plan(name) and Path(name).exists()  # its name may hold a "+"
    for word in [name] if is_one_file else name.split("+"):
        parts.read(word.strip())
    return parts.config()


class _Parts:
    """What the words of one configuration add up to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.formats: list[str] = []
        self.changes: list[Change] = []
        self.settings: list[Callable[[], None]] = []
        self.fields: dict[str, Any] = {}
        self.optimizer: dict[str, bool] = {}

    def read(self, word: str) -> None:
        """Read one word. Raises ``WorkloadError`` where it is no part of a configuration."""
        key, _, value = word.partition("=")
        if _is_plan(word):
            self.formats.append(word)
        elif word in _CHANGES:
            self.changes.append(_CHANGES[word])
        elif word in OPTIMIZER_FLAGS:
            self.optimizer[word] = True
        elif DEVICE.fullmatch(word):
            self.changes.append(partial(_on, device=word))
        elif key not in _VALUES or not _VALUES[key](self, word, value):
            self.formats.append(_format(word, self.name))

    def config(self) -> BenchConfig:
        """Combine the parts with what the format implies."""
        if len(self.formats) > 1:
            raise WorkloadError(
                "two formats in one configuration",
                where=self.name,
                expected="one of them",
                got=", ".join(self.formats),
            )
        fmt = self.formats[0] if self.formats else "fp32"
        plan = fmt if _is_plan(fmt) else None
        self.settings.append(partial(_set_tf32, fmt == "tf32"))
        if fmt == "fp64":
            self.settings.append(partial(torch.set_default_dtype, torch.float64))
            self.changes.insert(0, double)
        if fmt == "fp16":
            self.fields.setdefault("scale", INITIAL_SCALE)
        return BenchConfig(
            self.name.strip(),
            "plan" if plan else fmt,
            plan,
            changes=tuple(self.changes),
            settings=tuple(self.settings),
            optimizer=self.optimizer,
            **self.fields,
        )

    def _read_compile(self, _: str, backend: str) -> bool:
        self.fields["backend"] = _known_backend(backend, self.name)
        return True

    def _read_weights(self, _: str, fmt: str) -> bool:
        if fmt in WEIGHT_DTYPES:
            self.changes.append(partial(_in_format, dtype=WEIGHT_DTYPES[fmt]))
        return fmt in WEIGHT_DTYPES

    def _read_updates(self, _: str, method: str) -> bool:
        if method in METHODS:
            self.fields["updates"] = method
        return method in METHODS

    def _read_accumulate(self, _: str, parts: str) -> bool:
        if not parts.isdigit() or not int(parts):
            return False
        self.fields["accumulate"] = int(parts)
        return True

    def _read_scale(self, _: str, value: str) -> bool:
        rule, _, start = value.partition(":")
        if rule not in SCALE_RULES or (start and not _is_positive(start)):
            return False
        scale = float(start or INITIAL_SCALE)
        self.fields["scale"] = None if rule == "off" else scale
        self.fields["static"] = rule == "static"
        return True

    def _read_setting(self, word: str, value: str) -> bool:
        key, mark, _ = word.partition("=")
        if mark:
            self.settings.append(setting_of(word, key, value))
        return bool(mark)


def _format(word: str, name: str) -> str:
    try:
        fmt = parse_format(word).name
    except FormatError:
        raise WorkloadError(
            f"{word!r} is no part of a configuration",
            where=name,
            expected="fp32, bf16, fp16, tf32, fp64 or a plan file (.toml, .json), joined by + with any of "
            + ", ".join(WORDS),
            do=did_you_mean(nearest(word, (*FORMATS, *WORDS))),
        ) from None
    if fmt not in FORMATS:
        raise WorkloadError(
            f"torch cannot train in {fmt} by itself",
            where=name,
            expected=", ".join(FORMATS),
            do="write a plan that simulates it, and give the plan's file as the configuration",
        )
    return fmt


def _known_backend(backend: str, name: str) -> str:
    if not backend:
        return backend
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        raise WorkloadError(
            "torch.compile has no such backend",
            where=name,
            expected=", ".join(backends),
            got=repr(backend),
            do=did_you_mean(nearest(backend, backends)),
        )
    return backend


def _is_plan(word: str) -> bool:
    return word.endswith((".toml", ".json"))


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def rebuilt(
    optimizer: torch.optim.Optimizer, flags: Mapping[str, bool]
) -> torch.optim.Optimizer:
    """Build an optimizer that has not stepped yet once more, with flags such as ``fused=True``.

    Raises ``WorkloadError`` for one that takes no such argument.
    """
    if not flags:
        return optimizer
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    missing = [flag for flag in flags if flag not in accepted]
    if missing:
        raise WorkloadError(
            f"{kind.__name__} has no {missing[0]}",
            where="optimizer",
            expected=f"one that takes {missing[0]}, such as Adam or SGD",
        )
    replaced = set(flags)
    if replaced & set(EXCLUSIVE):
        replaced |= set(EXCLUSIVE)
    kept = [key for key in accepted if key not in replaced]
    defaults = _chosen(optimizer.defaults, kept)
    groups = [_chosen(group, ["params", *kept]) for group in optimizer.param_groups]
    copy: torch.optim.Optimizer = kind(groups, **defaults, **flags)
    return copy


def _chosen(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: values[key] for key in keys if key in values}


def checkpointed(workload: Workload) -> Workload:
    """Run every block of the model again in the backward pass, in place of keeping its values.

    Blocks are the members of the outermost ``ModuleList`` and ``Sequential``
    containers, or the whole model without any. Running a block again updates running
    statistics of BatchNorm a second time.
    """
    for block in _blocks(workload.model) or [workload.model]:
        forward = partial(checkpoint, block.forward, use_reentrant=False)
        object.__setattr__(block, "forward", forward)
    return workload


def _blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [block for block in module if any(True for _ in block.parameters())]
    blocks: list[nn.Module] = []
    for child in module.children():
        blocks += _blocks(child)
    return blocks


def _in_format(workload: Workload, dtype: torch.dtype) -> Workload:
    workload.model.to(dtype)
    return with_batches(workload, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _on(workload: Workload, device: str) -> Workload:
    return moved(workload, find_device(device))


def _set_tf32(on: bool) -> None:
    """Allow TF32 in matrix products and convolutions, or not. Write only what differs."""
    precision = "high" if on else "highest"
    if torch.get_float32_matmul_precision() != precision:
        torch.set_float32_matmul_precision(precision)
    if torch.cuda.is_available() and torch.backends.cudnn.allow_tf32 != on:
        torch.backends.cudnn.allow_tf32 = on


#: Words that stand for themselves and change the workload.
_CHANGES: dict[str, Change] = {
    "channels_last": channels_last,
    "checkpoint": checkpointed,
}
#: Words with a value: each reader takes the word and its value, and says if it could.
_VALUES: dict[str, Callable[[_Parts, str, str], bool]] = {
    "compile": _Parts._read_compile,
    "weights": _Parts._read_weights,
    "updates": _Parts._read_updates,
    "accumulate": _Parts._read_accumulate,
    "scale": _Parts._read_scale,
    "threads": _Parts._read_setting,
    "mkldnn": _Parts._read_setting,
}
