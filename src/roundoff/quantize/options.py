"""Options: how formats are put to work, and what they say of one operand."""

from __future__ import annotations

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


@dataclass(frozen=True, kw_only=True)
class Options:
    """How formats are put to work, beside the plan.

    Attributes:
        symmetric: integer activations without zero point. Asymmetric ones use the whole range of what a ReLU leaves.
        dynamic: scales of activations are chosen from each tensor when the model runs.
        activation: which activations share a scale: ``tensor``, ``channel`` (along the contracted axis), or ``token`` and
            ``group:SIZE`` (all of a token, or so many of its channels), which are dynamic.
        weight: which weights share a scale: ``format`` (as the format has it: per output channel for integers), ``tensor``,
            ``channel`` or ``group:SIZE`` along the contracted axis.
        elementwise: adds and pools between integer calls work on codes, results of integer convolutions are codes.
        bias: biases of integer calls are rounded to the scale of their sums, as integer kernels add them.
        kv_cache: the format of keys and values in attention, or empty: ``int8`` (a scale for each token and head, chosen
            when it comes), ``int4:channel`` (one for each channel of a head, calibrated), ``fp8_e4m3fn:tensor``.
        divide: channels of what linear layers read are divided by what the output loses, where nothing can take the factors:
            behind the GELUs of transformers, say (``repair.divide``). The artefact has one multiplication a value more.
        layers: pattern of sites -> the options whose ``symmetric`` and ``weight`` hold for what they read and write
            instead; the first that matches.
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
        for name, words in (
            ("activation", ("tensor", "token", "channel")),
            ("weight", ("format", "tensor", "channel")),
        ):
            given = getattr(self, name)
            if given not in words and not re.fullmatch(r"group:[1-9]\d*", given):
                raise QuantizationError(
                    "unknown granularity",
                    where=name,
                    expected=f"{', '.join(words)} or group:SIZE",
                    got=repr(given),
                )

    def of(self, site: str) -> Options:
        """What holds for one call."""
        return next(
            (own for pattern, own in self.layers.items() if matches(pattern, site)),
            self,
        )

    def value_format(self, fmt: Format) -> Format:
        """The format of values beside weights of a format: integers are asymmetric unless asked otherwise."""
        own = fmt.of_activations
        if (
            is_integer(own)
            and (own is not fmt or own.symmetric)
            and own.symmetric != self.symmetric
        ):
            return integer(own.width, symmetric=self.symmetric)
        return own

    def weight_granularity(self, use: Use, fmt: Format) -> Granularity | None:
        """What shares a scale in a weight; None for blocks."""
        if isinstance(fmt, BlockFormat):
            return None
        ndim, asked = len(use.shape), self.weight
        if asked == "format":
            asked = (fmt.execution and fmt.execution.weight) or "channel"
        if asked == "tensor" or ndim < 2:
            return PerTensor()
        if asked.startswith("group"):
            return _groups(
                int(asked.partition(":")[2] or fmt.group_size),
                use,
                use.operand.reduce % ndim,
            )
        return PerAxis(use.operand.channel % ndim)

    def value_granularity(
        self, use: Use, fmt: Format, weighted: bool
    ) -> Granularity | None:
        """What shares a scale in a value; None for blocks.

        Groups are for what meets a weight. Where two values meet, the contracted axis may be that of the tokens, whose
        number changes: there, and where an axis is no longer than a group, a token has one scale.
        """
        asked = self.activation
        if isinstance(fmt, BlockFormat):
            return None
        if asked == "token":
            return PerToken()
        if asked == "channel":
            return PerAxis(use.operand.reduce % len(use.shape))
        if (
            asked.startswith("group:")
            and weighted
            and use.shape[use.operand.reduce] > int(asked[6:])
        ):
            return PerGroup(int(asked[6:]), use.operand.reduce)
        return PerToken() if asked.startswith("group:") else PerTensor()


def _groups(size: int, use: Use, axis: int) -> PerGroup:
    """Groups along an axis; one that is shorter than a group is one group."""
    return PerGroup(min(size, max(use.shape[axis], 1)), axis)


def is_integer(fmt: Format) -> bool:
    """Whether the codes of a format are integers that kernels multiply: int8, int4; not fp8, and not binary codes."""
    return fmt.one_quantum == 1.0 and fmt.has_zero and fmt.width > 1


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
