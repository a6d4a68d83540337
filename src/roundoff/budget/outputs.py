"""Named outputs in a budget: each has probes of its own, in a block of rows of the projections.

A sign vector that is zero on all outputs but one measures what reaches that one. With K
probes a sample and M outputs, rows ``o K`` to ``(o + 1) K`` of the projections belong
to output ``o``; they cost M times the backward passes of one output. The tensors of an
output that has several count alike: their sign vectors are divided by their rms on the
first batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from roundoff.budget.facts import MeasuredOutput
from roundoff.budget.noise_power import Term, power
from roundoff.workload import output_names

#: Most probes of a sample, over all outputs, where there are several.
MOST_ROWS = 32

_ONLY_LATER = "not in the first batch"
_NO_GRADIENT = "no gradient reaches it, so nothing is predicted of it"
_ZERO = "zero everywhere, so no ratio to it exists"


@dataclass
class OutputRows:
    """Which rows of the projections look at which output, and the power of each.

    Attributes:
        names: of the outputs.
        output_of: number of the output that each tensor belongs to, by the tensor's name.
        weight: what the sign vectors of each tensor are multiplied by.
        signal: power of each output in each sample, one array ``(samples,)`` a batch.
        reached: numbers of the outputs that a gradient leaves from.
        not_measured: what is no target, with the reason.
    """

    names: list[str]
    output_of: dict[str, int]
    weight: dict[str, float]
    signal: list[list[np.ndarray]] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)
    not_measured: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, targets: Mapping[str, Tensor], apart: Iterable[str]) -> OutputRows:
        """Return the rows for the target tensors of the first batch."""
        name_of = output_names(targets, apart)
        names = list(dict.fromkeys(name_of.values()))
        labels = list(name_of.values())
        weight = {
            tensor: 1.0 if labels.count(name) == 1 else _inverse_norm(targets[tensor])
            for tensor, name in name_of.items()
        }
        output_of = {tensor: names.index(name) for tensor, name in name_of.items()}
        return cls(names, output_of, weight)

    def chosen(self, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the target tensors of a batch that belong to an output."""
        for name in targets:
            if name not in self.output_of:
                self.not_measured[name] = _ONLY_LATER
        return {name: t for name, t in targets.items() if name in self.output_of}

    def spread(self, tensor: str, vectors: Tensor) -> Tensor:
        """Return sign vectors ``(K, *shape)`` of a tensor as ``(M K, *shape)``.

        Zero but in the rows of its output.
        """
        output = self.output_of[tensor]
        self.reached.add(output)
        if len(self.names) == 1 and self.weight[tensor] == 1.0:
            return vectors
        rows = vectors.new_zeros((len(self.names), *vectors.shape))
        rows[output] = vectors * self.weight[tensor]
        return rows.flatten(0, 1)

    def add_signal(self, powers: Mapping[str, Tensor]) -> None:
        """Add one batch: the power of each tensor in each sample, shape ``(samples,)``."""
        samples = max(map(len, powers.values()), default=1)
        signal = [np.zeros(samples) for _ in self.names]
        for tensor, values in powers.items():
            signal[self.output_of[tensor]] += values.numpy() * self.weight[tensor] ** 2
        self.signal.append(signal)

    @property
    def measured(self) -> list[int]:
        """Numbers of the outputs that errors can be related to."""
        return [
            number
            for number in range(len(self.names))
            if number in self.reached and self.total(number) > 0
        ]

    def total(self, output: int) -> float:
        """Return the power of an output over all batches."""
        return float(sum(float(batch[output].sum()) for batch in self.signal))

    def facts(self) -> tuple[MeasuredOutput, ...]:
        """Return the measured outputs as a budget keeps them."""
        return tuple(
            MeasuredOutput(
                self.names[number],
                tuple(t for t, output in self.output_of.items() if output == number),
                self.total(number),
                tuple(
                    float(batch[number].sum()) / self.total(number)
                    for batch in self.signal
                ),
            )
            for number in self.measured
        )

    def reasons(self) -> dict[str, str]:
        """Return why the others are not measured, by name."""
        reasons = dict(self.not_measured)
        for number, name in enumerate(self.names):
            if number not in self.reached:
                reasons[name] = _NO_GRADIENT
            elif self.total(number) <= 0:
                reasons[name] = _ZERO
        return reasons

    def sample_signal(self) -> list[float]:
        """Return the share of the signal in each sample, the outputs counting alike."""
        measured = self.measured
        shares = [
            sum(batch[number] / self.total(number) for number in measured)
            for batch in self.signal
        ]
        return [float(share) / len(measured) for share in np.concatenate(shares)]

    def relative(self, values: np.ndarray, probes: int) -> np.ndarray:
        """Return projections ``(M probes, n)`` in units of each output's amplitude.

        The rows of outputs that are not measured are left out.
        """
        if len(self.names) == 1:
            relative: np.ndarray = values / np.sqrt(self.total(0))
            return relative
        blocks = values.reshape(len(self.names), probes, -1)
        rows = [
            blocks[number] / np.sqrt(self.total(number)) for number in self.measured
        ]
        return np.concatenate(rows)


def _inverse_norm(tensor: Tensor) -> float:
    norm = float(tensor.detach().double().norm())
    return 1.0 / norm if norm > 0 else 0.0


def each_output(terms: Sequence[Term], outputs: int) -> list[list[Term]]:
    """Return the terms as each output sees them: its rows of the projections."""
    if outputs == 1:
        return [list(terms)]
    return [
        [_rows_of(term, number, outputs) for term in terms] for number in range(outputs)
    ]


def _rows_of(term: Term, number: int, outputs: int) -> Term:
    probes = len(term.values) // outputs
    return replace(term, values=term.values[number * probes : (number + 1) * probes])


def worst_power(terms: Sequence[Term], outputs: int) -> tuple[float, float]:
    """Return noise power and standard error at the output that has most noise."""
    return max(power(seen) for seen in each_output(terms, outputs))


def powers(terms: Sequence[Term], outputs: int) -> tuple[float, ...]:
    """Return the noise power at each output."""
    return tuple(power(seen)[0] for seen in each_output(terms, outputs))
