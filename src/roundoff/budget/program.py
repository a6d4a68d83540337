"""A forward pass as a program: the calls of torch that it made, to be run again.

Where one call's result is changed, only what follows from it runs again, without the
model's own Python code. What that code did with values that it read (a branch, a size)
stands as it was recorded; a run in which such a value, or the shape of a result, comes
out otherwise is given up, because the model would have done something else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from roundoff.errors import WorkloadError
from roundoff.ops import Operator, float_tensors, function_body, operators_that

_READS = operators_that("give numbers to Python")
#: Bytes of results from which on a forward pass is not kept.
MOST_BYTES = 2**28


#: The number of each call, and its function.
Calls = tuple[tuple[int, Callable[..., Any]], ...]


class DivergedError(Exception):
    """The model would have gone on in another way than the recorded one."""


#: What a call raises that cannot run with other values: the run is given up.
GIVEN_UP = (DivergedError, RuntimeError, LookupError, ValueError, ArithmeticError)


@dataclass(eq=False, slots=True)
class Step:
    """One call of torch in a program.

    Attributes:
        number: of the call, among all functions of torch that the forward pass called.
        func: the function.
        args: as they were given; their tensors are those of the recorded pass.
        kwargs: likewise.
        results: the tensors that it returned.
        value: what it gave to Python, where it returned no tensor.
        reads: the memory that it reads, see ``_memory``.
        writes: the memory that its results lie in, and that it writes into.
        mutates: the memory that it writes into.
        places: positions of the arguments that are tensors which the program made, each
            with the tensor's id.
        nested: positions of other arguments with such tensors in them.
        names: keywords of arguments with such tensors.
        alone: the id and the shape of a result that is a tensor; None for others.
    """

    number: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor, ...]
    value: Any
    reads: frozenset[int]
    writes: frozenset[int]
    mutates: frozenset[int]
    places: tuple[tuple[int, int], ...] = ()
    nested: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    alone: tuple[int, torch.Size] | None = None

    @property
    def is_read(self) -> bool:
        """True where values of tensors went to Python."""
        return not self.results and not self.mutates

    @property
    def inputs(self) -> set[int]:
        """The ids of the tensors among its arguments."""
        return set(map(id, _tensors((self.args, self.kwargs))))

    def link(self, made: set[int]) -> None:
        """Find the arguments that earlier steps made, and add the results to ``made``."""
        holding = [
            (place, value)
            for place, value in enumerate(self.args)
            if _holds(value, made)
        ]
        self.places = tuple(
            (place, id(value)) for place, value in holding if isinstance(value, Tensor)
        )
        self.nested = tuple(
            place for place, value in holding if not isinstance(value, Tensor)
        )
        self.names = tuple(
            name for name, value in self.kwargs.items() if _holds(value, made)
        )
        made.update(map(id, self.results))

    def arguments(
        self, changed: Mapping[int, Tensor]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments; ``changed`` has other tensors for those of these ids."""
        args: Sequence[Any] = self.args
        if self.places or self.nested:
            args = list(args)
            for place, tensor in self.places:
                args[place] = changed.get(tensor, args[place])
            for place in self.nested:
                args[place] = _replaced(args[place], changed)
        kwargs = self.kwargs
        if self.names:
            new = {name: _replaced(kwargs[name], changed) for name in self.names}
            kwargs = {**kwargs, **new}
        return args, kwargs

    def keep(self, result: Any, changed: dict[int, Tensor]) -> None:
        """Note the result of running it once more; raise ``DivergedError`` if it is none of the kind."""
        if self.alone is not None and isinstance(result, Tensor):
            number, shape = self.alone
            if result.shape != shape:
                raise DivergedError("another shape")
            changed[number] = result
            return
        if self.is_read:
            if not _same(result, self.value):
                raise DivergedError("another value was read")
            return
        results = [result] if isinstance(result, Tensor) else _tensors(result)
        if len(results) != len(self.results):
            raise DivergedError("another number of results")
        for old, new in zip(self.results, results, strict=True):
            if old.shape != new.shape:
                raise DivergedError("another shape")
            changed[id(old)] = new


class ProgramMode(TorchFunctionMode):
    """Keeps every call of a forward pass. It names nothing, and no module needs a hook.

    Attributes:
        steps: the calls so far that returned or wrote tensors, or gave values to Python.
        number: how many functions of torch were called.
        kept_bytes: of all results.
        is_whole: False once a call was seen that cannot be kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.number = 0
        self.kept_bytes = 0
        self.is_whole = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.number += 1
        body = function_body(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        if not self.is_whole:
            return func(*args, **kwargs)
        read = _tensors((args, kwargs))
        self.is_whole = not any(map(_is_wrapped, read))
        versions = [tensor._version for tensor in read]
        result = func(*args, **kwargs)
        written = [
            tensor
            for tensor, version in zip(read, versions, strict=True)
            if tensor._version != version
        ]
        self._keep(func, args, kwargs, result, read, written)
        return result

    def _keep(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        result: Any,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> None:
        results = tuple(_tensors(result))
        gives_values = read and Operator.of(func).name in _READS
        if not (results or written or gives_values):
            return
        self.is_whole = self.is_whole and not any(map(_is_wrapped, results))
        self.kept_bytes += sum(tensor.nbytes for tensor in results)
        if not self.is_whole or self.kept_bytes > MOST_BYTES:
            self.is_whole = False
            self.steps = []
            return
        mutates = frozenset(map(_memory, written))
        step = Step(
            number=self.number,
            func=func,
            args=tuple(args),
            kwargs=dict(kwargs),
            results=results,
            value=None if results else result,
            reads=frozenset(map(_memory, read)),
            writes=mutates | frozenset(map(_memory, results)),
            mutates=mutates,
            alone=(id(result), result.shape) if isinstance(result, Tensor) else None,
        )
        self.steps.append(step)


class Program:
    """The steps of a forward pass, and which of them follow from which.

    Args:
        steps: in order.
        targets: what the pass computes, by name.
    """

    def __init__(self, steps: Sequence[Step], targets: Mapping[str, Tensor]) -> None:
        self.steps = steps
        self.targets = targets
        self._places = {step.number: place for place, step in enumerate(steps)}
        self._orders: dict[int, list[int]] = {}
        numbered: set[int] = set()
        self._created: set[int] = set()
        self._last_write: dict[int, int] = {}
        for place, step in enumerate(steps):
            step.link(numbered)
            self._created |= step.writes - step.mutates
            self._last_write.update(dict.fromkeys(step.mutates, place))
        self._is_useful = self._useful()
        self._last_used = self._last_uses(numbered)

    @property
    def calls(self) -> Calls:
        """What the pass called, in order; equal for batches that ran alike."""
        return tuple((step.number, step.func) for step in self.steps)

    @property
    def nbytes(self) -> int:
        """Bytes of all results, some of which may be views."""
        return sum(tensor.nbytes for step in self.steps for tensor in step.results)

    @property
    def writes_over(self) -> bool:
        """True if some step writes into memory that another made."""
        return bool(self._last_write)

    def run(
        self, change: Callable[[Step, Sequence[Any], dict[str, Any]], Any], number: int
    ) -> dict[str, Tensor]:
        """Run what follows from call ``number``, whose result ``change`` gives.

        ``change`` gets the step and its arguments. Returns the targets by name. Raises
        ``DivergedError`` where the model would have gone on in another way.
        """
        place = self._places.get(number)
        if place is None:
            raise DivergedError("no such call")
        return self._run(self._order(place), {place: change})

    def _order(self, place: int) -> list[int]:
        order = self._orders.get(place)
        if order is None:
            order = self._orders[place] = self._following([place])
        return order

    def step(self, number: int) -> Step | None:
        """Return the step that is call ``number``."""
        place = self._places.get(number)
        return None if place is None else self.steps[place]

    def share_after(self, number: int) -> float:
        """Return the share of the steps that follow from call ``number``; 1 without it."""
        place = self._places.get(number)
        if place is None:
            return 1.0
        return len(self._order(place)) / len(self.steps)

    def run_changed(
        self,
        change: Callable[[Step, Sequence[Any], dict[str, Any]], Any],
        numbers: Collection[int],
    ) -> dict[str, Tensor]:
        """Run what follows from some calls, with their results changed."""
        changes = {self._places[n]: change for n in numbers if n in self._places}
        order = self._following(changes) if changes else []
        return self._run(order, changes)

    def _run(
        self, order: Sequence[int], changes: Mapping[int, Callable[..., Any]]
    ) -> dict[str, Tensor]:
        changed: dict[int, Tensor] = {}
        for place in order:
            step = self.steps[place]
            args, kwargs = step.arguments(changed)
            if place in changes:
                result = changes[place](step, args, kwargs)
            else:
                result = step.func(*args, **kwargs)
            step.keep(result, changed)
            for tensor in self._last_used[place]:
                changed.pop(tensor, None)
        return {name: changed.get(id(t), t) for name, t in self.targets.items()}

    def _last_uses(self, made: set[int]) -> list[tuple[int, ...]]:
        """Return for each step the ids of the tensors that no later one, and no target, is.

        Of those ``made`` by the program.
        """
        needed = set(map(id, self.targets.values()))
        last_uses = []
        for step in reversed(self.steps):
            used = (step.inputs | set(map(id, step.results))) & made
            last_uses.append(tuple(used - needed))
            needed |= used
        return last_uses[::-1]

    def _useful(self) -> list[bool]:
        """Return for each step if the targets, or what Python does, follow from it."""
        needed = set(map(_memory, self.targets.values()))
        useful = []
        for step in reversed(self.steps):
            is_useful = step.is_read or not step.writes.isdisjoint(needed)
            if is_useful:
                needed |= step.reads
            useful.append(is_useful)
        return useful[::-1]

    def _following(self, starts: Collection[int]) -> list[int]:
        """Return the steps to run when some have other results, in their order."""
        other: set[int] = set()
        order = []
        for place in range(min(starts), len(self.steps)):
            step = self.steps[place]
            is_reached = self._is_useful[place] and not step.reads.isdisjoint(other)
            if place in starts or is_reached:
                order.append(place)
                other |= step.writes
        return self._with_writes(order) if self.writes_over else order

    def _with_writes(self, order: Sequence[int]) -> list[int]:
        """Add the steps that bring memory which is written over to what it was."""
        chosen = set(order)
        waiting = list(order)
        while waiting:
            place = waiting.pop()
            for memory in self.steps[place].reads | self.steps[place].writes:
                if self._last_write.get(memory, -1) < place:
                    continue
                if memory not in self._created:
                    raise DivergedError("writes into what was there before")
                touching = self._touching(memory) - chosen
                chosen |= touching
                waiting += touching
        return sorted(chosen)

    def _touching(self, memory: int) -> set[int]:
        return {place for place, step in enumerate(self.steps) if memory in step.writes}


class _PerturbingMode(TorchFunctionMode):
    """Perturbs the results of some calls of a forward pass, by their numbers."""

    def __init__(self, numbers: Collection[int], size: float) -> None:
        super().__init__()
        self.numbers = numbers
        self.size = size
        self.number = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.number += 1
        number = self.number
        body = function_body(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        if number in self.numbers:
            return _perturbed(func, args, kwargs, self.size)
        return func(*args, **kwargs)


def record_program(
    forward: Callable[[], dict[str, Tensor]],
    numbers: Collection[int],
    seen: Calls = (),
) -> Program | None:
    """Record a forward pass; None where it cannot be run again as a program.

    So it is where something of it is not seen (a scripted module, a kernel of the
    user's, a detour over numpy), which shows in a second pass: with the results of the
    calls ``numbers`` a little changed, the program must give what the model gives.
    That was shown before for another batch whose calls were ``seen``, the same ones.
    """
    mode = ProgramMode()
    with torch.no_grad(), mode:
        targets = forward()
    if not mode.is_whole:
        return None
    program = Program(mode.steps, targets)
    if seen and program.calls == seen:
        return program
    agrees = any(
        _agrees(program, forward, numbers, size) for size in (_PERTURBATION, _SMALLER)
    )
    return program if agrees else None


#: Relative perturbations, in units of the unit roundoff; the smaller one seldom changes
#: a decision.
_PERTURBATION = 2.0**9
_SMALLER = 2.0**4
#: The program's targets may differ from the model's by this share of the perturbation.
_TOLERANCE = 0.1


def _agrees(
    program: Program,
    forward: Callable[[], dict[str, Tensor]],
    numbers: Collection[int],
    size: float,
) -> bool:
    """Return True if the program and the model do the same with perturbed results."""

    def perturb(step: Step, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return _perturbed(step.func, args, kwargs, size)

    with torch.no_grad():
        try:
            ours = program.run_changed(perturb, numbers)
            with _PerturbingMode(numbers, size):
                theirs = forward()
        except (*GIVEN_UP, WorkloadError):
            return False
    return all(
        name in theirs and _is_near(ours[name], theirs[name], exact)
        for name, exact in program.targets.items()
    )


def _perturbed(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], size: float
) -> Any:
    """Run a call, and change its floating-point results a little, elements differently."""
    result = func(*args, **kwargs)
    if Operator.of(func).inplace or "out" in kwargs:
        for tensor in float_tensors(result):
            tensor.mul_(_factors(tensor, size))
        return result
    return tree_map_only(
        Tensor,
        lambda t: t * _factors(t, size) if t.is_floating_point() else t,
        result,
    )


def _factors(tensor: Tensor, size: float) -> Tensor:
    """Return factors near 1, which no scale takes out of a tensor.

    Those of whole numbers are 1: a count that is no whole number any more may be cut to
    the next one, and be the wrong size of what follows.
    """
    unit = min(size * torch.finfo(tensor.dtype).eps, 2.0**-4)
    places = torch.arange(tensor.numel(), device=tensor.device) % 7 - 3
    factors = (1 + unit * places).to(tensor.dtype).view(tensor.shape)
    return factors.masked_fill_(tensor == tensor.round(), 1.0)


def _is_near(ours: Tensor, theirs: Tensor, exact: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    is_finite = exact.isfinite()
    difference = (ours.double() - theirs.double())[is_finite]
    effect = (theirs.double() - exact.double())[is_finite]
    return bool(difference.norm() <= _TOLERANCE * effect.norm())


def _holds(value: Any, made: set[int]) -> bool:
    return any(id(tensor) in made for tensor in _tensors(value))


def _replaced(value: Any, changed: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return changed.get(id(value), value)
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, changed) for item in value)
    return tree_map_only(Tensor, lambda t: changed.get(id(t), t), value)


#: Arguments without a tensor in them.
_NUMBERS = (type(None), bool, int, float, str, torch.dtype, torch.Size)


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a nest of arguments or results, in order."""
    return list(_each_tensor(value))


def _each_tensor(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            if type(item) not in _NUMBERS:
                yield from _each_tensor(item)
    elif type(value) not in _NUMBERS:
        leaves = tree_leaves(value)
        yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))


def _memory(tensor: Tensor) -> int:
    """Return what stands for the memory that a tensor lies in; views share it."""
    if tensor.layout is torch.strided and tensor.numel():
        return tensor.untyped_storage().data_ptr()
    return -id(tensor)


def _is_wrapped(tensor: Tensor) -> bool:
    """Return True inside torch.vmap or torch.func, where memory cannot be told."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=True)
    return bool(one == other)
