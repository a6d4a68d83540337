"""Trials: one site rounded alone, and its whole effect on the target, not to first order.

The model runs once more for each part of the site that rounding changes, each on top of
the parts before it. The differences of the target are projected on the sign vectors
that the adjoint uses, so that a trial gives the same rows; then they are transformed
so that their mean products are those of the differences themselves: a trial has no
sampling error, and its cross terms with other sites keep their meaning.
"""

from __future__ import annotations

import itertools
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from roundoff.budget.decisions import CallPlace, CallPlaces, FollowingMode
from roundoff.budget.noise_power import casts
from roundoff.budget.program import (
    GIVEN_UP,
    Calls,
    DivergedError,
    Program,
    Step,
    record_program,
)
from roundoff.budget.terms import TermKey
from roundoff.budget.trial_rows import (
    Change,
    OutputView,
    TrialRows,
    TriedRow,
    add_projections,
)
from roundoff.budget.trial_signs import DrawnSigns
from roundoff.errors import WorkloadError
from roundoff.formats import Format, parse_format
from roundoff.ops import (
    Call,
    CallMode,
    RoundedOperands,
    Rounder,
    RoundingStep,
    execute,
    float_tensors,
    function_body,
    rounding_steps,
    watch,
)
from roundoff.plan import Plain, named_targets, run_batches
from roundoff.preserve import preserve, random_states
from roundoff.workload import Workload

#: A site and a format.
Pair = tuple[str, Format]

#: Bytes of differences of the target that are kept before they are projected.
MOST_HELD = 2**25
#: Trials of a batch from which on it is recorded as a program first, which costs as much
#: as some trials by the model itself.
FEWEST_TRIALS = 4

#: Bytes of programs that are kept for later, of several batches together.
MOST_KEPT = 2**26

#: The part that stands for all parts, where they were measured as one.
WHOLE_PART = "output"


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """One batch of the unrounded model: where its sites are called, and the target."""

    places: Mapping[str, CallPlace]
    targets: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Recording:
    """The unrounded model on all batches.

    Attributes:
        target: see ``roundoff.budget``.
        batches: those that were recorded, by their number.
        is_pure: a forward pass leaves the model and the random state as they were.
    """

    target: str | None
    batches: Mapping[int, RecordedBatch]
    is_pure: bool

    @property
    def decides(self) -> bool:
        """True if errors of some site reach a decision that the target depends on.

        Values made under ``torch.no_grad`` have no gradient, but may decide nothing.
        """
        places = [p for batch in self.batches.values() for p in batch.places.values()]
        return any(place.decides and place.has_gradient for place in places)

    def places(self, site: str) -> list[CallPlace]:
        """Return the calls of a site, one for each batch that has it."""
        batches = self.batches.values()
        return [batch.places[site] for batch in batches if site in batch.places]

    @property
    def sites(self) -> list[str]:
        """Every site, in the order of the first calls."""
        batches = self.batches.values()
        return list(dict.fromkeys(site for batch in batches for site in batch.places))


def record(
    workload: Workload, target: str | None = None, batches: int | None = None
) -> Recording:
    """Run the unrounded model, ``prepared``, and follow where its errors would go.

    On all batches, or on the first ones.
    """
    handler = CallPlaces()
    handler.wanted = _wanted(target)
    recorded = {}
    before = _fingerprint(workload.model)
    with watch(workload.model, handler, FollowingMode) as mode:
        for index, batch in enumerate(workload.batches[:batches]):
            mode.begin()
            with torch.enable_grad(), mode:
                output = workload.run(batch)
                targets = named_targets(
                    workload, batch, output, target, handler.wanted_output
                )
            places = handler.finished(targets.values())
            values = {name: value.detach() for name, value in targets.items()}
            recorded[index] = RecordedBatch(places, values)
    is_pure = _fingerprint(workload.model) == before
    return Recording(target, recorded, is_pure)


def _wanted(target: str | None) -> str | None:
    """Return the target where it is a site."""
    return target if target is not None and "/" in target else None


def _fingerprint(model: nn.Module) -> list[Any]:
    """Return what changes when a forward pass leaves something behind.

    Values of buffers are told by torch's count of writes.
    """
    buffers = [(id(buffer), buffer._version) for buffer in model.buffers()]
    attributes = [
        {name: id(value) for name, value in vars(module).items() if name != "training"}
        for module in model.modules()
    ]
    states = [state.tolist() for state in random_states()]
    return [states, buffers, attributes]


class _QuickMode(TorchFunctionMode):
    """Runs one call in another way; made as cheap as a mode can be.

    It names nothing and asks nobody, and no module needs a hook: the call is the one
    with a number among those of the forward pass. Up to that call the model computes
    what it computed when it was recorded, so the numbers are the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place: CallPlace | None = None
        self.change: Callable[[Call], Any] | None = None
        self.left = 0

    def begin(self, place: CallPlace, change: Callable[[Call], Any]) -> None:
        """Start a forward pass in which ``change`` runs the call at ``place``."""
        self.place = place
        self.change = change
        self.left = place.number

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.left <= 0:
            return func(*args, **kwargs)
        self.left -= 1
        if not self.left:
            return self._changed(func, args, kwargs)
        body = function_body(func)
        if body is None:
            return func(*args, **kwargs)
        with self:
            return body(*args, **kwargs)

    def _changed(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the call in the other way; as it is, where it is not the one recorded."""
        place = self.place
        if place is None or self.change is None or place.call.func is not func:
            return func(*args, **kwargs)
        return self.change(call_at(place, args, kwargs))


def call_at(place: CallPlace, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """Return the call that was recorded at a place, with these arguments."""
    inputs = {key: value for key, value in kwargs.items() if key != "out"}
    leaves = tree_leaves((list(args), inputs))
    return replace(place.call, leaves=leaves)


class _NamedCall(Plain):
    """The handler that runs the call of one site in another way."""

    def __init__(self, wanted: str | None) -> None:
        super().__init__()
        self.wanted = wanted
        self.site = ""
        self.change: Callable[[Call], Any] | None = None

    def begin(self, place: CallPlace, change: Callable[[Call], Any]) -> None:
        """Start a forward pass in which ``change`` runs the call of a site."""
        self.site = str(place.call.site)
        self.change = change
        self.site_output = None

    def run(self, call: Call) -> Any:
        """Run the call."""
        if str(call.site) == self.site and self.change is not None:
            return self.change(call)
        return call.run()


class _Rounding:
    """One call executed in a format: one part more in each forward pass.

    Weights and biases are one part. So are the operands that it computes with, unless
    the format rounds by a plain cast: a plan pays for each of those by itself.
    With ``in_one`` all parts are one, which takes one forward pass.

    ``steps`` are the parts that change the result, ``unchanged`` the others;
    ``rounder`` rounds the operands. ``recorded`` is the result with nothing rounded,
    where it is known.
    """

    def __init__(
        self, fmt: Format, in_one: bool = False, rounder: Rounder | None = None
    ) -> None:
        self.fmt = fmt
        self.in_one = in_one
        self.rounder = rounder
        self.steps: list[tuple[TermKey, Any]] = []
        self.unchanged: list[TermKey] = []
        self.forwards = 0
        self.recorded: Tensor | None = None
        self._exact: Any = None

    @property
    def keys(self) -> list[TermKey]:
        """The parts that change the result."""
        return [key for key, _ in self.steps]

    @property
    def is_done(self) -> bool:
        """True once every part has been run."""
        return self.forwards >= max(1, len(self.steps))

    def __call__(self, call: Call) -> Any:
        """Run the call with as many parts rounded as there were forward passes."""
        if not self.is_known:
            self._execute(call)
        result = self.next_result()
        if not call.operator.inplace:
            return result
        written: Tensor = call.leaves[0]
        return written.copy_(result)

    @property
    def is_known(self) -> bool:
        """True once the results are known; an in-place call still has to write them."""
        return self._exact is not None

    def next_result(self) -> Any:
        """Return the result with one part more rounded."""
        self.forwards += 1
        return self.steps[self.forwards - 1][1] if self.steps else self._exact

    def _execute(self, call: Call) -> None:
        before = self.recorded
        if before is None:
            before = call.again(list(call.leaves))
        self._exact = before
        steps = rounding_steps(call, self.fmt, before, self.rounder)
        for _, grouped in itertools.groupby(steps, self._part):
            group = list(grouped)
            key = self._key(str(call.site), group)
            after = group[-1].result
            if _differ(before, after):
                self.steps.append((key, after))
            else:
                self.unchanged.append(key)
            before = after

    def _part(self, step: RoundingStep) -> tuple[str, int]:
        """Return what steps have in common that are measured together."""
        if self.in_one:
            return WHOLE_PART, -1
        is_alone = step.part == "activation" and casts(self.fmt.name)
        if is_alone and step.operand is not None:
            return step.part, step.operand.leaf
        return step.part, -1

    def _key(self, site: str, steps: Sequence[RoundingStep]) -> TermKey:
        if self.in_one:
            return TermKey(site, self.fmt.name, WHOLE_PART, -1, ())
        operands = [step.operand for step in steps if step.operand is not None]
        first = operands[0].leaf if operands else -1
        sources = {name for operand in operands for name in operand.sources}
        return TermKey(
            site, self.fmt.name, steps[0].part, first, tuple(sorted(sources))
        )


def _differ(before: Any, after: Any) -> bool:
    pairs = zip(float_tensors(before), float_tensors(after), strict=True)
    return not all(torch.equal(exact, rounded) for exact, rounded in pairs)


def measure_by_trial(
    workload: Workload,
    recording: Recording,
    pairs: Iterable[Pair],
    views: Sequence[OutputView],
    signs: Sequence[DrawnSigns],
    progress: Callable[[int, int], None] | None = None,
    in_one: Collection[Pair] = (),
    programs: Programs | None = None,
) -> dict[Pair, TrialRows]:
    """Measure what rounding each site alone to its format does to the target.

    The model must be ``prepared``, and stays as it is.

    Args:
        workload: model and batches.
        recording: of this workload.
        pairs: sites and formats.
        views: the outputs of the budget.
        signs: of each batch that is measured.
        progress: called after each batch, with their number and that of all.
        in_one: pairs whose parts are measured as one, in one forward pass a batch.
        programs: of the recording; without them they are made here.

    Returns:
        The rows of each pair. A pair that the model refuses to run, or that changes the
        shape of the target, is left out.
    """
    results = {pair: TrialRows(in_one=pair in in_one) for pair in pairs}
    if not results:
        return results
    programs = programs or Programs(workload, recording)
    measured = {drawn.index: drawn for drawn in signs}
    with torch.no_grad(), _one_call(workload, recording) as runner:
        for index in range(len(recording.batches)):
            if index in measured:
                is_worth = len(results) >= FEWEST_TRIALS
                runner.begin(programs.of(index) if is_worth else None)
                _measure_batch(runner, results, views, measured[index])
            runner.run(index)
            if progress is not None:
                progress(index + 1, len(recording.batches))
    return results


def measure_batch_by_trial(
    workload: Workload,
    recording: Recording,
    pairs: Iterable[Pair],
    views: Sequence[OutputView],
    signs: DrawnSigns,
    programs: Programs,
) -> dict[Pair, TrialRows]:
    """Measure the same on one batch alone; ``recording`` need not have others.

    The result is of the kind that ``measure_by_trial`` returns, but for one batch.
    ``programs`` are of the recording.
    """
    results = {pair: TrialRows() for pair in pairs}
    with torch.no_grad(), _one_call(workload, recording) as runner:
        runner.begin(programs.of(signs.index))
        _measure_batch(runner, results, views, signs)
    return results


@contextmanager
def _one_call(workload: Workload, recording: Recording) -> Iterator[_OneCall]:
    """Yield what runs the model with one call changed."""
    handler = _NamedCall(_wanted(recording.target))
    # without a name to look for, no module needs hooks, and compiled code runs
    # uncompiled all the same
    watched = workload.model if handler.wanted else nn.Module()
    with watch(watched, handler) as mode:
        yield _OneCall(workload, recording, mode, handler)


def _measure_batch(
    runner: _OneCall,
    results: dict[Pair, TrialRows],
    views: Sequence[OutputView],
    signs: DrawnSigns,
) -> None:
    """Add what each pair does to one batch; drop those that cannot be measured."""
    batch = runner.recording.batches[signs.index]
    exact = {name: batch.targets[name] for name in signs.names}
    vectors = signs.again(batch.targets)
    tried: list[TriedRow] = []
    held = 0
    for pair, rows in list(results.items()):
        site, fmt = pair
        place = batch.places.get(site)
        if place is None:
            rows.batches.append({})
            continue
        rounding = _Rounding(fmt, rows.in_one, runner.rounder)
        changes = runner.changes(signs.index, place, rounding, exact)
        if changes is None:
            del results[pair]
            continue
        # without any step there was one forward pass, which changed nothing
        changed = dict(zip(rounding.keys, changes, strict=False))
        rows.forwards += rounding.forwards
        tried.append(TriedRow(rows, changed, rounding.unchanged))
        held += sum(change.nbytes for change in changes)
        if held > MOST_HELD:
            add_projections(tried, views, signs, vectors)
            tried = []
            held = 0
    add_projections(tried, views, signs, vectors)


class Programs:
    """The programs of the batches of a recording, made when asked for.

    Attributes:
        workload: whose batches are run.
        recording: of the batches.
        seen: the calls of a batch that can be run again as a program.
        output: of the model, on the batch that was recorded last.
    """

    def __init__(
        self, workload: Workload, recording: Recording, seen: Calls = ()
    ) -> None:
        self.workload = workload
        self.recording = recording
        self.seen = seen
        self.output: Any = None
        self._kept: dict[int, Program | None] = {}

    def of(self, index: int) -> Program | None:
        """Return the program of a batch; None where the model itself must run."""
        if index not in self._kept:
            program = self._recorded(index)
            if program is not None and not self.seen:
                self.seen = program.calls
            self._make_room(program)
            self._kept[index] = program
        return self._kept[index]

    def forget(self) -> None:
        """Keep no program; what was seen of them stays known."""
        self._kept.clear()

    def like_first(self, count: int) -> Recording | None:
        """Return a recording of the first batches without following them.

        None where one of them calls something else than the first, which was followed.
        """
        first = self.recording.batches[0]
        batches = {0: first}
        for index in range(1, count):
            program = self.of(index)
            if program is None or program.calls != self.seen:
                return None
            batches[index] = RecordedBatch(first.places, program.targets)
        self.recording = replace(self.recording, batches=batches)
        return self.recording

    def _make_room(self, program: Program | None) -> None:
        """Let programs go where all of them would be too large to keep."""
        kept = [other for other in self._kept.values() if other is not None]
        new = 0 if program is None else program.nbytes
        if sum(other.nbytes for other in kept) + new > MOST_KEPT:
            self.forget()

    def _recorded(self, index: int) -> Program | None:
        needs_names = _wanted(self.recording.target) is not None
        if needs_names or not self.recording.is_pure:
            return None
        batch = self.workload.batches[index]
        self.output = None

        def forward() -> dict[str, Tensor]:
            output = self.workload.run(batch)
            # the first pass; another checks the program with other values
            self.output = output if self.output is None else self.output
            target = self.recording.target
            return named_targets(self.workload, batch, output, target, None)

        batches = self.recording.batches
        followed = batches[index if index in batches else min(batches)]
        numbers = {place.number for place in followed.places.values()}
        # compiled code runs uncompiled
        with watch(nn.Module(), Plain()):
            return record_program(forward, numbers, self.seen)

    def rounded(
        self, index: int, formats: Mapping[str, str]
    ) -> dict[str, Tensor] | None:
        """Return the targets of a batch with sites in formats; None where the model refuses."""
        program = self.of(index)
        if program is not None:
            with suppress(*GIVEN_UP), torch.no_grad():
                return self._run_rounded(program, index, formats)
        try:
            ran = run_batches(
                self.workload,
                formats,
                target=self.recording.target,
                batches=slice(index, index + 1),
            )
        except WorkloadError:
            return None
        return ran.targets[0]

    def _run_rounded(
        self, program: Program, index: int, formats: Mapping[str, str]
    ) -> dict[str, Tensor]:
        places = self.recording.batches[index].places
        chosen = {
            places[site].number: (places[site], parse_format(name))
            for site, name in formats.items()
            if site in places
        }

        def changed(step: Step, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            place, fmt = chosen[step.number]
            return execute(call_at(place, args, kwargs), fmt)

        return program.run_changed(changed, chosen)


class _OneCall:
    """Runs the model with one call changed."""

    def __init__(
        self,
        workload: Workload,
        recording: Recording,
        mode: CallMode,
        handler: _NamedCall,
    ) -> None:
        self.workload = workload
        self.recording = recording
        self.mode = mode
        self.handler = handler
        self.quick = _QuickMode()
        self.program: Program | None = None
        self.rounder: RoundedOperands | None = None
        self.parameters = {p.data_ptr() for p in workload.model.parameters()}
        self.calls: dict[int, Call] = {}

    def begin(self, program: Program | None) -> None:
        """Start a batch, with its program where it has one."""
        self.program = program
        self.calls = {}
        # operands stay what they are, unless the program writes over them
        keeps = program is not None and not program.writes_over
        before = self.rounder or RoundedOperands()
        before.keep_only(self.parameters)
        self.rounder = before if keeps else None

    def _run_program(
        self, program: Program, place: CallPlace, change: _Rounding
    ) -> dict[str, Tensor]:
        """Run what follows from the call at a place, which ``change`` runs."""

        def changed(step: Step, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            if step.func is not place.call.func:
                raise DivergedError("another call")
            if change.is_known and not step.mutates:
                return change.next_result()
            if self.rounder is None:
                return change(call_at(place, args, kwargs))
            if step.number not in self.calls:
                self.calls[step.number] = call_at(place, args, kwargs)
            if step.alone is not None:
                change.recorded = step.results[0]
            return change(self.calls[step.number])

        return program.run(changed, place.number)

    def targets(
        self, index: int, place: CallPlace, change: _Rounding
    ) -> dict[str, Tensor]:
        """Return the target tensors of a batch with the call at ``place`` changed."""
        passes = change.forwards
        if self.program is not None:
            try:
                return self._run_program(self.program, place, change)
            except GIVEN_UP:
                change.forwards = passes
        batch = self.workload.batches[index]
        self.mode.begin()
        self.quick.begin(place, change)
        self.handler.begin(place, change)
        is_pure = self.recording.is_pure
        kept = nullcontext() if is_pure else preserve(self.workload.model)
        # where a site is the target, calls must have their names
        way = self.quick if self.handler.wanted is None else self.mode
        with kept, way:
            output = self.workload.run(batch)
            return named_targets(
                self.workload,
                batch,
                output,
                self.recording.target,
                self.handler.site_output,
            )

    def changes(
        self,
        index: int,
        place: CallPlace,
        rounding: _Rounding,
        exact: Mapping[str, Tensor],
    ) -> list[Change] | None:
        """Return what each part of one call changes; None where that is not measured.

        So it is where the model refuses the rounded values, or returns other shapes.
        ``exact`` are the target tensors to be compared.
        """
        before = exact
        changes = []
        while not rounding.is_done:
            passes = rounding.forwards
            try:
                ran = self.targets(index, place, rounding)
            except WorkloadError:
                return None
            after = {name: ran[name] for name in exact if name in ran}
            if rounding.forwards == passes or not same_shapes(before, after):
                return None
            changes.append(Change.between(before, after))
            before = after
        return changes

    def run(self, index: int) -> None:
        """Run a batch as it is, where the next one begins with what it leaves behind."""
        if not self.recording.is_pure:
            self.workload.run(self.workload.batches[index])


def same_shapes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Return True if the target tensors of two forward passes are of like shapes."""
    shapes = [
        {name: tensor.shape for name, tensor in targets.items()}
        for targets in (before, after)
    ]
    return shapes[0] == shapes[1]
