"""The arguments of an operator call as text, and back: what a recorded call needs to run again.

Tensors are written as the number of their record, so that
``restore(describe(args, kwargs, f), g)`` gives the same arguments with ``g(f(tensor))``
in place of each tensor. Lists stay lists and tuples tuples.

>>> import torch
>>> x = torch.ones(3)
>>> text = describe((x, [1, None]), {"dtype": torch.float64, "scale": float("inf")}, lambda t: 7)
>>> text
'[[{"record":7},[1,null]],{"dtype":{"dtype":"float64"},"scale":{"float":"inf"}}]'
>>> restore(text, lambda record: f"tensor {record}")
(('tensor 7', [1, None]), {'dtype': torch.float64, 'scale': inf})
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from roundoff.errors import RunError
from roundoff.foreign import parse_json

#: The keyword arguments of a call.
Keywords = Mapping[str, Any]

#: torch's constants that kernels take, each written by its name in ``torch``.
_CONSTANTS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


class _Unknown(Exception):  # noqa: N818 - never leaves this module
    """A value that cannot be written."""


def describe(
    args: Sequence[Any],
    kwargs: Keywords,
    record_of: Callable[[Tensor], int | None],
) -> str | None:
    """Return the arguments as JSON, or None where one cannot be written.

    That is a generator, an object, a tensor without a record. Numbers are written
    exactly, NaN and infinities included; symbolic numbers by the value that they have
    now.
    """
    try:
        parts = (
            [_write(value, record_of) for value in args],
            {k: _write(v, record_of) for k, v in kwargs.items()},
        )
    except _Unknown:
        return None
    return json.dumps(parts, allow_nan=False, separators=(",", ":"))


def restore(
    text: str, tensor_of: Callable[[int], Any], device: torch.device | None = None
) -> tuple[tuple[Any, ...], Keywords]:
    """Return the arguments that ``describe`` has written.

    ``device`` stands for the recorded ones, where the tensors were moved to it. Raises
    ``RunError`` for any other text.
    """
    try:
        args, kwargs = parse_json(text)
        for value in (*args, *kwargs.values()):
            _read(value, int)  # all of it, before the first tensor is asked for
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise RunError(
            "the recorded arguments of a call cannot be read",
            expected="what capture writes",
            got=f"{type(error).__name__}: {error}",
            do="record the run again with this version of roundoff",
        ) from error
    values = tuple(_read(value, tensor_of) for value in args)
    named = {key: _read(value, tensor_of) for key, value in kwargs.items()}
    if device is None:
        return values, named
    moved: tuple[tuple[Any, ...], Keywords] = tree_map_only(
        torch.device, lambda _: device, (values, named)
    )
    return moved


def overload_of(name: str) -> OpOverload:
    """Return the operator that a recorded overload names: ``aten.add.Tensor``,
    ``mylib.scale.default``.

    Raises ``RunError`` when torch has no such operator now.

    >>> overload_of("aten.convolution.default")
    <OpOverload(op='aten.convolution', overload='default')>
    """
    space, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        operator = getattr(getattr(getattr(torch.ops, space), packet), overload)
    except (AttributeError, RuntimeError):
        operator = None
    if isinstance(operator, OpOverload):
        return operator
    expected = "a registered custom operator"
    do = f"import the library that registers {space!r} first"
    if space == "aten":
        expected = f"an operator of torch {torch.__version__}"
        do = "use the version of torch that recorded the run"
    raise RunError(
        "torch does not know this operator", expected=expected, got=name, do=do
    )


def _write(value: Any, record_of: Callable[[Tensor], int | None]) -> Any:
    if isinstance(value, Tensor):
        record = record_of(value)
        if record is None:
            raise _Unknown
        return {"record": int(record)}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, list):
        return [_write(v, record_of) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [_write(v, record_of) for v in value]}
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        return {"slice": [_write(v, record_of) for v in ends]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, cls in _CONSTANTS.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    return _write_number(value)


def _write_number(value: Any) -> Any:
    if isinstance(value, torch.SymBool):
        return bool(value)
    if isinstance(value, (int, torch.SymInt)):
        return int(value)
    if isinstance(value, (float, torch.SymFloat)):
        number = float(value)
        return number if math.isfinite(number) else {"float": str(number)}
    if isinstance(value, complex):
        return {"complex": [_write_number(value.real), _write_number(value.imag)]}
    raise _Unknown


def _read(value: Any, tensor_of: Callable[[int], Any]) -> Any:
    if isinstance(value, list):
        return [_read(v, tensor_of) for v in value]
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind == "record":
        return tensor_of(inner)
    if kind in _READERS:
        return _READERS[kind](_read(inner, tensor_of))
    constant = getattr(torch, inner)
    if not isinstance(constant, _CONSTANTS[kind]):
        raise TypeError(f"{inner!r} is not a {kind}")
    return constant


#: What a marked value is made from: its text, or the list of its parts.
_READERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "device": torch.device,
    "tuple": tuple,
    "complex": lambda parts: complex(*parts),
    "slice": lambda ends: slice(*ends),
}
