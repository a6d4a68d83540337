"""Which sites reach a decision: a value that chooses other values, without a derivative.

An error that changes which expert is taken, or on which side of a threshold a value
lies, is no first-order effect. Such an error goes from floating-point values into an
index, a mask or a number for Python, or into values whose derivative is zero or cut
(rounded, detached), and from there on to the target. One forward pass follows it: each
tensor carries the sites that it comes from, and those that decided about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.ops import (
    Call,
    CallMode,
    Handler,
    Operator,
    float_tensors,
    function_body,
    is_floating,
    operators_that,
)

_JUMPS = operators_that("jump")
_CUTS = operators_that("cut the gradient")
_READS = operators_that("give numbers to Python")
#: Nothing of the values of their operands is in their result.
_FRESH = (
    operators_that("create")
    | operators_that("ignore their first operand")
    | operators_that("ask about values")
)


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Where a site is called in one batch, and where its errors go.

    Attributes:
        number: how many functions of torch the forward pass has called, with this one.
        call: the call, without its tensors.
        reaches: errors reach the target, as values or through decisions.
        decides: they reach a decision that the target depends on.
        is_direct: no site lies between it and such a decision.
        has_gradient: it was not called under ``torch.no_grad``.
    """

    number: int
    call: Call
    reaches: bool = True
    decides: bool = False
    is_direct: bool = False
    has_gradient: bool = True


@dataclass(frozen=True, slots=True)
class _Trace:
    """Where a tensor's values come from; each field is a set of sites, one bit each.

    Attributes:
        values: all sites that its numbers come from.
        makers: those of them with no other site between.
        decided: all sites that decided about it.
        deciders: those of them with no site between themselves and the decision.
    """

    values: int = 0
    makers: int = 0
    decided: int = 0
    deciders: int = 0

    def __or__(self, other: _Trace) -> _Trace:
        return _Trace(
            self.values | other.values,
            self.makers | other.makers,
            self.decided | other.decided,
            self.deciders | other.deciders,
        )

    def as_decision(self) -> _Trace:
        """Return the trace of an integer or a boolean made of such values."""
        return _Trace(
            decided=self.decided | self.values, deciders=self.deciders | self.makers
        )


_NOTHING = _Trace()


class CallPlaces:
    """The handler that notes the place of each site's call, and runs it as it is.

    Attributes:
        mode: that hands it the calls.
        places: of the calls of this batch.
        bits: the bit of each site in a trace.
        wanted: the site whose result is the target; None for another target.
        wanted_output: of that site.
        last: the bit of the site that the last call was; 0 for no site.
        made: copies of its results.
    """

    def __init__(self) -> None:
        self.mode: FollowingMode | None = None
        self.places: dict[str, CallPlace] = {}
        self.bits: dict[str, int] = {}
        self.wanted: str | None = None
        self.wanted_output: Tensor | None = None
        self.last: int = 0
        self.made: list[Tensor] = []

    def begin(self) -> None:
        """Start a new batch."""
        self.places = {}
        self.wanted_output = None

    def call(self, call: Call) -> Any:
        """Run the call."""
        result = call.run()
        outputs = float_tensors(result)
        if not outputs:
            return result
        name = str(call.site)
        if name == self.wanted and self.wanted_output is None:
            # a copy: what the model writes over it later does not count
            self.wanted_output = outputs[0].clone()
            self.made = [self.wanted_output]
        self.last = self.bits.setdefault(name, 1 << len(self.bits))
        if name not in self.places and self.mode is not None:
            template = replace(call, leaves=[])
            self.places[name] = CallPlace(
                self.mode.number, template, has_gradient=torch.is_grad_enabled()
            )
        return result

    def before_write(self, tensor: Tensor) -> None:
        """Nothing is held."""

    def finished(self, targets: Iterable[Tensor]) -> dict[str, CallPlace]:
        """Return the places of this batch's sites, and where their errors go."""
        end = _NOTHING if self.mode is None else self.mode.end(targets)
        reached = end.values | end.decided
        return {
            name: replace(
                place,
                reaches=bool(self.bits[name] & reached),
                decides=bool(self.bits[name] & end.decided),
                is_direct=bool(self.bits[name] & end.deciders),
            )
            for name, place in self.places.items()
        }


class FollowingMode(CallMode):
    """A ``CallMode`` that also follows where values come from; made by ``watch``.

    Attributes:
        number: how many functions of torch the forward pass has called so far.
    """

    def __init__(self, model: nn.Module, handler: Handler) -> None:
        super().__init__(model, handler)
        if not isinstance(handler, CallPlaces):
            raise TypeError("a FollowingMode needs CallPlaces as its handler")
        self.noted = handler
        self.noted.mode = self
        self.number = 0
        self._traces: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._program = _NOTHING

    def begin(self) -> None:
        """Start a new forward pass."""
        super().begin()
        self.noted.begin()
        self.number = 0
        self._traces = WeakIdKeyDictionary()
        self._program = _NOTHING

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.number += 1
        if function_body(func) is not None:
            return super().__torch_function__(func, types, args, kwargs)
        operator = Operator.of(func)
        trace = _NOTHING
        if operator.name not in _FRESH:
            # before the call, which may write into what it reads
            trace = self._trace_of((args, kwargs))
        self.noted.last = 0
        self.noted.made = []
        result = super().__torch_function__(func, types, args, kwargs)
        if trace != _NOTHING or self.noted.last:
            self._follow(operator, trace, args, kwargs, result)
        return result

    def _trace_of(self, values: Any) -> _Trace:
        traces = (
            self._trace(leaf)
            for leaf in tree_leaves(values)
            if isinstance(leaf, Tensor)
        )
        return reduce(or_, traces, _NOTHING)

    def _trace(self, tensor: Tensor) -> _Trace:
        trace: _Trace = self._traces.get(tensor, _NOTHING)  # type: ignore[no-untyped-call]
        return trace

    def _follow(
        self, operator: Operator, trace: _Trace, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Note what the results of a call come from; ``trace`` is of its operands."""
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not outputs and operator.name in _READS:
            self._program = self._program | trace.as_decision()
        written = args[0] if operator.inplace and args else kwargs.get("out")
        if isinstance(written, Tensor):
            outputs.append(written)
            if written._base is not None:  # written through a view
                outputs.append(written._base)
                trace = trace | self._trace(written._base)
        self._note([*outputs, *self.noted.made], operator, trace)

    def _note(
        self, outputs: Iterable[Tensor], operator: Operator, trace: _Trace
    ) -> None:
        """Keep the trace of each output."""
        as_value = self._of_value(operator, trace)
        for tensor in outputs:
            is_value = is_floating(tensor) or tensor.is_complex()
            self._traces[tensor] = as_value if is_value else trace.as_decision()

    def _of_value(self, operator: Operator, trace: _Trace) -> _Trace:
        """Return the trace of a floating-point result."""
        is_cut = operator.name in _CUTS or not torch.is_grad_enabled()
        if is_cut or operator.name in _JUMPS:
            trace = trace | trace.as_decision()
        site = self.noted.last
        if not site:
            return trace
        return replace(trace, values=trace.values | site, makers=site)

    def follows(self, target: Tensor) -> bool:
        """Return True if a target comes from some site, or was decided by one."""
        return self._trace(target) != _NOTHING

    def end(self, targets: Iterable[Tensor]) -> _Trace:
        """Return what the targets come from, and what the program went on by."""
        return self._trace_of(list(targets)) | self._program
