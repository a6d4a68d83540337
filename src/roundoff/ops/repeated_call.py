"""A call of a recording, or an edit of one, that runs many times and is read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from roundoff.ops.argument_checks import check_arguments, depends_on_values
from roundoff.ops.from_recording import (
    FAILURES,
    call_failure,
    recorded_operator,
    restored,
    run_in_this_process,
    run_recorded,
    writes_arguments,
)
from roundoff.ops.refusals import Reason, Refusal
from roundoff.ops.rerun import Result, tensors_made

#: Formats and shapes of a call's tensors.
_Shapes = tuple[tuple[torch.dtype, torch.Size], ...]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a tensor stands in the arguments: its place in ``RepeatedCall.records``."""

    place: int


class RepeatedCall:
    """A recorded call in its own formats, that runs again and again on other tensors.

    The operator is looked up and the text parsed once; the arguments are held against
    the schema and against each other once for tensors of the same shapes and formats,
    and each time where the check reads values: indices and targets.

    Args:
        overload: ``aten.add.Tensor``.
        arguments: as of ``describe``.

    Attributes:
        records: whose tensors the arguments name, each once, in their order.
    """

    def __init__(self, overload: str, arguments: str) -> None:
        self.overload = overload
        self.arguments = arguments
        self.records: tuple[int, ...] = ()
        self._refused: Reason | None = None
        self._checked: set[_Shapes] = set()
        try:
            self._func: OpOverload = recorded_operator(overload)
            self._read()
        except Refusal as refusal:
            self._refused = refusal.reason

    def _read(self) -> None:
        slots: dict[int, _Slot] = {}

        def slot(record: int) -> _Slot:
            return slots.setdefault(record, _Slot(len(slots)))

        self._positional, self._keywords = restored(self.arguments, slot)
        #: Of these, what has tensors in it.
        self._places = [k for k, v in enumerate(self._positional) if _has_slot(v)]
        self._names = [name for name, v in self._keywords.items() if _has_slot(v)]
        self.records = tuple(slots)
        self._is_written = writes_arguments(self._func)
        self._reads_values = depends_on_values(self._func)

    def run(self, tensor_of: Callable[[int], Tensor]) -> list[Result] | Reason:
        """Return what the call makes of the tensors of its records, or why it is not run.

        What ``tensor_of`` raises passes. Tensors that the call writes are copied.
        """
        if not run_in_this_process():
            return run_recorded(
                self.overload, self.arguments, tensor_of, dtype=None, exact_as_is=True
            )
        if self._refused is not None:
            return self._refused
        tensors = [tensor_of(record) for record in self.records]
        if self._is_written:
            tensors = [tensor.clone() for tensor in tensors]
        args = list(self._positional)
        for place in self._places:
            args[place] = _filled(args[place], tensors)
        kwargs = dict(self._keywords)
        for name in self._names:
            kwargs[name] = _filled(kwargs[name], tensors)
        try:
            self._check(tensors, args, kwargs)
        except Refusal as refusal:
            return refusal.reason
        try:
            result = self._made(args, kwargs)
        except FAILURES as error:
            return call_failure(error)
        if isinstance(result, Tensor) and not self._is_written:
            return [result]
        return list(tensors_made(self._func, args, kwargs, result))

    def _made(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():  # to turn it off takes as long as a small call
            return self._func(*args, **kwargs)
        with torch.no_grad():
            return self._func(*args, **kwargs)

    def _check(self, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> None:
        """Raise ``Refusal`` where arguments do not fit."""
        shapes = tuple((tensor.dtype, tensor.shape) for tensor in tensors)
        if shapes in self._checked:
            return
        check_arguments(self._func, args, kwargs)
        if not self._reads_values:
            self._checked.add(shapes)


def _has_slot(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_has_slot(each) for each in value)
    return isinstance(value, _Slot)


def _filled(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Return an argument with tensors in its slots."""
    if isinstance(value, _Slot):
        return tensors[value.place]
    if isinstance(value, list):
        return [_filled(each, tensors) for each in value]
    if isinstance(value, tuple):
        return tuple(_filled(each, tensors) for each in value)
    return value
