"""Observers: streaming statistics of a tensor, and the scale and zero point they lead to.

>>> import torch
>>> from roundoff.formats import PerTensor, parse_format
>>> observer = make_observer("mse", PerTensor())
>>> observer.see(torch.tensor([0.0, 0.25, 0.5, 1.0]))
>>> observer.qparams(parse_format("int4_asym")).zero_point
tensor([-8.])
"""

from __future__ import annotations

import inspect
from typing import Any

from roundoff.errors import QuantizationError, did_you_mean, nearest
from roundoff.formats import Granularity
from roundoff.quantize.observers.ascend import Hfmg, Ifmr
from roundoff.quantize.observers.entropy import Entropy
from roundoff.quantize.observers.isotone import Isotone
from roundoff.quantize.observers.minmax import Arq, MinMax, MovingAverage
from roundoff.quantize.observers.observer import Observer as Observer
from roundoff.quantize.observers.observer import RangeObserver as RangeObserver
from roundoff.quantize.observers.ranges import Adjoint, Mse, Percentile

__all__ = ["OBSERVERS", "Observer", "RangeObserver", "make_observer"]

#: Every observer by its name.
OBSERVERS: dict[str, type[RangeObserver]] = {
    observer.name: observer
    for observer in (
        MinMax,
        MovingAverage,
        Percentile,
        Entropy,
        Mse,
        Ifmr,
        Hfmg,
        Arq,
        Isotone,
        Adjoint,
    )
}


def make_observer(
    name: str, granularity: Granularity | None = None, **parameters: Any
) -> RangeObserver:
    """The observer of that name, for ``granularity`` (by default one range for all elements).

    Raises:
        QuantizationError: there is no such observer, or it has no such parameter (the
            message names the nearest), or the parameter's value is out of range, or the
            observer cannot work with the granularity.

    Example:
        >>> make_observer("percentile", percentile=0.999).percentile
        0.999
    """
    observer = OBSERVERS.get(name)
    if observer is None:
        raise QuantizationError(
            "unknown observer",
            expected=", ".join(OBSERVERS),
            got=name,
            do=did_you_mean(nearest(name, OBSERVERS, at_most=1)),
        )
    accepted = [p for p in inspect.signature(observer).parameters if p != "granularity"]
    for parameter in parameters:
        if parameter not in accepted:
            raise QuantizationError(
                "unknown parameter",
                where=f"observer {name}",
                expected=", ".join(accepted) or "no parameters",
                got=parameter,
                do=did_you_mean(nearest(parameter, accepted, at_most=1)),
            )
    return observer(granularity, **parameters)
