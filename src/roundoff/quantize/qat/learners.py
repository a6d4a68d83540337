"""The learners by name."""

from __future__ import annotations

from typing import Any

from roundoff.errors import QuantizationError
from roundoff.formats import Format, Granularity, QParams
from roundoff.quantize.qat.affine import Lsq, LsqPlus, Ste
from roundoff.quantize.qat.clip import Pact, Ulq
from roundoff.quantize.qat.learner import Learner, Role
from roundoff.quantize.qat.low_bit import Bnn, Dorefa, Xnor
from roundoff.quantize.qat.ternary import Ttq, Twn

__all__ = ["LEARNERS", "make_learner"]

_CLASSES: tuple[type[Learner], ...] = (
    Ste,
    Lsq,
    LsqPlus,
    Ulq,
    Pact,
    Dorefa,
    Twn,
    Ttq,
    Bnn,
    Xnor,
)
#: name -> class
LEARNERS: dict[str, type[Learner]] = {learner.kind: learner for learner in _CLASSES}


def make_learner(
    name: str,
    fmt: Format | str,
    granularity: Granularity | None = None,
    qparams: QParams | None = None,
    *,
    role: Role = "weight",
    **parameters: Any,
) -> Learner:
    """The learner of a name, with parameters of its own (``momentum`` of ste,
    ``fixed_min`` of ulq, ``gradient_bits`` of dorefa).

    Raises:
        QuantizationError: no such learner, or it cannot do this format, granularity or
            role.

    Example:
        >>> from roundoff.formats import PerAxis
        >>> make_learner("lsq", "int4", PerAxis(0))
        Lsq(–, lsq, int4, PerAxis(axis=0), weight)
    """
    if name not in LEARNERS:
        raise QuantizationError(
            "unknown learner",
            where="make_learner",
            expected=", ".join(LEARNERS),
            got=name,
        )
    return LEARNERS[name](fmt, granularity, qparams, role=role, **parameters)
