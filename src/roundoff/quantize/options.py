"""What the user chooses: how formats are put to work, and how scales and codes are found."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roundoff.errors import QuantizationError, did_you_mean, nearest
from roundoff.formats import (
    BlockFormat,
    Format,
    Granularity,
    PerAxis,
    PerGroup,
    PerTensor,
    PerToken,
    integer,
)
from roundoff.quantize.graph import Use
from roundoff.quantize.observers import OBSERVERS
from roundoff.site import matches

#: What may share a scale, beside ``group:SIZE``.
_GRANULARITIES = {
    "activation": ("tensor", "token", "channel"),
    "weight": ("format", "tensor", "channel"),
}
#: How codes of weights are chosen.
WEIGHTS = ("gptq", "nearest")
#: Ways to move range from values to the weights that read them.
BALANCES = ("smoothquant", "dmq", "awq")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How formats are put to work, beside the plan.

    Attributes:
        symmetric: integer activations without zero point. Asymmetric ones use the whole
            range of what a ReLU leaves.
        dynamic: scales of activations are chosen from each tensor when the model runs.
        activation: which activations share a scale: ``tensor``, ``channel`` (along the
            contracted axis), or ``token`` and ``group:SIZE`` (all of a token, or so many
            of its channels), which are dynamic.
        weight: which weights share a scale: ``format`` (as the format has it: per output
            channel for integers), ``tensor``, ``channel`` or ``group:SIZE`` along the
            contracted axis.
        elementwise: adds and pools between integer calls work on codes, results of
            integer convolutions are codes.
        bias: biases of integer calls are rounded to the scale of their sums, as integer
            kernels add them.
        kv_cache: the format of keys and values in attention, or empty: ``int8`` (a scale
            for each token and head, chosen when it comes), ``int4:channel`` (one for each
            channel of a head, calibrated), ``fp8_e4m3fn:tensor``.
        divide: channels of what linear layers read are divided by what the output loses,
            where nothing can take the factors: behind the GELUs of transformers, say
            (``channels.divide``). The artefact has one multiplication a value more.
        layers: pattern of sites -> the options whose ``symmetric`` and ``weight`` hold
            for what they read and write instead; the first that matches.
    """

    symmetric: bool = False
    dynamic: bool = False
    activation: str = "tensor"
    weight: str = "format"
    elementwise: bool = True
    bias: bool = True
    kv_cache: str = ""
    divide: bool = False
    layers: Mapping[str, Options] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, words in _GRANULARITIES.items():
            shared = getattr(self, name)
            if shared not in words and not re.fullmatch(r"group:[1-9]\d*", shared):
                raise QuantizationError(
                    "unknown granularity",
                    where=name,
                    expected=f"{', '.join(words)} or group:SIZE",
                    got=repr(shared),
                )

    def of(self, site: str) -> Options:
        """Return what holds for one call."""
        for pattern, options in self.layers.items():
            if matches(pattern, site):
                return options
        return self

    def value_format(self, fmt: Format) -> Format:
        """Return the format of values beside weights of a format.

        Integers are asymmetric unless asked otherwise.
        """
        values = fmt.of_activations
        asymmetric_weights = values is fmt and not values.symmetric
        if not is_integer(values) or asymmetric_weights:
            return values
        if values.symmetric == self.symmetric:
            return values
        return integer(values.width, symmetric=self.symmetric)

    def weight_granularity(self, use: Use, fmt: Format) -> Granularity | None:
        """Return what shares a scale in a weight; None for blocks."""
        if isinstance(fmt, BlockFormat):
            return None
        ndim = len(use.shape)
        shared = self.weight
        if shared == "format":
            shared = (fmt.execution and fmt.execution.weight) or "channel"
        if shared == "tensor" or ndim < 2:
            return PerTensor()
        if shared.startswith("group"):
            size = int(shared.partition(":")[2] or fmt.group_size)
            axis = use.operand.reduce % ndim
            # an axis that is shorter than a group is one group
            return PerGroup(min(size, max(use.shape[axis], 1)), axis)
        return PerAxis(use.operand.channel % ndim)

    def value_granularity(
        self, use: Use, fmt: Format, weighted: bool
    ) -> Granularity | None:
        """Return what shares a scale in a value; None for blocks.

        Groups are for what meets a weight (``weighted``). Where two values meet, the
        contracted axis may be that of the tokens, whose number changes: there, and where
        an axis is no longer than a group, a token has one scale.
        """
        if isinstance(fmt, BlockFormat):
            return None
        axis = use.operand.reduce
        if self.activation == "tensor":
            return PerTensor()
        if self.activation == "channel":
            return PerAxis(axis % len(use.shape))
        if self.activation == "token":
            return PerToken()
        size = int(self.activation.removeprefix("group:"))
        grouped = weighted and use.shape[axis] > size
        return PerGroup(size, axis) if grouped else PerToken()


def is_integer(fmt: Format) -> bool:
    """Return True where the codes of a format are integers that kernels multiply.

    That is int8, int4; not fp8, and not binary codes.
    """
    return fmt.one_quantum == 1.0 and fmt.has_zero and fmt.width > 1


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How calibration chooses scales and codes.

    Attributes:
        observer: of values (see ``observers.OBSERVERS``).
        weights: ``nearest``, or ``gptq``: rounding that makes up for its own errors and
            for those of the inputs.
        scales: of weights: ``search``, the scale with the least error, or an observer:
            ``minmax``, ``arq``.
        bias: correct biases so that the mean of each output channel is that of the
            full-precision network.
        parameters: of the observer.
        room: ranges of values of eight bits and more that ``adjoint`` chooses are made
            this many times as wide, since other samples have values beyond the extremes
            of the calibration data; 1 for none. Chosen on validation images, see
            benchmarks/range_room.py.
        balance: before all that, divide channels of values by factors and multiply the
            weights that read them: ``smoothquant``, ``dmq`` or ``awq`` (see
            ``channels.smooth``), in the place of ``spread``. Undone where the output does
            not gain.
        strength: of ``smoothquant`` and ``dmq``, their α.
        keep_zeros: weights that are exactly 0 stay 0, as those of a pruned model should;
            the others make up for that too.
        layers: pattern of sites -> what holds for them instead, whole; the first that
            matches decides.

    Raises ``QuantizationError`` for an unknown name, and for a ``room`` that is not a finite
    number of at least 1.
    """

    observer: str = "adjoint"
    weights: str = "gptq"
    scales: str = "search"
    bias: bool = True
    parameters: dict[str, Any] = field(default_factory=dict)
    room: float = 1.03
    balance: str = ""
    strength: float = 0.5
    keep_zeros: bool = False
    layers: Mapping[str, Rounding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("observer", self.observer, OBSERVERS)
        check_choice("weights", self.weights, WEIGHTS)
        check_choice("scales", self.scales, ("search", *OBSERVERS))
        if self.balance:
            check_choice("balance", self.balance, BALANCES)
        if not 1 <= self.room < math.inf:
            raise QuantizationError(
                f"room {self.room} is not a finite number of at least 1"
            )

    def of(self, *sites: str) -> Rounding:
        """Return what holds for the calls that share a value or a weight.

        The first of them that a pattern names decides.

        >>> rounding = Rounding(layers={"fc/*": Rounding(observer="mse")})
        >>> rounding.of("fc/linear").observer, rounding.of("0/conv2d").observer
        ('mse', 'adjoint')
        """
        for site in sites:
            for pattern, rounding in self.layers.items():
                if matches(pattern, site):
                    return rounding
        return self

    def keeping_zeros(self) -> Rounding:
        """Return the same with ``keep_zeros``, for single layers too.

        >>> rounding = Rounding(layers={"fc/*": Rounding(observer="mse")}).keeping_zeros()
        >>> [r.keep_zeros for r in rounding.every]
        [True, True]
        """
        layers = {pattern: r.keeping_zeros() for pattern, r in self.layers.items()}
        return replace(self, keep_zeros=True, layers=layers)

    @property
    def compares(self) -> bool:
        """True where the full-precision network is needed beside the quantized one."""
        return any(r.weights == "gptq" or r.bias for r in self.every)

    @property
    def every(self) -> tuple[Rounding, ...]:
        """Itself and those of single layers."""
        return (self, *self.layers.values())


def check_choice(where: str, choice: str, choices: Collection[str]) -> None:
    """Raise ``QuantizationError`` with the nearest name for an unknown choice."""
    if choice not in choices:
        raise QuantizationError(
            f"unknown {where.lstrip('-')}",
            where=where,
            expected=", ".join(choices),
            got=choice,
            do=did_you_mean(nearest(choice, choices, at_most=1)),
        )
