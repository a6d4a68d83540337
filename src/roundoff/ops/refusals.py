"""Calls that tell nothing when they are run again, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from roundoff.ops.table import base, operators_that

_COLLECTIVES = frozenset(
    "c10d c10d_functional _c10d_functional _c10d_functional_autograd symm_mem _dtensor".split()
)
_QUANTIZED = frozenset("quantized _quantized quantized_decomposed".split())


@dataclass(frozen=True)
class Reason:
    """Why a call has no second result."""

    text: str


class Refusal(Exception):  # noqa: N818 - caught where it is raised, and given back as a Reason
    """Carries a reason out of the middle of a run."""


def refuse(func: OpOverload, values: Mapping[str, Any]) -> None:
    """Raise ``Refusal`` for a call that draws random numbers, rounds nothing, or is made for its effect.

    ``values`` are its arguments by name.
    """
    space, name = func._schema.name.split("::")
    operator = base(name)
    if space in _COLLECTIVES:
        raise Refusal("a collective")
    if space in _QUANTIZED:
        raise Refusal("runs on quantized tensors")
    if operator in operators_that("act on the program") or space == "profiler":
        raise Refusal("called for its effect")
    if name == "_efficientzerotensor":
        raise Refusal("zeros without memory")
    if operator in operators_that("leave memory unwritten"):
        raise Refusal("uninitialised memory")
    if operator in operators_that("read strides"):
        raise Refusal("reads memory by its strides")
    if operator in operators_that("have no unique result"):
        raise Refusal("its result is not unique")
    if operator in operators_that("read opaque bytes"):
        raise Refusal("needs the bytes that its forward kernel left")
    if _random(func, name, values):
        raise Refusal("draws random numbers")
    if operator in operators_that("cast"):
        _refuse_cast(values)
    elif torch.Tag.inplace_view in func.tags or any(
        r.alias_info is not None and not r.alias_info.is_write
        for r in func._schema.returns
    ):
        raise Refusal("a view rounds nothing")
    if (
        not any("Tensor" in str(r.type) for r in func._schema.returns)
        and not func._schema.is_mutable
    ):
        raise Refusal("returns no tensor")


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of a floating-point format is one of another's.

    >>> import torch
    >>> holds(torch.float32, torch.bfloat16), holds(torch.float16, torch.bfloat16)
    (True, False)
    """
    if wide is narrow:
        return True
    w, n = torch.finfo(wide), torch.finfo(narrow)
    return w.eps <= n.eps and w.max >= n.max and w.tiny * w.eps <= n.tiny * n.eps


def _random(func: OpOverload, name: str, values: Mapping[str, Any]) -> bool:
    """Dropout with probability zero, or outside training, draws nothing although its operator may."""
    if values.get("dropout_p"):
        return True
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return values.get("generator") is not None
    declared = {
        a.name: a.default_value for a in func._schema.arguments if a.has_default_value()
    }
    given = declared | dict(values)
    if "dropout_p" in given:
        return False
    if given.get("train", given.get("training")) is False:
        return False
    return (
        given.get("dropout" if "dropout" in given else "p" if "dropout" in name else "")
        != 0
    )


def _refuse_cast(values: Mapping[str, Any]) -> None:
    source = values.get("self")
    if not isinstance(source, Tensor):
        return
    other = values.get("other")  # to.other takes the format of a tensor
    target = values.get("dtype") or (
        other.dtype if isinstance(other, Tensor) else source.dtype
    )
    if target is source.dtype or (
        (
            source.is_floating_point()
            and target.is_floating_point
            and holds(target, source.dtype)
        )
        or (
            source.is_complex()
            and target.is_complex
            and holds(target.to_real(), source.dtype.to_real())
        )
    ):
        raise Refusal("a cast that rounds nothing")
