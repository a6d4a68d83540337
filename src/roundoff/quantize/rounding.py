"""Rounding: how calibration chooses scales and codes, for all layers or for some."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roundoff.errors import QuantizationError, did_you_mean, nearest
from roundoff.quantize.observers import OBSERVERS
from roundoff.site import matches

#: How codes of weights are chosen.
WEIGHTS = ("gptq", "nearest")
#: Ways to move range from values to the weights that read them.
BALANCES = ("smoothquant", "dmq", "awq")


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How one pass chooses.

    Attributes:
        observer: of values (see ``observers.OBSERVERS``).
        weights: ``nearest``, or ``gptq``: rounding that makes up for its own errors and for those of the inputs.
        scales: of weights: ``search``, the scale with the least error, or an observer: ``minmax``, ``arq``.
        bias: correct biases so that the mean of each output channel is that of the full-precision network.
        parameters: of the observer.
        balance: before all that, divide channels of values by factors and multiply the weights that read them:
            ``smoothquant``, ``dmq`` or ``awq`` (see ``repair.smoothing``), in the place of ``spread``. Undone where the
            output does not gain.
        strength: of ``smoothquant`` and ``dmq``, their α.
        keep_zeros: weights that are exactly 0 stay 0, as those of a pruned model should; the others make up for that too.
        layers: pattern of sites -> what holds for them instead, whole; the first that matches decides.

    Raises ``QuantizationError`` for a name that there is not.
    """

    observer: str = "adjoint"
    weights: str = "gptq"
    scales: str = "search"
    bias: bool = True
    parameters: dict[str, Any] = field(default_factory=dict)
    balance: str = ""
    strength: float = 0.5
    keep_zeros: bool = False
    layers: Mapping[str, Rounding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        among("observer", self.observer, OBSERVERS)
        among("weights", self.weights, WEIGHTS)
        among("scales", self.scales, ("search", *OBSERVERS))
        if self.balance:
            among("balance", self.balance, BALANCES)

    def of(self, *sites: str) -> Rounding:
        """What holds for the calls that share a value or a weight: for the first of them that a pattern names.

        >>> how = Rounding(layers={"fc/*": Rounding(observer="mse")})
        >>> how.of("fc/linear").observer, how.of("0/conv2d").observer
        ('mse', 'adjoint')
        """
        return next(
            (
                own
                for site in sites
                for pattern, own in self.layers.items()
                if matches(pattern, site)
            ),
            self,
        )

    def keeping_zeros(self) -> Rounding:
        """The same with ``keep_zeros``, for single layers too.

        >>> how = Rounding(layers={"fc/*": Rounding(observer="mse")}).keeping_zeros()
        >>> [own.keep_zeros for own in how.every]
        [True, True]
        """
        layers = {pattern: own.keeping_zeros() for pattern, own in self.layers.items()}
        return replace(self, keep_zeros=True, layers=layers)

    @property
    def compares(self) -> bool:
        """Whether the full-precision network is needed beside the quantized one."""
        return any(how.weights == "gptq" or how.bias for how in self.every)

    @property
    def every(self) -> tuple[Rounding, ...]:
        """Itself and those of single layers."""
        return (self, *self.layers.values())


def among(where: str, name: str, known: Collection[str]) -> None:
    """Raise ``QuantizationError`` with the nearest name for one that is not ``known``."""
    if name not in known:
        raise QuantizationError(
            f"unknown {where.lstrip('-')}",
            where=where,
            expected=", ".join(known),
            got=name,
            do=did_you_mean(nearest(name, known, at_most=1)),
        )
