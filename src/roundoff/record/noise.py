"""The last bit of every rounded result moved at random, to measure how far two honest runs may lie apart.

Monte Carlo arithmetic (D. S. Parker, "Monte Carlo arithmetic", UCLA CSD-970002, 1997; C. Denis, P. de Oliveira Castro and
E. Petit, "Verificarlo", ARITH 2016) at the level of operators: each element of a result becomes the next value of its own
format above or below it, with probability 1/4 each, independently of the others, and stays with probability 1/2. So its
error has mean zero and a variance of 1/2 ulp², six times that of one correct rounding: what another order of summation,
another kernel or another library may do.

What rounds nothing (in the table of operators) is left alone: views, copies, wider casts, comparisons, ``max``, ``relu``,
fills and factories, random draws, collectives (their result stays the same on every rank), integers. An element of ``add``,
``mul``, a narrowing cast and the like is left alone where fp64 gives the very same value: attention masks, step
counts and powers of two are exact. (In fp64 itself nothing tells, and all elements of these move.)

NaN, infinities and zeros of either sign stay, no sign changes, the largest finite value is not moved up and +-1 not away
from zero, so that a probability or a cosine remains one. The smallest subnormal may become zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from roundoff.ops import (
    EXACT_ARGUMENTS,
    Refusal,
    base,
    facts,
    holds,
    operators_that,
    outside_of_modes,
    plain,
    refuse,
    run_again,
    tensors_made,
)
from roundoff.record.statistics import in_memory_order

#: Operators that are exact for many elements: those where fp64 gives the same.
_OFTEN = operators_that("are often exact") | operators_that("cast")
#: Replay leaves these out, since two correct results differ; their own rounding is noise all the same.
_REFUSED_ELSEWHERE = operators_that("have no unique result") | operators_that(
    "read opaque bytes"
)
#: Formats of scales and packed pairs, without a sign bit in front; no operator rounds to them.
_UNSIGNED = ("torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Elements at a time: what is computed of them stays near.
_CHUNK = 2**17

Perturb = Callable[[Any], None]


class Noise:
    """``seed`` draws on generators of its own: the program's random state is not touched.

    The ranks of a distributed run draw the same, so that replicas of a model that do the same stay the same.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def of(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Perturb | None:
        """What is to be called with the result of a call that is about to run; None for one that rounds nothing."""
        if not isinstance(func, OpOverload) or not _rounds(func, args, kwargs):
            return None
        exact = run_again(func, args, kwargs) if _operator(func) in _OFTEN else None
        left = [
            a for n in EXACT_ARGUMENTS for a in _flat(_named(func, args, kwargs).get(n))
        ]

        def perturb(result: Any) -> None:
            tensors = tensors_made(func, args, kwargs, result)
            known = (
                exact
                if isinstance(exact, list) and len(exact) == len(tensors)
                else [None] * len(tensors)
            )
            if (
                _operator(func) in operators_that("write running statistics")
                and args[5]
            ):
                tensors += _flat(args[3:5])
                known += [None, None]
            with outside_of_modes():
                for tensor, same in zip(tensors, known, strict=True):
                    if not any(tensor is other for other in left):
                        self.perturb_(tensor, same)

        return perturb

    def perturb_(self, tensor: Tensor, exact: Tensor | None = None) -> None:
        """Move the elements of ``tensor``, of any shape and layout, in place; elements equal to those of ``exact`` (fp64,
        of the same shape) stay. Integers, booleans and tensors without readable values stay altogether."""
        values, _ = plain(tensor)
        if (
            values is None
            or not values.numel()
            or not (values.is_floating_point() or values.is_complex())
        ):
            return
        if exact is not None and (
            exact.shape != values.shape or exact.device != values.device
        ):
            exact = None
        if str(values.dtype) in _UNSIGNED:
            return
        if values.is_complex():
            values = torch.view_as_real(values.conj() if values.is_conj() else values)
            exact = None if exact is None else torch.view_as_real(exact.resolve_conj())
        if any(
            stride == 0 and size > 1
            for stride, size in zip(values.stride(), values.shape, strict=True)
        ):
            return  # one element in several places: what the call has made is the smaller tensor behind it
        flat = in_memory_order(values)
        same = (
            None
            if exact is None or exact.stride() != values.stride()
            else in_memory_order(exact)
        )
        dense = None
        if flat is None or (
            exact is not None and same is None
        ):  # in row-major order, from a copy where it has gaps
            dense = values.contiguous()
            flat, same = dense.view(-1), None if exact is None else exact.reshape(-1)
        generator = self._generator(values.device)
        for start in range(0, len(flat), _CHUNK):
            part = None if same is None else same[start : start + _CHUNK]
            _move_(flat[start : start + _CHUNK], part, generator)
        if dense is not None and dense is not values:
            values.copy_(dense)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]


def _move_(flat: Tensor, exact: Tensor | None, generator: torch.Generator) -> None:
    """Codes of sign and magnitude: one more is the next value away from zero, one less the next towards it."""
    dtype = flat.dtype
    integer = _BITS[dtype.itemsize]
    bits = flat.view(integer)
    # a byte has four pairs of bits, and the difference of the two bits of a pair is 0, 0, 1 or -1
    words = torch.empty(-(-len(flat) // 32), dtype=torch.int64, device=flat.device)
    drawn = words.random_(-(2**63), None, generator=generator).view(torch.int8)
    pairs = torch.stack([drawn >> shift for shift in (0, 2, 4, 6)]).view(-1)[
        : len(flat)
    ]
    step = (pairs & 1) - ((pairs >> 1) & 1)
    magnitude = bits & torch.iinfo(integer).max
    one, largest = (_code(value, dtype) for value in (1.0, torch.finfo(dtype).max))
    stay = (magnitude == 0) | (magnitude > largest)
    stay |= ((magnitude == one) | (magnitude == largest)) & (step == 1)
    if exact is not None:
        stay |= flat.double() == exact
    bits += step.masked_fill_(stay, 0)


def _code(value: float, dtype: torch.dtype) -> int:
    return int(
        torch.tensor(value, dtype=torch.float64)
        .to(dtype)
        .view(_BITS[dtype.itemsize])
        .item()
    )


def _rounds(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    values = _named(func, args, kwargs)
    operator = _operator(func)
    is_cast = operator in operators_that("cast")
    if operator in operators_that("round nothing"):
        return False
    if operator.endswith("_copy") and not is_cast:
        return False
    if not any(_flat(v) for v in values.values()):  # from numbers alone: a constant
        return False
    stores_unless = facts(operator).stores_unless
    if stores_unless is not None and not values.get(stores_unless):
        return False
    if operator == "copy" or is_cast:
        source, target = values.get("src", values.get("self")), values["self"]
        a, b = _flat(source)[:1], _flat(target)[:1]
        to = values.get("dtype") or (b[0].dtype if b else None)
        if (
            not a
            or to is None
            or not a[0].is_floating_point()
            or (to.is_floating_point and holds(to, a[0].dtype))
        ):
            return False
    if operator not in _REFUSED_ELSEWHERE:
        try:
            refuse(func, values)
        except Refusal:
            return False
    return True


def _named(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        a.name: v for a, v in zip(func._schema.arguments, args, strict=False)
    } | dict(kwargs)


def _operator(func: OpOverload) -> str:
    return base(func._schema.name.partition("::")[2])


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return (
        [t for v in value for t in _flat(v)] if isinstance(value, (list, tuple)) else []
    )
