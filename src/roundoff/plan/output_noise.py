"""How far each named output of a model is from that of a reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from roundoff.ops import numbers_of
from roundoff.workload import output_names


@dataclass(frozen=True, slots=True)
class OutputNoise:
    """The noise of one named output, relative to its own power.

    Attributes:
        output: name; a glob for an output of several tensors.
        noise: ``sum |z' - z|^2 / sum |z|^2`` over all batches, of several tensors their
            mean; the SQNR is ``-10 log10(noise)`` dB. Infinite for NaN or Inf, None for
            an output that is zero everywhere, to which no ratio exists.
        worst: the tensor with the most noise.
        worst_noise: its noise.
    """

    output: str
    noise: float | None
    worst: str
    worst_noise: float | None


@dataclass
class OutputPower:
    """Signal and noise of each tensor of an output, summed in float64 over batches."""

    signal: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)

    def add(
        self, candidate: Mapping[str, Tensor], reference: Mapping[str, Tensor]
    ) -> None:
        """Add one batch; the names of ``reference`` are those that count.

        Compared are tensors of one shape (the data may decide how many rows there are),
        where the reference is finite (masked logits are -inf).
        """
        for name, exact in reference.items():
            error = signal = 0.0
            if name in candidate and candidate[name].shape == exact.shape:
                error, signal = powers(candidate[name], exact)
            self.error[name] = self.error.get(name, 0.0) + error
            self.signal[name] = self.signal.get(name, 0.0) + signal

    def outputs(self, apart: Iterable[str] = ()) -> tuple[OutputNoise, ...]:
        """Return the noise of each output; ``apart`` as in ``output_names``."""
        members: dict[str, list[str]] = {}
        for tensor, output in output_names(self.signal, apart).items():
            members.setdefault(output, []).append(tensor)
        return tuple(self._output(name, tensors) for name, tensors in members.items())

    def _output(self, output: str, tensors: Sequence[str]) -> OutputNoise:
        noise_of = {name: self._noise(name) for name in tensors if self.signal[name]}
        if not noise_of:
            return OutputNoise(output, None, tensors[0], None)
        worst = max(noise_of, key=lambda name: noise_of[name])
        mean = math.fsum(noise_of.values()) / len(noise_of)
        return OutputNoise(output, mean, worst, noise_of[worst])

    def _noise(self, name: str) -> float:
        error = self.error[name]
        return error / self.signal[name] if math.isfinite(error) else math.inf


def powers(candidate: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the powers of the difference and of ``exact`` in float64, where that is finite."""
    wanted = exact.double()
    values = candidate.double()
    error, signal = _squares(values, wanted)
    if not math.isfinite(signal):
        finite = wanted.isfinite()
        error, signal = _squares(values[finite], wanted[finite])
    return error, signal


def _squares(values: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Sum the squares of the difference and of ``wanted``, in one copy to the host."""
    error, signal = numbers_of(
        [(values - wanted).square().sum(), wanted.square().sum()]
    )
    return error, signal


def output_noises(
    candidate: Sequence[Mapping[str, Tensor]],
    reference: Sequence[Mapping[str, Tensor]],
    apart: Iterable[str] = (),
) -> tuple[OutputNoise, ...]:
    """Return the noise of each named output, in the order of the reference.

    Args:
        candidate: tensors of each batch by name.
        reference: likewise; its names are those that count.
        apart: patterns of outputs that are judged apart (see ``output_names``).
    """
    power = OutputPower()
    for tensors, exact in zip(candidate, reference, strict=True):
        power.add(tensors, exact)
    return power.outputs(apart)


def worst_noise(
    candidate: Sequence[Mapping[str, Tensor]], reference: Sequence[Mapping[str, Tensor]]
) -> float:
    """Return the noise of the output that has most.

    Infinite for NaN or Inf in the candidate, and where every output is zero or none is
    there.
    """
    noises = [row.noise for row in output_noises(candidate, reference)]
    return max((noise for noise in noises if noise is not None), default=math.inf)
