"""Weights in bfloat16 or float16 without fp32 copies: rounding that keeps the small
updates, and a measure of those lost.

A weight rounds to nearest, so an update below half the distance to its neighbour is
lost, every time. Stochastic rounding keeps it on average (Gupta et al., Deep Learning
with Limited Numerical Precision, ICML 2015, section 3); Kahan summation keeps what
rounding took in a second number of the same format (Zamirai et al., Revisiting BFloat16
Training, 2020, arXiv 2010.06192, algorithm 1 and section 4).
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from roundoff.errors import OptimizerError, warn
from roundoff.formats import RoundingMode, round_tensor
from roundoff.train.fp32_parameters import (
    COMPENSATION,
    FORMATS,
    StandIn,
    fp32_parameters,
    run_on_weights,
)
from roundoff.train.scaling.delayed_read import DelayedRead, moved

METHODS = ("stochastic", "kahan", "nearest")
#: The key of the count of rounded steps in ``optimizer.param_groups``.
COUNT = "rounded_steps"


def round_updates_(
    optimizer: Optimizer,
    method: str = "stochastic",
    *,
    generator: torch.Generator | None = None,
    seed: int = 0,
    threshold: float = 0.5,
    patience: int = 10,
) -> Updates:
    """Let ``optimizer`` step its bfloat16 and float16 parameters in fp32, and round the
    new weights by ``method``.

    In each ``step`` fp32 copies stand for these parameters and their gradients, and the
    optimizer's state is fp32 from then on; afterwards they hold the new values, in the
    same storage. Other parameters are not touched. It costs 8 bytes a weight while the
    step runs, and 2 more between steps for Kahan.

    * ``"stochastic"``: to one of the two neighbours, at random, so that the mean is the
      fp32 value. Behind the largest finite value Inf counts as the next neighbour. The
      draws of a step follow from ``seed`` and the number of the step, which is kept in
      ``param_groups`` under ``rounded_steps``: a checkpoint goes on with the same ones,
      the program's own generators are not touched, and the replicas of a distributed
      training draw alike. A ``generator``, on the parameters' device, replaces this.
    * ``"kahan"``: to the nearest, and what that lost is taken into the next step. It
      lies in ``optimizer.state`` under ``compensation``, so it is in checkpoints. In
      float16 it cannot be smaller than 2**-24.
    * ``"nearest"``: to the nearest, as the optimizer alone would do, but with its state in
      fp32.

    NaN and Inf pass. An exception in ``step`` leaves the weights as before it.
    ``state_dict`` holds the fp32 state, and ``load_state_dict`` keeps it; a plain
    checkpoint can be loaded too. A closure runs on the low-precision weights.

    Raises ``OptimizerError`` for an unknown method, for parameters none of which is in low
    precision, for an optimizer that is handled already, and, in ``step``, for sparse
    gradients and sharded parameters, before anything is changed.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([weight], lr=2**-12)
        >>> handle = round_updates_(optimizer)
        >>> for _ in range(64):
        ...     weight.grad = torch.ones_like(weight)
        ...     optimizer.step()
        >>> round(weight.float().mean().item(), 2)  # 1 - 64 / 4096; to nearest it stays 1
        0.98
        >>> handle.remove()
    """
    if method not in METHODS:
        raise OptimizerError(
            "unknown method",
            where=f"round_updates_(method={method!r})",
            expected=", ".join(METHODS),
        )
    return Updates(
        optimizer,
        method,
        generator=generator,
        seed=seed,
        threshold=threshold,
        patience=patience,
    )


def watch_updates(
    optimizer: Optimizer, *, threshold: float = 0.5, patience: int = 10
) -> Updates:
    """Only measure how many weights a step leaves as they were, and warn; the numbers
    do not change.

    As nobody knows the update that was lost, weights with a nonzero gradient count. For
    parameters in any format.
    """
    return Updates(optimizer, None, threshold=threshold, patience=patience)


@dataclass(frozen=True)
class _Step:
    """What a step did to one parameter: which weights had to change, and which are as they were."""

    group: int
    had_to: Tensor
    same: Tensor

    def counts(self) -> Tensor:
        """Return how many weights stayed though they had to change, and how many had
        to: shape (2,).
        """
        return torch.stack([(self.had_to & self.same).sum(), self.had_to.sum()])


class Updates:
    """What ``round_updates_`` and ``watch_updates`` return: the measure of lost
    updates, and the way back.

    After each step ``unchanged`` is the share of weights that it did not change
    although their update was not zero, a 0-d float32 tensor (0 where nothing had to
    change); ``by_group`` has it for each parameter group. Nobody waits for the device.
    Where it stays above ``threshold`` for ``patience`` steps in a row, a warning says
    so, once for each group (not for stochastic and Kahan, with which it is meant).
    ``remove`` undoes everything.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        method: str | None,
        *,
        generator: torch.Generator | None = None,
        seed: int = 0,
        threshold: float,
        patience: int,
    ) -> None:
        _check(optimizer, method)
        self.method = method
        self.generator = generator
        self.seed = seed
        self.threshold = threshold
        self.patience = patience
        self.unchanged = torch.zeros(())
        self.by_group: list[Tensor] = []
        self._optimizer = weakref.ref(optimizer)
        self._bad: Tensor | None = None  # steps in a row of each group
        self._longest = DelayedRead()
        self._warned: set[int] = set()
        self._generators: dict[torch.device, torch.Generator] = {}
        self._loading: dict[str, Any] | None = None
        self._handles: list[Any] = []
        self._install(optimizer)

    def remove(self) -> None:
        """Give back the plain optimizer.

        Its state goes back to the format of the weights, what Kahan kept is dropped.
        """
        optimizer: Any = self._optimizer()
        if getattr(optimizer, "_roundoff_updates", None) is not self:
            return
        del optimizer._roundoff_updates
        for handle in self._handles:
            handle.remove()
        # else another wrapper holds ours, which passes through now
        if optimizer.__dict__.get("step") is self._step_method:
            if self._replaced is None:
                del optimizer.step
            else:
                optimizer.step = self._replaced
        for group in optimizer.param_groups:
            group.pop(COUNT, None)
        if self.method is not None:
            for parameter, state in _states(optimizer):
                state.pop(COMPENSATION, None)
                _convert(state, parameter.dtype)

    def _install(self, optimizer: Any) -> None:
        self._replaced = optimizer.__dict__.get("step")
        original = optimizer.step

        def step(itself: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            words = args if closure is None else (closure, *args)
            if getattr(itself, "_roundoff_updates", None) is not self:
                return original(*words, **kwargs)
            return self._step(itself, original, closure, args, kwargs)

        # a bound method, since schedulers look behind it
        wrapped = functools.wraps(original)(step)
        self._step_method = optimizer.step = types.MethodType(wrapped, optimizer)
        optimizer._roundoff_updates = self
        if self.method is None:
            return
        for _, state in _states(optimizer):
            _convert(state, torch.float32)
        self._handles = [
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _step(
        self,
        optimizer: Any,
        original: Callable[..., Any],
        closure: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        if self.method is None:
            words = args if closure is None else (closure, *args)
            result, steps = _observed_step(optimizer, original, words, kwargs)
        else:
            result, steps = self._rounded_step(
                optimizer, original, closure, args, kwargs
            )
        if steps:
            shares = self._measure(len(optimizer.param_groups), steps)
            if self.method not in ("stochastic", "kahan"):
                self._warn(optimizer, shares)
        return result

    def _rounded_step(
        self,
        optimizer: Any,
        original: Callable[..., Any],
        closure: Any,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, list[_Step]]:
        """Step on fp32 stand-ins, and write their rounded values into the weights."""
        with fp32_parameters(optimizer, every=closure is not None) as stand_ins:
            words = args
            if closure is not None:
                on_weights = functools.partial(
                    run_on_weights, optimizer, stand_ins, closure
                )
                words = (on_weights, *args)
            result = original(*words, **kwargs)
            with torch.no_grad():
                values = self._rounded(optimizer, stand_ins)
                pairs = list(zip(stand_ins, values, strict=True))
                steps = [
                    _Step(s.group, s.wide != s.start(), s.before() == value)
                    for s, value in pairs
                ]
                for stand_in, value in pairs:
                    stand_in.write(value, keep_lost=self.method == "kahan")
        return result, steps

    def _rounded(self, optimizer: Any, stand_ins: list[StandIn]) -> list[Tensor]:
        """Return the new values in the format of the weights."""
        if self.method != "stochastic":
            return [s.wide.to(s.parameter.dtype) for s in stand_ins]
        step = optimizer.param_groups[0].get(COUNT, 0)
        for group in optimizer.param_groups:
            group[COUNT] = step + 1
        for generator in self._generators.values():
            generator.manual_seed(self._seed_of(step))
        return [self._rounded_at_random(s, step) for s in stand_ins]

    def _rounded_at_random(self, stand_in: StandIn, step: int) -> Tensor:
        dtype = stand_in.parameter.dtype
        generator = self.generator or self._generator(stand_in.wide.device, step)
        rounded = round_tensor(
            stand_in.wide,
            FORMATS[dtype],
            rounding=RoundingMode.STOCHASTIC,
            saturate=False,
            generator=generator,
        )
        return rounded.to(dtype)

    def _generator(self, device: torch.device, step: int) -> torch.Generator:
        if device not in self._generators:
            generator = torch.Generator(device).manual_seed(self._seed_of(step))
            self._generators[device] = generator
        return self._generators[device]

    def _seed_of(self, step: int) -> int:
        """Return a seed for each step; torch's generator on the CPU takes 32 bits of it."""
        return (self.seed * 0x9E3779B9 + step) % 2**32

    def _measure(self, groups: int, steps: list[_Step]) -> Tensor:
        """Set ``unchanged`` and ``by_group``; return the latter as one tensor."""
        device = steps[0].had_to.device
        by_group: list[list[Tensor]] = [[] for _ in range(groups)]
        with torch.no_grad():
            for step in steps:
                counts = moved(step.counts(), device)
                by_group[step.group].append(counts)
            none = torch.zeros(2, dtype=torch.int64, device=device)
            sums = [torch.stack([none, *counts]).sum(0) for counts in by_group]
            totals = torch.stack(sums)
            shares = totals[:, 0] / totals[:, 1].clamp(min=1)
            unchanged, had_to = totals.sum(0)
            self.unchanged = unchanged / had_to.clamp(min=1)
        self.by_group = list(shares.unbind())
        return shares

    def _warn(self, optimizer: Any, shares: Tensor) -> None:
        """Warn of groups that have been above the threshold for long; on CUDA as soon
        as the host knows.
        """
        if self._bad is None or len(self._bad) != len(shares):
            self._bad = torch.zeros(
                len(shares), dtype=torch.int32, device=shares.device
            )
        self._bad = torch.where(shares > self.threshold, self._bad + 1, 0)
        longest = self._bad.max()
        if longest.device.type == "cuda":
            self._longest.send(longest)
            if self._longest.value() < self.patience:
                return
        rows = zip(self._bad.tolist(), shares.tolist(), strict=True)
        for number, (steps, share) in enumerate(rows):
            if steps >= self.patience and number not in self._warned:
                self._warned.add(number)
                group = optimizer.param_groups[number]
                warn(_vanishing(group, number, share, self.patience))

    def _before_load(self, _: Any, state: dict[str, Any]) -> None:
        self._loading = state

    def _after_load(self, optimizer: Any) -> None:
        """Take the state as it was saved: torch has cast it to the format of the weights."""
        state = self._loading
        self._loading = None
        if state is None:
            return
        groups = zip(state["param_groups"], optimizer.param_groups, strict=True)
        for saved, group in groups:
            for key, parameter in zip(saved["params"], group["params"], strict=True):
                if parameter.dtype in FORMATS:
                    _restore(optimizer, parameter, state["state"].get(key, {}))


def _check(optimizer: Optimizer, method: str | None) -> None:
    name = type(optimizer).__name__
    if getattr(optimizer, "_roundoff_updates", None) is not None:
        raise OptimizerError(
            "this optimizer's updates are handled already",
            where=name,
            do="handle.remove() first",
        )
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    if method is not None and not dtypes & set(FORMATS):
        raise OptimizerError(
            "no parameter is in low precision",
            where=name,
            expected="bfloat16 or float16",
            got=", ".join(sorted(map(str, dtypes))),
        )


def _observed_step(
    optimizer: Any, original: Callable[..., Any], words: Any, kwargs: Any
) -> tuple[Any, list[_Step]]:
    """Step as the optimizer does, and compare the weights with those of before."""
    before = [(g, p, p.detach().clone()) for g, p in _with_gradient(optimizer)]
    result = original(*words, **kwargs)
    with torch.no_grad():
        steps = [
            _Step(group, _has_gradient(parameter), parameter == old)
            for group, parameter, old in before
        ]
    return result, steps


def _restore(optimizer: Any, parameter: Tensor, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if _is_state(name, value):
            wide = value.to(parameter.device, torch.float32, copy=True)
            optimizer.state[parameter][name] = wide


def _vanishing(group: dict[str, Any], number: int, share: float, steps: int) -> str:
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in group["params"]})
    return (
        f"roundoff: {share:.1%} of the weights that should have changed did not, in the last of {steps} such steps: "
        f"parameter group {number}, {' and '.join(dtypes)}, lr {float(group['lr']):g}. Updates below half the distance "
        "between neighbouring values are lost. Round them stochastically or by Kahan's summation "
        "(roundoff.train.round_updates_), or keep the weights in float32 and compute under autocast"
    )


def _states(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield the parameters in low precision with their state."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, Tensor) and parameter.dtype in FORMATS:
            yield parameter, state


def _convert(state: dict[str, Any], dtype: torch.dtype) -> None:
    for name, value in state.items():
        if _is_state(name, value):
            state[name] = value.to(dtype)


def _is_state(name: str, value: Any) -> bool:
    """Return False for a count of steps, and for what Kahan keeps."""
    if not isinstance(value, Tensor) or name == COMPENSATION:
        return False
    return value.is_floating_point() and bool(value.dim())


def _with_gradient(optimizer: Any) -> Iterator[tuple[int, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                yield number, parameter


def _has_gradient(parameter: Tensor) -> Tensor:
    """Return which weights have a nonzero gradient."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=torch.bool)
    return parameter.grad != 0
