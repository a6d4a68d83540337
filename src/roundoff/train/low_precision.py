"""Weights in bfloat16 or float16 without fp32 copies: rounding that keeps the small updates, and a measure of those lost.

A weight rounds to nearest, so an update below half the distance to its neighbour is lost, every time. Stochastic rounding
keeps it on average (Gupta et al., Deep Learning with Limited Numerical Precision, ICML 2015, section 3); Kahan summation
keeps what rounding took in a second number of the same format (Zamirai et al., Revisiting BFloat16 Training, 2020,
arXiv 2010.06192, algorithm 1 and section 4).
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from roundoff.errors import OptimizerError, warn
from roundoff.formats import Rounding, round_tensor
from roundoff.train.fp32_parameters import (
    FORMATS,
    LOST,
    Wide,
    on_the_weights,
    stand_ins,
)
from roundoff.train.scaling.delayed_read import DelayedRead

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
    """Let ``optimizer`` step its bfloat16 and float16 parameters in fp32, and round the new weights by ``method``.

    In each ``step`` fp32 copies stand for these parameters and their gradients, and the optimizer's state is fp32 from then
    on; afterwards they hold the new values, in the same storage. Other parameters are not touched. It costs 8 bytes a weight
    while the step runs, and 2 more between steps for Kahan.

    * ``"stochastic"``: to one of the two neighbours, at random, so that the mean is the fp32 value. Behind the largest
      finite value Inf counts as the next neighbour. The draws of a step follow from ``seed`` and the number of the
      step, which is kept in ``param_groups`` under ``rounded_steps``: a checkpoint goes on with the same ones, the program's
      own generators are not touched, and the replicas of a distributed training draw alike. A ``generator``, on the
      parameters' device, replaces this.
    * ``"kahan"``: to the nearest, and what that lost is taken into the next step. It lies in ``optimizer.state`` under
      ``compensation``, so it is in checkpoints. In float16 it cannot be smaller than 2**-24.
    * ``"nearest"``: to the nearest, as the optimizer alone would do, but with its state in fp32.

    NaN and Inf pass. An exception in ``step`` leaves the weights as before it. ``state_dict`` holds the fp32 state, and
    ``load_state_dict`` keeps it; a plain checkpoint can be loaded too. A closure runs on the low-precision weights.

    Raises ``OptimizerError`` for an unknown method, for parameters none of which is in low precision, for an optimizer that
    is handled already, and, in ``step``, for sparse gradients and sharded parameters, before anything is changed.

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
    return Updates(optimizer, method, generator, seed, threshold, patience)


def watch_updates(
    optimizer: Optimizer, *, threshold: float = 0.5, patience: int = 10
) -> Updates:
    """Only measure how many weights a step leaves as they were, and warn; the numbers do not change.

    As nobody knows the update that was lost, weights with a nonzero gradient count. For parameters in any format.
    """
    return Updates(optimizer, None, None, 0, threshold, patience)


class Updates:
    """What ``round_updates_`` and ``watch_updates`` return: the measure of lost updates, and the way back.

    After each step ``unchanged`` is the share of weights that it did not change although their update was not zero, a 0-d
    float32 tensor (0 where nothing had to change); ``by_group`` has it for each parameter group. Nobody waits for the
    device. Where it stays above ``threshold`` for ``patience`` steps in a row, a warning says so, once for each group
    (not for stochastic and Kahan, with which it is meant). ``remove`` undoes everything.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        method: str | None,
        generator: torch.Generator | None,
        seed: int,
        threshold: float,
        patience: int,
    ) -> None:
        if getattr(optimizer, "_roundoff_updates", None) is not None:
            raise OptimizerError(
                "this optimizer's updates are handled already",
                where=type(optimizer).__name__,
                do="handle.remove() first",
            )
        kinds = {p.dtype for group in optimizer.param_groups for p in group["params"]}
        if method is not None and not kinds & set(FORMATS):
            raise OptimizerError(
                "no parameter is in low precision",
                where=type(optimizer).__name__,
                expected="bfloat16 or float16",
                got=", ".join(sorted(map(str, kinds))),
            )
        self.method, self.generator, self.seed = method, generator, seed
        self.threshold, self.patience = threshold, patience
        self.unchanged = torch.zeros(())
        self.by_group: list[Tensor] = []
        self._optimizer = weakref.ref(optimizer)
        self._shares: Tensor | None = None
        self._bad: Tensor | None = (
            None  # how many steps in a row each group was above the threshold
        )
        self._late = DelayedRead()
        self._told: set[int] = set()
        self._seeded: dict[torch.device, torch.Generator] = {}
        self._loading: dict[str, Any] | None = None
        self._install(optimizer)

    def remove(self) -> None:
        """The optimizer is as before: its state goes back to the format of the weights, what Kahan kept is dropped."""
        optimizer: Any = self._optimizer()
        if (
            optimizer is None
            or getattr(optimizer, "_roundoff_updates", None) is not self
        ):
            return
        del optimizer._roundoff_updates
        for handle in self._handles:
            handle.remove()
        if (
            optimizer.__dict__.get("step") is self._ours
        ):  # else another wrapper holds ours, which passes through now
            if self._theirs is None:
                del optimizer.step
            else:
                optimizer.step = self._theirs
        for group in optimizer.param_groups:
            group.pop(COUNT, None)
        if self.method is not None:
            for parameter, state in _states(optimizer):
                state.pop(LOST, None)
                _convert(state, parameter.dtype)

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _install(self, optimizer: Any) -> None:
        self._theirs = optimizer.__dict__.get("step")
        before = optimizer.step

        def step(itself: Any, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            if getattr(itself, "_roundoff_updates", None) is not self:
                return (
                    before(closure, *args, **kwargs)
                    if closure is not None
                    else before(*args, **kwargs)
                )
            return self._step(itself, before, closure, args, kwargs)

        # a bound method, since schedulers look behind it
        self._ours = optimizer.step = types.MethodType(
            functools.wraps(before)(step), optimizer
        )
        optimizer._roundoff_updates = self
        self._handles = []
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
        before: Callable[..., Any],
        closure: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        words = args if closure is None else (closure, *args)
        if self.method is None:
            old = [
                _Kept(g, p, p.detach().clone()) for g, p in _with_gradient(optimizer)
            ]
            result = before(*words, **kwargs)
            with torch.no_grad():
                self._measure(
                    optimizer,
                    [
                        (k.group, _nonzero(k.parameter), k.parameter == k.old)
                        for k in old
                    ],
                )
        else:
            with stand_ins(optimizer, every=closure is not None) as wide:
                if closure is not None:
                    words = (
                        functools.partial(on_the_weights, optimizer, wide, closure),
                        *args,
                    )
                result = before(*words, **kwargs)
                with torch.no_grad():
                    pairs = list(zip(wide, self._rounded(optimizer, wide), strict=True))
                    self._measure(
                        optimizer,
                        [
                            (w.group, w.wide != w.start(), w.before() == value)
                            for w, value in pairs
                        ],
                    )
                    for w, value in pairs:
                        w.write(value, keep_lost=self.method == "kahan")
        self._watch(optimizer)
        return result

    def _rounded(self, optimizer: Any, wide: list[Wide]) -> list[Tensor]:
        """The new values in the format of the weights."""
        if self.method != "stochastic":
            return [w.wide.to(w.parameter.dtype) for w in wide]
        count = optimizer.param_groups[0].get(COUNT, 0)
        for group in optimizer.param_groups:
            group[COUNT] = count + 1
        for generator in self._seeded.values():
            generator.manual_seed(self._number(count))
        return [
            round_tensor(
                w.wide,
                FORMATS[w.parameter.dtype],
                rounding=Rounding.STOCHASTIC,
                saturate=False,
                generator=self.generator or self._generator(w.wide.device, count),
            ).to(w.parameter.dtype)
            for w in wide
        ]

    def _generator(self, device: torch.device, count: int) -> torch.Generator:
        if device not in self._seeded:
            self._seeded[device] = torch.Generator(device).manual_seed(
                self._number(count)
            )
        return self._seeded[device]

    def _number(self, count: int) -> int:
        """A seed for each step; torch's generator on the CPU takes 32 bits of it."""
        return (self.seed * 0x9E3779B9 + count) % 2**32

    def _measure(self, optimizer: Any, found: list[tuple[int, Tensor, Tensor]]) -> None:
        """``found``: group, which weights had to change, which are as they were."""
        groups = len(optimizer.param_groups)
        if not found:
            return
        sums: list[list[Tensor]] = [[] for _ in range(groups)]
        for group, had_to, same in found:
            sums[group].append(torch.stack([(had_to & same).sum(), had_to.sum()]))
        device = found[0][1].device
        added = torch.stack(
            [
                torch.stack([s.to(device, non_blocking=True) for s in here]).sum(0)
                if here
                else torch.zeros(2, device=device)
                for here in sums
            ]
        )
        shares = added[:, 0] / added[:, 1].clamp(min=1)
        self.by_group = list(shares.unbind())
        total = added.sum(0)
        self.unchanged = total[0] / total[1].clamp(min=1)
        self._shares = shares

    def _watch(self, optimizer: Any) -> None:
        if self._shares is None or self.method in ("stochastic", "kahan"):
            return
        shares, self._shares = self._shares, None
        if self._bad is None or len(self._bad) != len(shares):
            self._bad = torch.zeros(
                len(shares), dtype=torch.int32, device=shares.device
            )
        self._bad = torch.where(shares > self.threshold, self._bad + 1, 0)
        longest = self._bad.max()
        if longest.device.type == "cuda":
            self._late.send(longest)
            if self._late.value() < self.patience:
                return
        for group, (steps, share) in enumerate(
            zip(self._bad.tolist(), shares.tolist(), strict=True)
        ):
            if steps >= self.patience and group not in self._told:
                self._told.add(group)
                warn(
                    _vanishing(
                        optimizer.param_groups[group], group, share, self.patience
                    )
                )

    def _before_load(self, _: Any, state: dict[str, Any]) -> None:
        self._loading = state

    def _after_load(self, optimizer: Any) -> None:
        """Torch has cast the state to the format of the weights: take it as it was saved."""
        state, self._loading = self._loading, None
        if state is None:
            return
        pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
        places = {
            key: p
            for saved, group in pairs
            for key, p in zip(saved["params"], group["params"], strict=True)
        }
        for key, parameter in places.items():
            if parameter.dtype in FORMATS:
                for name, value in state["state"].get(key, {}).items():
                    if _is_state(name, value):
                        optimizer.state[parameter][name] = value.to(
                            parameter.device, torch.float32, copy=True
                        )


def _vanishing(group: dict[str, Any], number: int, share: float, steps: int) -> str:
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in group["params"]})
    return (
        f"roundoff: {share:.1%} of the weights that should have changed did not, in the last of {steps} such steps: "
        f"parameter group {number}, {' and '.join(dtypes)}, lr {float(group['lr']):g}. Updates below half the distance "
        "between neighbouring values are lost. Round them stochastically or by Kahan's summation "
        "(roundoff.train.low_precision.round_updates_), or keep the weights in float32 and compute under autocast"
    )


def _states(optimizer: Any) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Of the parameters in low precision."""
    return (
        (p, state)
        for p, state in optimizer.state.items()
        if isinstance(p, Tensor) and p.dtype in FORMATS
    )


def _convert(state: dict[str, Any], dtype: torch.dtype) -> None:
    for name, value in state.items():
        if _is_state(name, value):
            state[name] = value.to(dtype)


def _is_state(name: str, value: Any) -> bool:
    """Not a count of steps, nor what Kahan keeps."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and bool(value.dim())
        and name != LOST
    )


class _Kept(NamedTuple):
    group: int
    parameter: Tensor
    old: Tensor


def _with_gradient(optimizer: Any) -> Iterator[tuple[int, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                yield number, parameter


def _nonzero(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    return (
        torch.zeros_like(parameter, dtype=torch.bool)
        if gradient is None
        else gradient != 0
    )
