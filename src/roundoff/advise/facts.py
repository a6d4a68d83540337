"""What the advice is decided by: counts, times, and what was seen of model and step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from roundoff.advise.layer_calls import LayerCall, layer_calls
from roundoff.advise.normalized_layers import NormalizedLayer, normalized_layers
from roundoff.advise.operator_count import Counts, count
from roundoff.advise.operator_time import Profile, profile_step
from roundoff.advise.roofline import Roofline, measure_roofline
from roundoff.advise.setup import Runner, Setup, make_optimizer
from roundoff.advise.written_attention import has_written_attention
from roundoff.plan import device_of

#: The name of the kernel that hands a value to Python.
ITEM = "_local_scalar_dense"


@dataclass(frozen=True, slots=True)
class StepHabits:
    """What one training step did that costs time.

    Attributes:
        zeroes_gradients: ``zero_grad`` was called with ``set_to_none=False``.
        detects_anomalies: anomaly mode was on in the forward pass.
    """

    zeroes_gradients: bool
    detects_anomalies: bool


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """Options of the optimizer: whether each group has it, and whether all set it."""

    name: str
    can_fuse: bool
    is_fused: bool
    can_foreach: bool
    is_foreach: bool


@dataclass(frozen=True)
class Facts:
    """All that conditions read.

    Attributes:
        setup: as the user runs it.
        device: of the model.
        counts: of one step.
        profile: of a few steps.
        roofline: of this machine.
        normalized: layers in front of batch normalizations.
        attention: paths of the modules that write attention out.
        subnormal_share: of parameters and results, the largest of a tensor.
        habits: of the training step; None without training.
        optimizer: None without training.
        layers: calls of convolutions and linear layers.
        cores: of this machine that the process may use.
    """

    setup: Setup
    device: torch.device
    counts: Counts
    profile: Profile
    roofline: Roofline
    normalized: tuple[NormalizedLayer, ...]
    attention: tuple[str, ...]
    subnormal_share: float
    habits: StepHabits | None
    optimizer: OptimizerFacts | None
    layers: tuple[LayerCall, ...]
    cores: int


def gather_facts(setup: Setup, trace: str | Path | None = None) -> Facts:
    """Count and time a workload, and look at its model, optimizer and step.

    Everything runs on copies of the model. ``trace`` is a file for the profile; raises
    ``OutputError`` when it cannot be written.
    """
    device = device_of(setup.model)
    counts = _counts(setup)
    return Facts(
        setup=setup,
        device=device,
        counts=counts,
        profile=_profile(setup, counts, trace),
        roofline=measure_roofline(device),
        normalized=normalized_layers_of(setup),
        attention=written_attention_of(setup.copied().model),
        subnormal_share=subnormal_share(setup),
        habits=habits_of(setup) if setup.train else None,
        optimizer=optimizer_facts(setup) if setup.train else None,
        layers=layer_calls_of(setup),
        cores=_cores(),
    )


def _counts(setup: Setup) -> Counts:
    runner = Runner(setup.copied())
    if setup.train:
        runner.step()  # the first step makes the optimizer's states
    return count(runner.step, runner.setup.model)


def _profile(setup: Setup, counts: Counts, trace: str | Path | None) -> Profile:
    runner = Runner(setup.copied())
    return profile_step(runner.step, runner.setup.model, counts, trace=trace)


def _cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def normalized_layers_of(setup: Setup) -> tuple[NormalizedLayer, ...]:
    """Return the layers in front of batch normalizations, in a copy of the model."""
    copied = setup.copied()
    copied.model.eval()
    batch = copied.workload.batches[0]
    return normalized_layers(copied.model, lambda: copied.workload.run(batch))


def layer_calls_of(setup: Setup) -> tuple[LayerCall, ...]:
    """Return the calls of layers in a forward pass of a copy of the model."""
    copied = setup.copied()
    copied.model.eval()
    batch = copied.workload.batches[0]
    return layer_calls(copied.model, lambda: copied.workload.run(batch))


def written_attention_of(model: nn.Module) -> tuple[str, ...]:
    """Return the innermost modules that write attention out, by their paths."""
    paths: list[str] = []
    modules = list(model.named_modules())
    for path, module in reversed(modules):  # children before their parents
        is_torchs = type(module).__module__.startswith("torch.")
        has_inner = any(inner.startswith(f"{path}.") for inner in paths)
        if path and not is_torchs and not has_inner and has_written_attention(module):
            paths.append(path)
    return tuple(reversed(paths))


def subnormal_share(setup: Setup) -> float:
    """Return the largest share of subnormal numbers in a parameter or in the result of
    a module, on the first batch."""
    copied = setup.copied()
    shares = [_share_of(p) for p in copied.model.parameters()]

    def look(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, Tensor):
            shares.append(_share_of(output))

    for module in copied.model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it takes no hooks
        module.register_forward_hook(look)
    with torch.no_grad():
        copied.workload.run(copied.workload.batches[0])
    return max(shares, default=0.0)


def _share_of(tensor: Tensor) -> float:
    if tensor.dtype not in (torch.float32, torch.float64) or not tensor.numel():
        return 0.0
    size = tensor.detach().abs()
    is_subnormal = (size > 0) & (size < torch.finfo(tensor.dtype).smallest_normal)
    return float(is_subnormal.float().mean())


def habits_of(setup: Setup) -> StepHabits:
    """Run one step of a copy, and see what it does."""
    runner = Runner(setup.copied())
    zeroed: list[bool] = []
    anomalies: list[bool] = []

    def look(*_: object) -> None:
        anomalies.append(torch.is_anomaly_enabled())

    runner.setup.model.register_forward_pre_hook(look)
    with _zeroing_into(zeroed):
        runner.step()
    return StepHabits(any(zeroed), any(anomalies))


@contextmanager
def _zeroing_into(zeroed: list[bool]) -> Iterator[None]:
    """Note for each call of ``zero_grad`` whether it fills the gradients with zeros."""
    of_optimizer = torch.optim.Optimizer.zero_grad
    of_module = nn.Module.zero_grad

    def optimizer_call(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        zeroed.append(not set_to_none)
        of_optimizer(self, set_to_none)

    def module_call(self: nn.Module, set_to_none: bool = True) -> None:
        zeroed.append(not set_to_none)
        of_module(self, set_to_none)

    torch.optim.Optimizer.zero_grad = optimizer_call  # type: ignore[method-assign]
    nn.Module.zero_grad = module_call  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.Optimizer.zero_grad = of_optimizer  # type: ignore[method-assign]
        nn.Module.zero_grad = of_module  # type: ignore[method-assign]


def optimizer_facts(setup: Setup) -> OptimizerFacts:
    """Return the options of the workload's optimizer."""
    optimizer = make_optimizer(setup.copied())
    groups = optimizer.param_groups
    return OptimizerFacts(
        name=type(optimizer).__name__,
        can_fuse=all("fused" in group for group in groups),
        is_fused=all(group.get("fused") for group in groups),
        can_foreach=all("foreach" in group for group in groups),
        is_foreach=all(group.get("foreach") for group in groups),
    )
