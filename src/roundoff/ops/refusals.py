"""Calls that tell nothing when they are run again, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload

from roundoff.ops.arguments import Keywords
from roundoff.ops.table import Trait, base, operators_that

_COLLECTIVES = frozenset(
    (
        "c10d",
        "c10d_functional",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "symm_mem",
        "_dtensor",
    )
)
_QUANTIZED = frozenset(("quantized", "_quantized", "quantized_decomposed"))
#: What an operator does, and the reason not to run it again.
_TRAITS: Mapping[Trait, str] = {
    "act on the program": "called for its effect",
    "leave memory unwritten": "uninitialised memory",
    "read strides": "reads memory by its strides",
    "have no unique result": "its result is not unique",
    "read opaque bytes": "needs the bytes that its forward kernel left",
}


@dataclass(frozen=True)
class Reason:
    """Why a call has no second result.

    ``is_exact`` is true where the call rounds nothing, so that it may run as it is.
    """

    text: str
    is_exact: bool = False


class Refusal(Exception):  # noqa: N818 - caught where it is raised, and given back as a Reason
    """Carry a reason out of the middle of a run."""

    def __init__(self, text: str, *, is_exact: bool = False) -> None:
        super().__init__(text)
        self.reason = Reason(text, is_exact)


def refuse(func: OpOverload, values: Keywords) -> None:
    """Raise ``Refusal`` for a call that draws random numbers, rounds nothing, or acts
    on the program.

    ``values`` are its arguments by name.
    """
    space, name = func._schema.name.split("::")
    operator = base(name)
    _refuse_namespace(space)
    if name == "_efficientzerotensor":
        raise Refusal("zeros without memory")
    for trait, reason in _TRAITS.items():
        if operator in operators_that(trait):
            raise Refusal(reason)
    if _draws(func, name, values):
        raise Refusal("draws random numbers")
    if operator in operators_that("cast"):
        if _hands_values_on(values):
            raise Refusal("a cast that rounds nothing", is_exact=True)
    elif _is_view(func):
        raise Refusal("a view rounds nothing", is_exact=True)
    makes_tensors = any("Tensor" in str(r.type) for r in func._schema.returns)
    if not makes_tensors and not func._schema.is_mutable:
        raise Refusal("returns no tensor")


def _refuse_namespace(space: str) -> None:
    if space in _COLLECTIVES:
        raise Refusal("a collective")
    if space in _QUANTIZED:
        raise Refusal("runs on quantized tensors")
    if space == "profiler":
        raise Refusal("called for its effect")


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return True if every value of ``narrow`` is one of ``wide``; both are floating-point formats.

    >>> import torch
    >>> holds(torch.float32, torch.bfloat16), holds(torch.float16, torch.bfloat16)
    (True, False)
    """
    if wide is narrow:
        return True
    w = torch.finfo(wide)
    n = torch.finfo(narrow)
    return w.eps <= n.eps and w.max >= n.max and w.tiny * w.eps <= n.tiny * n.eps


def _is_view(func: OpOverload) -> bool:
    if torch.Tag.inplace_view in func.tags:
        return True
    aliases = [r.alias_info for r in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _draws(func: OpOverload, name: str, values: Keywords) -> bool:
    """Return True for a call that draws random numbers.

    Dropout with probability zero, or outside training, draws nothing although its
    operator may.
    """
    if values.get("dropout_p"):
        return True
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return values.get("generator") is not None
    arguments = func._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    settings = defaults | dict(values)
    if "dropout_p" in settings:
        return False
    if settings.get("train", settings.get("training")) is False:
        return False
    if "dropout" in settings:
        return settings["dropout"] != 0
    return "dropout" not in name or settings.get("p") != 0


def _hands_values_on(values: Keywords) -> bool:
    """Return True for the arguments of a cast to a format that holds all values of the old one."""
    source = values.get("self")
    if not isinstance(source, Tensor):
        return False
    other = values.get("other")  # to.other takes the format of a tensor
    unchanged = other.dtype if isinstance(other, Tensor) else source.dtype
    target = values.get("dtype") or unchanged
    if target is source.dtype:
        return True
    if source.is_floating_point() and target.is_floating_point:
        return holds(target, source.dtype)
    if source.is_complex() and target.is_complex:
        return holds(target.to_real(), source.dtype.to_real())
    return False
