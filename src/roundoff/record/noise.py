"""The last bit of every rounded result moved at random, to measure how far two honest
runs may lie apart.

Monte Carlo arithmetic (D. S. Parker, "Monte Carlo arithmetic", UCLA CSD-970002, 1997; C.
Denis, P. de Oliveira Castro and E. Petit, "Verificarlo", ARITH 2016) at the level of
operators: each element of a result becomes the next value of its own format above or
below it, with probability 1/4 each, independently of the others, and stays with
probability 1/2. So its error has mean zero and a variance of 1/2 ulp², six times that of
one correct rounding: what another order of summation, another kernel or another library
may do.

What rounds nothing (in the table of operators) is left alone: views, copies, wider
casts, comparisons, ``max``, ``relu``, fills and factories, random draws, collectives
(their result stays the same on every rank), integers. An element of ``add``, ``mul``, a
narrowing cast and the like is left alone where fp64 gives the very same value: attention
masks, step counts and powers of two are exact. (In fp64 itself nothing tells, and all
elements of these move.)

NaN, infinities and zeros of either sign stay, no sign changes, the largest finite value
is not moved up and +-1 not away from zero, so that a probability or a cosine remains
one. The smallest subnormal may become zero.
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
_OFTEN_EXACT = operators_that("are often exact") | operators_that("cast")
#: Replay leaves these out, since two correct results differ; their own rounding is noise
#: all the same.
_REFUSED_ELSEWHERE = operators_that("have no unique result") | operators_that(
    "read opaque bytes"
)
#: Formats of scales and packed pairs, without a sign bit in front; no operator rounds to
#: them.
_UNSIGNED = ("torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2")
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Elements at a time: what is computed of them stays near.
_CHUNK = 2**17

Perturb = Callable[[Any], None]


class Noise:
    """Draws on generators of its own: the program's random state is not touched.

    The ranks of a distributed run draw the same from one ``seed``, so that replicas of
    a model that do the same stay the same.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def of(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Perturb | None:
        """Return what to call with the result of a call that is about to run; None for
        a call that rounds nothing.
        """
        if not isinstance(func, OpOverload):
            return None
        values = _named_arguments(func, args, kwargs)
        operator = _operator(func)
        if not _rounds(func, operator, values):
            return None
        reference = None
        if operator in _OFTEN_EXACT:
            reference = run_again(func, args, kwargs)
        untouched: list[Tensor] = []
        for name in EXACT_ARGUMENTS:
            untouched += _flat(values.get(name))

        def perturb(result: Any) -> None:
            tensors = tensors_made(func, args, kwargs, result)
            exact: list[Tensor | None] = [None] * len(tensors)
            if isinstance(reference, list) and len(reference) == len(tensors):
                exact = list(reference)
            writes_statistics = operator in operators_that("write running statistics")
            if writes_statistics and args[5]:
                tensors += _flat(args[3:5])
                exact += [None, None]
            with outside_of_modes():
                for tensor, exact_values in zip(tensors, exact, strict=True):
                    if not any(tensor is other for other in untouched):
                        self.perturb_(tensor, exact_values)

        return perturb

    def perturb_(self, tensor: Tensor, exact: Tensor | None = None) -> None:
        """Move the elements of ``tensor``, of any shape and layout, in place.

        Elements equal to those of ``exact`` (fp64, of the same shape) stay. Integers,
        booleans and tensors without readable values stay altogether.
        """
        values, _ = plain(tensor)
        if values is None or not _has_last_bits(values):
            return
        if exact is not None and not _is_comparable(exact, values):
            exact = None
        if values.is_complex():
            values = torch.view_as_real(values.conj() if values.is_conj() else values)
            exact = None if exact is None else torch.view_as_real(exact.resolve_conj())
        if _has_repeated_elements(values):
            return  # the call has made the smaller tensor behind it
        flat, flat_exact = _flat_pair(values, exact)
        if flat is not None:
            self._move_all_(flat, flat_exact)
            return
        # in row-major order, from a copy where it has gaps
        dense = values.contiguous()
        flat_exact = None if exact is None else exact.reshape(-1)
        self._move_all_(dense.view(-1), flat_exact)
        if dense is not values:
            values.copy_(dense)

    def _move_all_(self, flat: Tensor, exact: Tensor | None) -> None:
        generator = self._generator(flat.device)
        for start in range(0, len(flat), _CHUNK):
            part = slice(start, start + _CHUNK)
            _move_(flat[part], None if exact is None else exact[part], generator)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]


def _has_last_bits(values: Tensor) -> bool:
    """Return True for floating-point and complex elements of a signed format."""
    if not values.numel() or str(values.dtype) in _UNSIGNED:
        return False
    return values.is_floating_point() or values.is_complex()


def _is_comparable(exact: Tensor, values: Tensor) -> bool:
    return exact.shape == values.shape and exact.device == values.device


def _has_repeated_elements(values: Tensor) -> bool:
    """Return True if one element stands in several places."""
    axes = zip(values.stride(), values.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in axes)


def _flat_pair(
    values: Tensor, exact: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Both in the same order of memory; (None, None) where one is not dense in it."""
    flat = in_memory_order(values)
    if exact is None:
        return flat, None
    if exact.stride() != values.stride():
        return None, None
    flat_exact = in_memory_order(exact)
    return (None, None) if flat_exact is None else (flat, flat_exact)


def _move_(flat: Tensor, exact: Tensor | None, generator: torch.Generator) -> None:
    """Codes of sign and magnitude: one more is the next value away from zero, one less
    the next towards it."""
    dtype = flat.dtype
    integer = _INTEGER_OF_SIZE[dtype.itemsize]
    bits = flat.view(integer)
    # a byte has four pairs of bits, and the difference of the two bits of a pair is 0,
    # 0, 1 or -1
    words = torch.empty(-(-len(flat) // 32), dtype=torch.int64, device=flat.device)
    drawn = words.random_(-(2**63), None, generator=generator).view(torch.int8)
    pairs = torch.stack([drawn >> shift for shift in (0, 2, 4, 6)]).view(-1)
    pairs = pairs[: len(flat)]
    step = (pairs & 1) - ((pairs >> 1) & 1)
    magnitude = bits & torch.iinfo(integer).max
    one_code = _code(1.0, dtype)
    largest_code = _code(torch.finfo(dtype).max, dtype)
    stay = (magnitude == 0) | (magnitude > largest_code)
    is_end = (magnitude == one_code) | (magnitude == largest_code)
    stay |= is_end & (step == 1)
    if exact is not None:
        stay |= flat.double() == exact
    bits += step.masked_fill_(stay, 0)


def _code(value: float, dtype: torch.dtype) -> int:
    rounded = torch.tensor(value, dtype=torch.float64).to(dtype)
    return int(rounded.view(_INTEGER_OF_SIZE[dtype.itemsize]).item())


def _rounds(func: OpOverload, operator: str, values: Mapping[str, Any]) -> bool:
    """Return True if a call rounds what it computes."""
    is_cast = operator in operators_that("cast")
    if operator in operators_that("round nothing"):
        return False
    if operator.endswith("_copy") and not is_cast:
        return False
    if not any(_flat(value) for value in values.values()):
        return False  # from numbers alone: a constant
    stores_unless = facts(operator).stores_unless
    if stores_unless is not None and not values.get(stores_unless):
        return False
    if (operator == "copy" or is_cast) and not _narrows(values):
        return False
    return operator in _REFUSED_ELSEWHERE or not _is_refused(func, values)


def _narrows(values: Mapping[str, Any]) -> bool:
    """Return True for a copy or cast to a format that does not hold all values."""
    source = _flat(values.get("src", values.get("self")))[:1]
    target = _flat(values["self"])[:1]
    dtype = values.get("dtype") or (target[0].dtype if target else None)
    if not source or dtype is None or not source[0].is_floating_point():
        return False
    return not (dtype.is_floating_point and holds(dtype, source[0].dtype))


def _is_refused(func: OpOverload, values: Mapping[str, Any]) -> bool:
    try:
        refuse(func, dict(values))
    except Refusal:
        return True
    return False


def _named_arguments(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _operator(func: OpOverload) -> str:
    return base(func._schema.name.partition("::")[2])


def _flat(value: Any) -> list[Tensor]:
    """Return the tensors in a value, lists in it opened."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    if isinstance(value, (list, tuple)):
        for part in value:
            tensors += _flat(part)
    return tensors
