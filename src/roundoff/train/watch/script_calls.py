"""What a script itself computes, before the model, in the loss and on the gradients:
which of its calls first made a NaN or Inf, on which line, of which operands.

A step is run again from the model's call to its outputs; what the script does around the
model can't be. So the calls of torch's functions outside of models are noted with their
line, and their tensors are kept until the step ends where they are small. What they hold
is looked at when somebody asks.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

import torch
from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode

from roundoff.compare import explain_birth
from roundoff.ops import base, facts, operators_that
from roundoff.record import TensorRecord, user_line
from roundoff.train.our_hooks import OurHook
from roundoff.unforeseen import OurPart

#: Calls of a step that are kept; of longer ones the last.
_CALLS = 512
#: Tensors of at most so many bytes are kept alive until the step ends.
_SMALL = 2**18
#: A call that reads more tensors is an optimizer's or a scaler's.
_MANY = 64
#: What reads an attribute of a tensor.
_ATTRIBUTE = type(vars(torch._C.TensorBase)["grad"].__get__)
#: Python's ``tensor[...] = value``.
_WRITES = "__setitem__"
#: What a division reads.
_DIVISION = ("dividend", "divisor")
#: Python's operators under the names of torch's.
_OPERATORS = {"truediv": "div", "itruediv": "div", "rdiv": "reciprocal"} | {
    "rtruediv": "reciprocal",
    "rpow": "pow",
    "imul": "mul",
    "iadd": "add",
    "isub": "sub",
}


@dataclass(frozen=True, slots=True)
class ScriptBirth:
    """Where a script made a NaN or Inf.

    Attributes:
        operator: that made it.
        line: the user's.
        cause: what its operands show.
        advice: what to try.
    """

    operator: str
    line: str
    cause: str
    advice: str


class _Held:
    """A tensor as a call had it."""

    __slots__ = ("_tensor", "_version", "_weak")

    def __init__(self, tensor: Tensor) -> None:
        self._weak = weakref.ref(tensor)
        self._version = _version(tensor)
        self._tensor = tensor if _is_small(tensor) else None

    def value(self) -> Tensor | None:
        """Return it; None where it is gone, or was changed since."""
        tensor = self._weak()
        if tensor is None or _version(tensor) != self._version:
            return None
        return tensor


@dataclass(slots=True)
class _Call:
    """One call of a torch function by the script.

    Attributes:
        sequence: the number of the last autograd node made by then; -1 where it made
            none.
    """

    operator: str
    line: str
    read: list[_Held]
    results: list[_Held]
    sequence: int


class ScriptCalls(TorchFunctionMode):
    """The calls of torch's functions by the script in this step, outside of models.

    Args:
        is_inside: asked at each call if a model runs now.
        ours: keeps faults of this from the script.
    """

    def __init__(self, is_inside: Callable[[], bool], ours: OurPart) -> None:
        super().__init__()
        self._is_inside = is_inside
        self._ours = ours
        self._calls: deque[_Call] = deque(maxlen=_CALLS)
        #: how many calls came before the last backward pass
        self._before_backward = 0
        self.paused = False
        self._is_resting = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # most calls only read an attribute
        if (
            func.__class__ is not _ATTRIBUTE
            and not self.paused
            and not self._is_inside()
        ):
            line = user_line(2)
            if line is not None:
                self._ours(self._note, func, line, (args, kwargs), result)
        return result

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen while this is open, or until ``leave``."""
        with self, _warnings_at_the_users_line():
            try:
                yield
            finally:
                # ``with`` takes off the last mode, which has to be this one
                self.leave()
                modes: Any = overrides
                modes._push_mode(self)

    def rest(self) -> None:
        """Listen to nothing until ``resume``, at no cost; an optimizer's calls, say.

        A mode that the script has put on top is left there, and nothing changes.
        """
        if _is_captured():
            return
        modes: Any = overrides
        stack = modes._get_current_function_mode_stack()
        if stack and stack[-1] is self:
            modes._pop_mode()
            self._is_resting = True

    def rest_in(self, model: nn.Module) -> list[Callable[[], None]]:
        """Rest while a model runs, however it ends; returns what takes the hooks away."""
        before = OurHook(lambda *_: self.rest())
        after = OurHook(lambda *_: self.resume())
        handles = [
            model.register_forward_pre_hook(before),
            model.register_forward_hook(after, always_call=True),
        ]
        return [handle.remove for handle in handles]

    def resume(self) -> None:
        """Listen again after ``rest``."""
        if self._is_resting and not _is_captured():
            self._is_resting = False
            modes: Any = overrides
            modes._push_mode(self)

    def leave(self) -> None:
        """Listen no longer: a compiler would compile this with what it compiles."""
        self._is_resting = False
        modes: Any = overrides
        others = []
        for _ in modes._get_current_function_mode_stack():
            mode = modes._pop_mode()
            if mode is not self:
                others.append(mode)
        for mode in reversed(others):
            modes._push_mode(mode)
        self.clear()

    def _note(self, func: Any, line: str, arguments: Any, result: Any) -> None:
        operator = getattr(func, "__name__", "")
        if operator == _WRITES:
            result = arguments[0][0]
        results = [t for t in _tensors(result) if t.is_floating_point()]
        if not results:
            return
        read = [*_tensors(_leaves(arguments))]
        if len(read) > _MANY:
            return
        call = _Call(
            operator=_operator(operator),
            line=line,
            read=[_Held(t) for t in read if t.is_floating_point()],
            results=[_Held(t) for t in results],
            sequence=max(_sequence(tensor) for tensor in results),
        )
        self._calls.append(call)

    def begin_backward(self) -> None:
        """Note that what follows works on gradients."""
        self._before_backward = len(self._calls)

    def clear(self) -> None:
        """Forget the step."""
        self._calls.clear()
        self._before_backward = 0

    def birth_of(self, target: Tensor) -> ScriptBirth | None:
        """Return which call first made the NaN or Inf of a tensor; None: none is known
        to have made it of finite values.
        """
        calls = list(self._calls)
        place = _maker(calls, target, len(calls))
        while place is not None:
            call = calls[place]
            bad = [v for v in _values(call.read) if _is_bad(v, calls)]
            if not bad:
                return _explained(call)
            makers = (_maker(calls, value, place) for value in bad)
            place = min((m for m in makers if m is not None), default=None)
        return None

    def birth_in_gradients(self) -> ScriptBirth | None:
        """Return which call after the backward pass first made a NaN or Inf of finite
        values.
        """
        calls = list(self._calls)
        for call in calls[self._before_backward :]:
            results = _values(call.results)
            read = _values(call.read)
            is_born = any(_is_bad(value, calls) for value in results)
            if is_born and not any(_is_bad(value, calls) for value in read):
                return _explained(call)
        return None

    def first_reader(self, target: Tensor) -> str | None:
        """Return the line of the call that ``target`` comes from, from the first bad
        value on that none of the script's calls has made; None where none did.
        """
        calls = list(self._calls)
        place = _maker(calls, target, len(calls))
        line = None
        while place is not None:
            call = calls[place]
            line = call.line
            bad = [v for v in _values(call.read) if _is_bad(v, calls)]
            makers = (_maker(calls, value, place) for value in bad)
            place = min((m for m in makers if m is not None), default=None)
        return line

    def of_node(self, sequence: int) -> ScriptBirth | None:
        """Return the call that made an autograd node, whose gradient is not finite, by
        the number of the node.
        """
        calls = [call for call in self._calls if call.sequence >= 0]
        place = bisect_left([call.sequence for call in calls], sequence)
        if place == len(calls):
            return None
        call = calls[place]
        read = [_statistics(value) for value in _values(call.read)]
        return ScriptBirth(
            operator=call.operator,
            line=call.line,
            cause=_of_derivative(call.operator, read) + _shown(call.operator, read),
            advice=(
                "keep what it reads off that point (clamp it, or add a small number "
                "inside a root or norm), and select with torch.where before it rather "
                "than after it"
            ),
        )


def _of_derivative(operator: str, read: Sequence[TensorRecord]) -> str:
    """Say why the gradient that an operator gives back is not finite."""
    name = base(operator)
    at_zero = ("take roots", "take logarithms", "divide")
    has_pole = any(name in operators_that(trait) for trait in at_zero)
    if has_pole and any(record.zero for record in read):
        return f"the derivative of {operator} at 0 is infinite"
    domain = facts(name).domain
    if domain is not None:
        return f"the derivative of {operator} at the border of {domain} is infinite"
    return f"the gradient that {operator} gives back is the first that is not finite"


@contextmanager
def _warnings_at_the_users_line() -> Iterator[None]:
    """Show torch's warnings at the script's line rather than at the call made here."""
    original = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        frame = _frame_of_user() if filename == __file__ else None
        if frame is not None:
            filename = frame.f_code.co_filename
            lineno = frame.f_lineno
        original(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = original


def _frame_of_user() -> FrameType | None:
    """Return the frame that called the innermost torch function which is noted here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _HANDLER:
        frame = frame.f_back
    return None if frame is None else frame.f_back


_HANDLER = ScriptCalls.__torch_function__.__code__


def _is_captured() -> bool:
    """Return True where a compiler or tracer looks at what runs."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _leaves(arguments: tuple[tuple[Any, ...], dict[str, Any] | None]) -> list[Any]:
    args, kwargs = arguments
    return [*args, *(kwargs or {}).values()]


def _tensors(values: Any) -> Iterator[Tensor]:
    if type(values) in (Tensor, nn.Parameter):
        if not torch._C._functorch.is_functorch_wrapped_tensor(values):
            yield values
    elif isinstance(values, tuple | list):
        for value in values[: _MANY + 1]:
            yield from _tensors(value)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _SMALL


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _sequence(tensor: Tensor) -> int:
    node: Any = tensor.grad_fn
    return -1 if node is None else int(node._sequence_nr())


def _operator(name: str) -> str:
    """Return torch's name of a function.

    >>> _operator("__truediv__"), _operator("log_"), _operator("softmax")
    ('div', 'log', 'softmax')
    """
    plain = name.strip("_")
    return _OPERATORS.get(plain, plain)


def _values(held: Sequence[_Held]) -> list[Tensor]:
    values = (each.value() for each in held)
    return [value for value in values if value is not None]


def _maker(calls: Sequence[_Call], target: Tensor, before: int) -> int | None:
    """Return the place of the last call before one that made a tensor."""
    for place in range(before - 1, -1, -1):
        if any(held.value() is target for held in calls[place].results):
            return place
    return None


def _is_bad(value: Tensor, calls: Sequence[_Call]) -> bool:
    """Return True for NaN or Inf that no constant of the script's is."""
    if bool(torch.isfinite(value).all()):
        return False
    if bool(torch.isnan(value).any()):
        return True
    place = _maker(calls, value, len(calls))
    return place is None or not _is_constant(calls, place)


def _is_constant(calls: Sequence[_Call], place: int) -> bool:
    """Return True where a call writes a constant: the Inf of a mask."""
    call = calls[place]
    if call.operator == _operator(_WRITES):
        return True
    if base(call.operator) in operators_that("write constants"):
        return True
    infinite = [v for v in _values(call.read) if not bool(torch.isfinite(v).all())]
    makers = [_maker(calls, value, place) for value in infinite]
    return bool(makers) and all(
        m is not None and _is_constant(calls, m) for m in makers
    )


def _explained(call: _Call) -> ScriptBirth:
    bad = next((v for v in _values(call.results) if not torch.isfinite(v).all()), None)
    read = [_statistics(value) for value in _values(call.read)]
    output = TensorRecord(operator=call.operator, nan=1, posinf=0, neginf=0)
    if bad is not None:
        output = _statistics(bad, call.operator)
    cause, advice = explain_birth(output, read)
    if call.operator == _operator(_WRITES):
        cause = "the script writes it there"
        advice = "look at the value that is written"
    return ScriptBirth(
        operator=call.operator,
        line=call.line,
        cause=cause + _shown(call.operator, read),
        advice=advice,
    )


def _shown(operator: str, read: Sequence[TensorRecord]) -> str:
    """Say what a call reads, in brackets."""
    texts = [_range(record) for record in read if record.numel]
    if not texts:
        return ""
    if operator == "div" and len(texts) == len(_DIVISION):
        named = zip(_DIVISION, texts, strict=True)
        return f" ({', '.join(f'the {name} is {text}' for name, text in named)})"
    if operator == "reciprocal":
        return f" (the divisor is {texts[0]})"
    return f" (it reads {' and '.join(texts)})"


def _statistics(value: Tensor, operator: str = "") -> TensorRecord:
    """Return the statistics of a value as a recording has them."""
    plain = value.detach()
    with torch.no_grad():
        finite = plain[torch.isfinite(plain)]
    return TensorRecord(
        operator=operator,
        phase="forward",
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(value.shape),
        numel=value.numel(),
        nan=int(torch.isnan(plain).sum()),
        posinf=int(torch.isposinf(plain).sum()),
        neginf=int(torch.isneginf(plain).sum()),
        zero=int((plain == 0).sum()),
        min=float(finite.min()) if finite.numel() else None,
        max=float(finite.max()) if finite.numel() else None,
    )


def _range(record: TensorRecord) -> str:
    """Say what a tensor holds.

    >>> _range(TensorRecord(numel=8, zero=2, min=0.0, max=3.0, shape=(8,)))
    'values (8,) from 0 to 3, 2 zeros'
    """
    shape = tuple(record.shape or ())
    what = f"values {shape}" if shape else "a number"
    if record.min is None or record.max is None:
        return what
    if record.min == record.max:
        return f"{what}, {'all ' if shape else ''}{record.min:.4g}"
    counts = {"zero" if record.zero == 1 else "zeros": record.zero}
    counts |= {"-inf": record.neginf, "+inf": record.posinf}
    counted = "".join(
        f", {number:,} {kind}" for kind, number in counts.items() if number
    )
    return f"{what} from {record.min:.4g} to {record.max:.4g}{counted}"
