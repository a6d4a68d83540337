"""How far whole batches differ where the samples of a batch share a scale.

A format with one scale for a whole activation chooses it anew for each batch. Values
that repeat (a background, a padding) then all round the same way, in every sample of the
batch and otherwise in the next; and one large value makes the errors of all samples
larger. The samples of the measured batches do not show it, and two batches may be alike
by chance. So all batches run with every site rounded together, and as they are, which
costs little beside one that is measured. Both runs are real, so what is left out of
first order is no difference between batches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roundoff.budget.decisions import CallPlace
from roundoff.budget.noise_power import Array
from roundoff.budget.outputs import OutputRows
from roundoff.budget.precision import SiteProjections
from roundoff.budget.prepared import kept
from roundoff.budget.scan import Scan
from roundoff.budget.trials import Recording, call_at
from roundoff.errors import WorkloadError
from roundoff.formats import Format
from roundoff.ops import (
    Call,
    RoundedOperands,
    execute,
    float_tensors,
    function_body,
    rounds_operand,
    runs,
    watch,
)
from roundoff.plan import Plain, check_finite, detached, named_targets, powers
from roundoff.preserve import same_draws
from roundoff.workload import Workload


@dataclass(frozen=True, slots=True)
class BatchNoise:
    """Noise and signal of every batch with all sites in one format, by real runs.

    Both have the shape ``(batches, outputs)``. ``outputs``, of the model as it is, are
    of batches that call what the first one does, and show nothing new.
    """

    noise: Array
    signal: Array
    outputs: Mapping[int, Any] = field(default_factory=dict)

    def error(self, measured: Sequence[int]) -> float:
        """Return what the noise of these batches is off by as that of all, as a share of it.

        That is the larger of two, at the output with most. What it is off by in these
        runs: of the measured batches' own luck. And its standard error, were they drawn
        once more: other sites and formats have luck of their own.
        """
        errors = (
            _ratio_error(*column, measured)
            for column in zip(self.noise.T, self.signal.T, strict=True)
        )
        return max(errors, default=0.0)


def _ratio_error(noise: Array, signal: Array, measured: Sequence[int]) -> float:
    """Return the larger of the error, and the standard error, of a ratio of two sums.

    ``sum y / sum x`` over n of N batches has the relative variance ``(1 - n/N) / n`` times
    that of ``y - R x``, over the mean of y squared (Cochran, Sampling Techniques, 1977,
    theorem 2.5). Batches without finite noise are left out; where those measured have
    no noise, nothing is said.
    """
    is_sound = np.isfinite(noise) & np.isfinite(signal)
    chosen = [index for index in measured if is_sound[index]]
    of_chosen = noise[chosen].sum()
    if not of_chosen or not signal[chosen].sum():
        return 0.0
    y = noise[is_sound]
    x = signal[is_sound]
    ratio = y.sum() / x.sum()
    off = abs(ratio * signal[chosen].sum() / of_chosen - 1)
    left = 1 - len(chosen) / len(y)
    spread = (y - ratio * x).std(ddof=1) / y.mean() if left else 0.0
    return float(max(off, math.sqrt(left / len(chosen)) * spread))


@dataclass(frozen=True, slots=True)
class RealRuns:
    """What runs, with all sites rounded and as it is.

    Attributes:
        workload: model and batches; the model is ``prepared``.
        first: the first batch, which was followed; no batch where that is not possible.
        around: format of each site that is rounded in the reference too.
        rows: the outputs.
        scan: makes what looks for surprises in a batch that runs as it is; those that
            were measured have none.
        measured: numbers of the measured batches.
    """

    workload: Workload
    first: Recording
    around: Mapping[str, Format]
    rows: OutputRows
    scan: Callable[[], Scan]
    measured: Collection[int]

    def noise(self, fmt: Format) -> BatchNoise:
        """Run every batch with all sites in ``fmt``; NaN where the model refuses that."""
        batches = len(self.workload.batches)
        powers = np.full((batches, len(self.rows.names), 2), math.nan)
        together = _Together(self.workload, self.around)
        calls = self._calls()
        outputs = {}
        # compiled code runs uncompiled
        with torch.no_grad(), watch(nn.Module(), Plain()):
            for index in range(batches):
                if calls is None:
                    exact = self._named(index, None, together)
                elif index in self.measured:
                    _, exact = self._ran(index, nullcontext())
                else:
                    scan = self.scan()
                    output, exact = self._scanned(index, calls, scan)
                    if calls.is_as_first and not scan.surprise:
                        outputs[index] = output
                with suppress(WorkloadError):
                    rounded = self._rounded(index, fmt, together, calls)
                    powers[index] = self._of_outputs(rounded, exact)
        return BatchNoise(powers[..., 0], powers[..., 1], outputs)

    def _calls(self) -> _NumberedCalls | None:
        """Return what finds calls by their numbers; None where they must have names."""
        is_site = self.first.target is not None and "/" in self.first.target
        if is_site or self.around or not (self.first.batches and self.first.is_pure):
            return None
        return _NumberedCalls(self.first.batches[0].places.values())

    def _scanned(
        self, index: int, calls: _NumberedCalls, scan: Scan
    ) -> tuple[Any, dict[str, Tensor]]:
        """Run a batch as it is; return the output, and the target tensors in it."""

        def looked_at(place: CallPlace, args: Any, kwargs: Any) -> Any:
            result = place.call.func(*args, **kwargs)
            scan.see(str(place.call.site), float_tensors(result))
            return result

        calls.begin(looked_at)
        output, targets = self._ran(index, calls)
        if calls.is_as_first:
            check_finite(self.workload, index, self.rows.chosen(targets))
        return detached(output), targets

    def _rounded(
        self,
        index: int,
        fmt: Format,
        together: _Together,
        calls: _NumberedCalls | None,
    ) -> dict[str, Tensor]:
        """Return the target tensors of a batch with all sites rounded."""

        def rounded(place: CallPlace, args: Any, kwargs: Any) -> Any:
            if runs(place.call, fmt) is not None:
                return place.call.func(*args, **kwargs)
            return together.run(call_at(place, args, kwargs))

        if calls is not None:
            together.begin(fmt)
            calls.begin(rounded)
            with suppress(WorkloadError):
                _, targets = self._ran(index, calls)
                if calls.is_as_first:
                    return targets
        return self._named(index, fmt, together)

    def _named(
        self, index: int, fmt: Format | None, together: _Together
    ) -> dict[str, Tensor]:
        """Return the target tensors of a batch whose calls are named."""
        is_site = self.first.target is not None and "/" in self.first.target
        together.wanted = self.first.target if is_site else None
        together.begin(fmt)
        model = self.workload.model
        with kept(model, self.first.is_pure), same_draws(), watch(model, together) as m:
            m.begin()
            _, targets = self._ran(index, m, together)
            return targets

    def _ran(
        self,
        index: int,
        mode: AbstractContextManager[Any],
        handler: Plain | None = None,
    ) -> tuple[Any, dict[str, Tensor]]:
        batch = self.workload.batches[index]
        with mode:
            output = self.workload.run(batch)
            seen = None if handler is None else handler.site_output
            target = self.first.target
            return output, named_targets(self.workload, batch, output, target, seen)

    def _of_outputs(
        self, rounded: Mapping[str, Tensor], exact: Mapping[str, Tensor]
    ) -> Array:
        """Return noise and signal of each output; compared is what is of one shape."""
        summed = np.zeros((len(self.rows.names), 2))
        for name, output in self.rows.output_of.items():
            is_there = name in rounded and name in exact
            if is_there and rounded[name].shape == exact[name].shape:
                weight = self.rows.weight[name] ** 2
                both = np.array(powers(rounded[name], exact[name]))
                summed[output] += weight * both
        return summed


class _Together(Plain):
    """Runs every site in a format, but those that have one of their own."""

    def __init__(self, workload: Workload, own: Mapping[str, Format]) -> None:
        super().__init__()
        self.own = own
        self.fmt: Format | None = None
        self.rounder = RoundedOperands()
        self.parameters = {p.data_ptr() for p in workload.model.parameters()}

    def begin(self, fmt: Format | None) -> None:
        """Start a forward pass; None for no format but those of single sites."""
        self.fmt = fmt
        self.site_output = None
        self.rounder.keep_only(self.parameters)

    def run(self, call: Call) -> Any:
        """The call's result."""
        fmt = self.own.get(str(call.site), self.fmt) if self.own else self.fmt
        if fmt is None or runs(call, fmt) is not None:
            return call.run()
        if call.operator.inplace or fmt is not self.fmt or call.kind == "embedding":
            return execute(call, fmt)
        # a format with scales rounds no output, and a weight once for all batches
        leaves = list(call.leaves)
        for operand in call.operands:
            if rounds_operand(fmt, operand):
                leaves[operand.leaf] = self.rounder(leaves[operand.leaf], operand, fmt)
        return call.run(leaves)


#: Runs the call at a place with these arguments.
_Run = Callable[[CallPlace, Any, Any], Any]


def _plainly(place: CallPlace, args: Any, kwargs: Any) -> Any:
    return place.call.func(*args, **kwargs)


class _NumberedCalls(TorchFunctionMode):
    """Runs the sites in some way, found by the numbers of their calls.

    Nothing is named and no other call is asked about, which is most of what that costs.
    """

    def __init__(self, places: Iterable[CallPlace]) -> None:
        super().__init__()
        self.places = {place.number: place for place in places}
        self.run: _Run = _plainly
        self.met = 0
        self.calls: list[Callable[..., Any]] = []
        self.first_calls: list[Callable[..., Any]] = []

    def begin(self, run: _Run) -> None:
        """Start a forward pass; that of the batch which was followed is the first."""
        self.first_calls = self.first_calls or self.calls
        self.run = run
        self.calls = []
        self.met = 0

    @property
    def is_as_first(self) -> bool:
        """True if the forward pass called what the first one did."""
        is_all = self.met == len(self.places)
        return is_all and self.calls == (self.first_calls or self.calls)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.calls.append(func)
        place = self.places.get(len(self.calls))
        is_met = place is not None and place.call.func is func
        if place is not None and is_met and kwargs.get("out") is None:
            self.met += 1
            return self.run(place, args, kwargs)
        body = function_body(func)
        if body is None:
            return func(*args, **kwargs)
        with self:
            return body(*args, **kwargs)


def finest_sharing(
    batches: Sequence[SiteProjections], formats: Sequence[Format]
) -> Format | None:
    """Return the format with shared scales that has least noise; None without any.

    Values that repeat do so for all such formats. Where one of them is finer, less of
    its noise is that of other values, which would hide it.
    """
    noise: dict[str, float] = defaultdict(float)
    for sites in batches:
        for (_, name), values in sites.items():
            noise[name] += float(np.square(values).mean(axis=0).sum())
    sharing = [
        fmt
        for fmt in formats
        if fmt.shares_scale and 0 < noise.get(fmt.name, 0.0) < math.inf
    ]
    return min(sharing, key=lambda fmt: noise[fmt.name], default=None)
