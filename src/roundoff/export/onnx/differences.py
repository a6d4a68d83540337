"""Differences over an evaluation set: noise power, agreement, and steps of codes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundoff.budget import sqnr_db
from roundoff.formats import Format
from roundoff.plan import OutputPower


class Power:
    """Signal and noise power, summed in fp64."""

    def __init__(self) -> None:
        self.signal = 0.0
        self.noise = 0.0
        self.count = 0

    def add(self, value: Tensor, wanted: Tensor) -> None:
        """Add a pair of tensors of equal shape."""
        self.signal += float(wanted.double().square().sum())
        self.noise += float((value.double() - wanted.double()).square().sum())
        self.count += wanted.numel()

    @property
    def db(self) -> float:
        """SQNR in dB: infinite without noise, -inf for NaN, or noise without a signal."""
        if self.noise == 0:
            return math.inf
        if not self.signal or not math.isfinite(self.noise):
            return -math.inf
        return sqnr_db(self.noise / self.signal)


class Agreement:
    """Outputs of the file against those of the fp32 model and of the simulation."""

    def __init__(self) -> None:
        self.fp32 = OutputPower()
        self.simulation = OutputPower()
        self.same = 0
        self.rows = 0
        self.samples = 0

    def add(
        self,
        outputs: Mapping[str, Tensor],
        fp32: Mapping[str, Tensor],
        simulated: Mapping[str, Tensor],
    ) -> None:
        """Add the tensors of one batch's output; the names of ``fp32`` are judged."""
        self.fp32.add(outputs, fp32)
        self.simulation.add(outputs, {name: simulated[name] for name in fp32})
        for name, exact in fp32.items():
            output = outputs[name]
            if exact.ndim and exact.shape[-1] > 1:
                same = output.argmax(-1) == exact.argmax(-1)
                self.same += int(same.sum())
                self.rows += same.numel()
        first = next(iter(fp32.values()), None)
        if first is not None:
            self.samples += first.shape[0] if first.ndim else 1

    @property
    def share(self) -> float | None:
        """Share of rows with the same arg-max; None where no output has two columns."""
        return self.same / self.rows if self.rows else None


@dataclass(frozen=True, slots=True)
class Differing:
    """Codes that differ: by how much at most, which share, of how many."""

    most: int
    share: float
    count: int


class CodeSteps:
    """Differences of codes, summed up."""

    def __init__(self) -> None:
        self.most = 0
        self.differing = 0
        self.count = 0

    def add(self, steps: Tensor) -> None:
        """Add differences of some codes, at least 0."""
        if not steps.numel():
            return
        self.most = max(self.most, int(steps.max()))
        self.differing += int((steps > 0).sum())
        self.count += steps.numel()

    def total(self) -> Differing | None:
        """Return the sum; None where nothing was added."""
        if not self.count:
            return None
        return Differing(self.most, self.differing / self.count, self.count)


class ValueDifferences:
    """One value of the file against the simulation and full precision."""

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer
        self.fp32 = Power()
        self.simulation = Power()
        self.by_kernel = CodeSteps()
        self.carried = CodeSteps()

    def add(
        self, value: Tensor, simulated: Tensor, led: Tensor, exact: Tensor | None
    ) -> None:
        """Add the value in one batch.

        Args:
            value: of the file.
            simulated: of the simulation.
            led: of the simulation on the file's values before it.
            exact: of full precision; left out where it has another shape.
        """
        self.simulation.add(value, simulated)
        if exact is not None and exact.shape == value.shape:
            self.fp32.add(value, exact)
        if not self.quantizer.dynamic:
            self.by_kernel.add(code_steps(value, led, self.quantizer))
            self.carried.add(code_steps(value, simulated, self.quantizer))


def code_steps(value: Tensor, simulated: Tensor, quantizer: Any) -> Tensor:
    """Count the codes between two tensors on a quantizer's grid, of integers or floats."""
    qparams = quantizer.qparams()
    shape = value.shape
    if qparams.granularity is not None:
        shape = qparams.granularity.split(value.shape)[0]
    scale = qparams.scale.double()
    place = _place(value.double().reshape(shape) / scale, quantizer.fmt)
    wanted = _place(simulated.double().reshape(shape) / scale, quantizer.fmt)
    return (place - wanted).abs().round().to(torch.int64).flatten()


def _place(values: Tensor, fmt: Format) -> Tensor:
    """Return where values stand in the order of a format's values: neighbours differ by 1."""
    if fmt.one_quantum is not None:
        return values / fmt.one_quantum
    exponents = range(fmt.emin, fmt.emax + 1)
    # values = fraction * 2**exponent, fraction in [0.5, 1)
    binade = (torch.frexp(values.abs())[1] - 1).clamp(min=fmt.emin)
    index = (binade - fmt.emin).clamp(max=len(exponents) - 1)
    quanta = [2.0 ** fmt.quantum_exponent(e) for e in exponents]
    starts = [0.0]  # number of values below each binade
    for e, quantum in zip(exponents[:-1], quanta, strict=False):
        binades = 2 if e == fmt.emin else 1  # the lowest has the subnormals too
        starts.append(starts[-1] + 2.0**e / quantum * binades)
    step = torch.tensor(quanta, dtype=torch.float64)[index]
    lowest = [math.ldexp(1.0, e) for e in exponents]
    base = torch.tensor(lowest, dtype=torch.float64)[index]
    start = torch.tensor(starts, dtype=torch.float64)[index]
    inside = torch.where(index > 0, (values.abs() - base) / step, values.abs() / step)
    return (start + inside) * torch.sign(values)
