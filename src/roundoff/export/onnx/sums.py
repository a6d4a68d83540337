"""Sums over an evaluation set: noise powers, agreement, and differences in codes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundoff.budget import sqnr_db
from roundoff.formats import Format

__all__ = ["Agreement", "Differing", "Power", "Tally", "code_steps"]


class Power:
    """Signal and noise power, summed in fp64."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0
        self.count = 0

    def add(self, found: Tensor, wanted: Tensor) -> None:
        """One more pair of tensors of equal shape."""
        self.signal += float(wanted.double().square().sum())
        self.noise += float((found.double() - wanted.double()).square().sum())
        self.count += wanted.numel()

    @property
    def db(self) -> float:
        """SQNR in dB: infinite without noise, -inf where there is noise and no signal, or a NaN."""
        if self.noise == 0:
            return math.inf
        return (
            sqnr_db(self.noise / self.signal)
            if self.signal and math.isfinite(self.noise)
            else -math.inf
        )


class Agreement:
    """Outputs of the file against those of the fp32 model and of the simulation."""

    def __init__(self) -> None:
        self.fp32, self.simulation = Power(), Power()
        self.same = self.rows = self.samples = 0

    def add(
        self,
        found: dict[str, Tensor],
        wanted: dict[str, Tensor],
        simulated: dict[str, Tensor],
    ) -> None:
        """The tensors of one batch's output."""
        for index, (name, exact) in enumerate(wanted.items()):
            self.fp32.add(found[name], exact)
            self.simulation.add(found[name], simulated[name])
            if exact.ndim and exact.shape[-1] > 1:
                same = found[name].argmax(-1) == exact.argmax(-1)
                self.same, self.rows = (
                    self.same + int(same.sum()),
                    self.rows + same.numel(),
                )
            if index == 0:
                self.samples += exact.shape[0] if exact.ndim else 1

    @property
    def share(self) -> float | None:
        """Share of rows with the same arg-max; None where no output has two columns."""
        return self.same / self.rows if self.rows else None


@dataclass(frozen=True)
class Differing:
    """Codes that differ: by how much at most, which share, of how many."""

    most: int
    share: float
    count: int


class Steps:
    """Differences of codes, summed up."""

    def __init__(self) -> None:
        self.most = self.differing = self.count = 0

    def add(self, steps: Tensor) -> None:
        """Differences of some codes, at least 0."""
        self.most = max(self.most, int(steps.max()) if steps.numel() else 0)
        self.differing += int((steps > 0).sum())
        self.count += steps.numel()

    def seen(self) -> Differing | None:
        """None where nothing was added."""
        return (
            Differing(self.most, self.differing / self.count, self.count)
            if self.count
            else None
        )


class Tally:
    """One value of the file against the simulation and full precision."""

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer
        self.fp32, self.simulation = Power(), Power()
        self.own, self.carried = Steps(), Steps()

    def add(
        self, found: Tensor, simulated: Tensor, led: Tensor, exact: Tensor | None
    ) -> None:
        """The value in one batch: of the file, of the simulation, of the simulation on the file's values, exact."""
        self.simulation.add(found, simulated)
        if exact is not None and exact.shape == found.shape:
            self.fp32.add(found, exact)
        if not self.quantizer.dynamic:
            self.own.add(code_steps(found, led, self.quantizer))
            self.carried.add(code_steps(found, simulated, self.quantizer))


def code_steps(found: Tensor, simulated: Tensor, quantizer: Any) -> Tensor:
    """How many codes lie between two tensors on a quantizer's grid, of integers or of a float format."""
    qparams, fmt = quantizer.qparams(), quantizer.fmt
    shape = (
        found.shape
        if qparams.granularity is None
        else qparams.granularity.split(found.shape)[0]
    )
    scale = qparams.scale.double()
    places = [
        _place(t.double().reshape(shape) / scale, fmt) for t in (found, simulated)
    ]
    return (places[0] - places[1]).abs().round().to(torch.int64).flatten()


def _place(values: Tensor, fmt: Format) -> Tensor:
    """Where values stand in the order of a format's values: neighbours differ by 1."""
    if fmt.one_quantum is not None:
        return values / fmt.one_quantum
    exponent = torch.frexp(values.abs())[
        1
    ]  # values = fraction * 2**exponent, fraction in [0.5, 1)
    binade = (exponent - 1).clamp(min=fmt.emin)
    bits = [fmt.quantum_exponent(e) for e in range(fmt.emin, fmt.emax + 1)]
    starts = [0.0]
    for e, quantum in zip(range(fmt.emin, fmt.emax), bits, strict=False):
        starts.append(starts[-1] + 2.0 ** (e - quantum) * (2 if e == fmt.emin else 1))
    index = (binade - fmt.emin).clamp(max=len(bits) - 1)
    step = torch.tensor([2.0**b for b in bits], dtype=torch.float64)[index]
    base = torch.tensor(
        [math.ldexp(1.0, e) for e in range(fmt.emin, fmt.emax + 1)], dtype=torch.float64
    )[index]
    start = torch.tensor(starts, dtype=torch.float64)[index]
    inside = torch.where(index > 0, (values.abs() - base) / step, values.abs() / step)
    return (start + inside) * torch.sign(values)
