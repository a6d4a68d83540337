"""The adjoint error budget: what every site's rounding costs the output.

One forward and one batched backward pass are enough. With z the target tensor and J_i
the Jacobian of z by the output of site i, an error e_i at that output changes z by
J_i e_i to first order. For random sign vectors v, E[(v . J_i e_i)^2] = |J_i e_i|^2
because E[v v^T] = I (M. F. Hutchinson, Commun. Stat. Simul. 18, 1989, eq. 2-4, applied
to (J e)(J e)^T); one vector-Jacobian product gives v^T J_i for all sites. The error e_i
in a format is what the operator itself computes differently when its operands, weights
and output are rounded (``roundoff.ops.steps``), so a new format costs no new pass.
Errors are computed in the backward hooks, projected on the K probe gradients of that
site, and dropped.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from roundoff.budget.facts import MeasuredSite
from roundoff.budget.linear_errors import (
    activations,
    is_linear,
    operand_errors,
    result_errors,
)
from roundoff.budget.probes import backward, hand_over, on_output
from roundoff.budget.samples import Division, sample_axis
from roundoff.budget.scan import exceeds
from roundoff.budget.signs import draw_signs
from roundoff.budget.terms import Projector, TermKey, Terms
from roundoff.budget.written_over import KeptTensor
from roundoff.formats import Format
from roundoff.ops import (
    Call,
    CallMode,
    RoundedOperands,
    execute,
    float_tensors,
    is_floating,
    rounding_steps,
    runs,
    sizes,
)
from roundoff.site import Site

#: Bytes that are not worth another backward pass.
_SMALL = 2**27
#: Bytes of the gradients of all probes at one site below which a call costs more than they.
_TOGETHER_BYTES = 2**22
#: Bytes of the outputs of all sites from which on gradients are stored in bf16.
_LARGE = 2**22
#: Up to here probes cost less one by one than batched, where their gradients may be kept.
FEW_PROBES = 16
#: Share of the sites that may mix samples before another division is tried.
FEW_MIXED = 0.1


class Way(Enum):
    """How the probes of a batch go back.

    TOGETHER: all at once, each operator's backward batched over them (``torch.vmap``).
    STORED: one by one; a site's gradients are kept until the last has come.
    ALONE: one by one, and every error is computed again for each.
    """

    TOGETHER = "together"
    STORED = "stored"
    ALONE = "alone"


@dataclass
class SiteInfo:
    """What is gathered of one site besides its errors; sizes are summed over batches.

    The fields are those of ``MeasuredSite``.
    """

    site: str
    operator: str
    kind: str
    params: tuple[str, ...]
    sizes: dict[str, float]
    refused: dict[str, str]
    no_path: str | None = "its output does not reach the target"
    batches: int = 0
    tied: tuple[str, ...] = ()
    #: True if an output was beyond the range of some format
    exceeds: bool = False

    def measured(self, batches: int) -> MeasuredSite:
        """Return the site as a budget keeps it, with sizes of one of the batches."""
        return MeasuredSite(
            site=self.site,
            operator=self.operator,
            kind=self.kind,
            params=self.params,
            sizes={name: size / batches for name, size in self.sizes.items()},
            refused=self.refused,
            no_path=self.no_path,
            batches=self.batches,
            tied=self.tied,
        )


def describe(
    call: Call,
    outputs: list[Tensor],
    sites: dict[str, SiteInfo],
    formats: Sequence[Format],
) -> SiteInfo:
    """Return what ``sites`` keeps of a call's site, with this call's sizes added."""
    name = str(call.site)
    info = sites.get(name)
    if info is None:
        refusals = {fmt.name: runs(call, fmt) for fmt in formats}
        refused = {
            fmt: reason for fmt, reason in refusals.items() if reason is not None
        }
        parameters = _parameters(call)
        info = SiteInfo(name, call.operator.name, call.kind, parameters, {}, refused)
        sites[name] = info
    info.batches += 1
    for key, value in sizes(call, outputs).items():
        info.sizes[key] = info.sizes.get(key, 0.0) + value
    return info


def _parameters(call: Call) -> tuple[str, ...]:
    """Return the names of the parameters that a call reads; a bias may be computed."""
    operands = [operand for operand in call.operands if operand.role != "activation"]
    sources = {name for operand in operands for name in operand.sources}
    return tuple(sorted(name for name in sources if name and "/" not in name))


#: What a hook does with the gradient of an output: the call, its exact result, the number
#: of the output, and the gradient.
_Receiver = Callable[["Call | _Use", Any, int, Tensor], None]


@dataclass(frozen=True, slots=True)
class _Use:
    """The use of an operand, kept, by a call; its leaves may be gone."""

    call: Call
    operand: Any

    @property
    def site(self) -> Site:
        """Where the call is."""
        return self.call.site


def _place_of(leaf: int) -> int:
    """Return the number that stands for an operand among the places of a call."""
    return -1 - leaf


@dataclass
class Probe:
    """The handler of one batch's forward pass, and what its backward hooks measure.

    Attributes:
        formats: to measure.
        sites: every site so far.
        chosen: format that a site is executed in; None for no rounding.
        anchor: -0.0 with a gradient, added to results that have none.
        wanted: the site whose output is the target; None for another target.
        wanted_output: of the site ``wanted``.
        samples: of the batch.
        axes: axis that counts the samples, by site and number of the output.
        rounded: rounds operands, each once for all that read it.
        terms: projections of every error.
        reached: names of the sites that gradients came back to.
        release: True in the pass that may free operands.
        receive: what hooks do with a gradient; None while nobody listens.
        kept_bytes: bytes of all outputs.
        largest: bytes of the largest output.
        loops: True where some operator's backward has no fast batched form.
        limit: largest number that all formats hold; 0 where that need not be looked at.
    """

    formats: Sequence[Format]
    sites: dict[str, SiteInfo]
    chosen: Callable[[str], Format | None]
    anchor: Tensor
    wanted: str | None = None
    wanted_output: Tensor | None = None
    samples: int = 1
    axes: dict[tuple[str, int], tuple[int, int] | None] = field(default_factory=dict)
    rounded: RoundedOperands = field(default_factory=RoundedOperands)
    terms: Terms = field(default_factory=Terms)
    reached: set[str] = field(default_factory=set)
    release: bool = True
    receive: _Receiver | None = None
    kept_bytes: int = 0
    largest: int = 1
    loops: bool = False
    limit: float = 0.0
    _kept: dict[int, list[weakref.ref[KeptTensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _stored: dict[tuple[int, int], list[Tensor]] = field(
        default_factory=lambda: defaultdict(list)
    )

    @property
    def stored_bytes(self) -> int:
        """Bytes of the gradients of all sites for one probe, as they are stored."""
        is_large = self.kept_bytes > _LARGE
        return self.kept_bytes // 2 if is_large else self.kept_bytes

    @property
    def mixed_share(self) -> float:
        """Share of the sites that mix samples."""
        if self.samples == 1:
            return 1.0
        mixed = {site for (site, _), axis in self.axes.items() if axis is None}
        return len(mixed) / max(1, len({site for site, _ in self.axes}))

    def before_write(self, tensor: Tensor) -> None:
        """Copy what is kept of this storage before it changes."""
        for reference in self._kept.pop(tensor.untyped_storage().data_ptr(), []):
            kept = reference()
            if kept is not None:
                kept.copy()

    def call(self, call: Call) -> Any:
        """Run a call so that gradients reach its output, and listen to them.

        Its errors are measured when they come back.
        """
        leaves = list(call.leaves)
        if call.operator.inplace and isinstance(leaves[0], Tensor):
            leaves[0] = leaves[0].detach().clone()
        chosen = self.chosen(str(call.site))
        edges = self._edges(call)
        exact = _run(call, edges)
        outputs = float_tensors(exact)
        if not outputs:
            return exact
        info = describe(call, outputs, self.sites, self.formats)
        self._count_bytes(outputs)
        if self.limit and not info.exceeds:
            info.exceeds = exceeds(outputs, self.limit)
        self.loops = self.loops or call.kind == "rnn"
        if not torch.is_grad_enabled():
            info.no_path = "computed under torch.no_grad"
            return exact
        kept = copy.copy(call)
        kept.leaves = [self._keep(leaf) for leaf in leaves]
        result, reference = self._attach(exact, kept, chosen)
        tensors = float_tensors(result)
        if info.site == self.wanted and self.wanted_output is None:
            # a copy: what the model writes over it later does not count
            self.wanted_output = tensors[0].clone()
        for place, tensor in enumerate(tensors):
            hook = functools.partial(self._hook, kept, reference, place)
            on_output(tensor, hook, written=call.operator.inplace)
        for leaf, edge in edges.items():
            use = _Use(kept, kept.leaves[leaf])
            hook = functools.partial(self._hook, use, None, _place_of(leaf))
            edge.register_hook(hook)  # type: ignore[no-untyped-call]
        return result

    def _edges(self, call: Call) -> dict[int, Tensor]:
        """Return views of the operands whose errors their own gradients show, by leaf.

        The gradient of a view counts this use of the operand alone.
        """
        if not is_linear(call) or not torch.is_grad_enabled():
            return {}
        edges = {}
        for operand in activations(call):
            value = call.leaves[operand.leaf]
            is_reached = value.requires_grad
            edges[operand.leaf] = (
                value.view_as(value) if is_reached else self._anchored(value, False)
            )
        return edges

    def _count_bytes(self, outputs: Sequence[Tensor]) -> None:
        written = [tensor.numel() * tensor.element_size() for tensor in outputs]
        self.kept_bytes += sum(written)
        self.largest = max(self.largest, *written)

    def _keep(self, value: Any) -> Any:
        """Return a tensor as it is kept for the backward pass, other values as is."""
        return self.keep(value) if isinstance(value, Tensor) else value

    def keep(self, tensor: Tensor) -> KeptTensor:
        """Keep a tensor as it is now, whatever the model writes over it."""
        kept = KeptTensor(tensor)
        self._kept[tensor.untyped_storage().data_ptr()].append(weakref.ref(kept))
        return kept

    def _attach(self, exact: Any, kept: Call, chosen: Format | None) -> tuple[Any, Any]:
        """Return the result with a gradient path, and the exact one as it is kept.

        The result is executed in the chosen format; gradients go straight through.
        """
        reference = _mapped(self._keep, exact)
        in_place = kept.operator.inplace
        if chosen is not None and runs(kept, chosen) is None:
            rounded = _execute(kept, chosen)
            if in_place:
                self.before_write(exact)
                # .data: the gradient formula may have kept this tensor
                exact.data.copy_(rounded)
            else:
                exact = _straight_through(exact, rounded)
        return self._anchored(exact, in_place), reference

    def _anchored(self, result: Any, in_place: bool) -> Any:
        """Return a result whose tensors all have a gradient, each its own.

        One of several outputs may be made of another (the state of an LSTM cell): the
        gradient of a view of it is that of its uses after the call.
        """
        has_several = len(float_tensors(result)) > 1

        def anchored(value: Any) -> Any:
            if not is_floating(value):
                return value
            if value.requires_grad:
                return value.view_as(value) if has_several else value
            # adding -0.0 changes no value, not even the sign of a zero
            anchor = self.anchor.to(value.device, value.dtype)
            return value.add_(anchor) if in_place else value + anchor

        return _mapped(anchored, result)

    def _hook(
        self, kept: Call | _Use, reference: Any, place: int, gradient: Tensor
    ) -> None:
        if self.receive is not None:
            self.receive(kept, reference, place, gradient)
        # else the model itself asks for gradients in its forward pass

    def find_axes(
        self, keep: Tensor, kept: Call | _Use, _: Any, place: int, masked: Tensor
    ) -> None:
        """Find the axis of one output that counts the samples; see ``sample_axis``."""
        axis = sample_axis(masked.detach(), self.samples, keep)
        self.axes[str(kept.site), place] = axis

    def together(
        self, kept: Call | _Use, reference: Any, place: int, gradient: Tensor
    ) -> None:
        """Measure one output by all probe gradients behind ``gradient``."""
        hand_over(gradient, functools.partial(self._measure, kept, reference, place))

    def store(self, kept: Call | _Use, _: Any, place: int, gradient: Tensor) -> None:
        """Keep the gradient of a probe that is not the last."""
        self._stored[id(kept), place].append(self._as_stored(gradient))

    def _as_stored(self, gradient: Tensor) -> Tensor:
        """Return a gradient as it is stored, in bf16 where there is much to store.

        That changes a projection by less than 0.4 %, a small part of its spread.
        """
        is_large = self.kept_bytes > _LARGE and gradient.dtype == torch.float32
        return gradient.detach().to(torch.bfloat16) if is_large else gradient.detach()

    def last(
        self, kept: Call | _Use, reference: Any, place: int, gradient: Tensor
    ) -> None:
        """Measure one output by the gradients that were kept, and the last."""
        gradients = self._stored.pop((id(kept), place), [])
        gradients.append(self._as_stored(gradient))
        together = torch.stack(gradients).to(gradient.dtype)
        self._measure(kept, reference, place, together)

    def _measure(
        self, kept: Call | _Use, reference: Any, place: int, gradients: Tensor
    ) -> None:
        """Project the errors of one output, or operand, on its probe gradients."""
        name = str(kept.site)
        self.reached.add(name)
        axis = self.axes.get((name, place))
        projector = Projector(gradients, axis, self.samples, self.terms, place)
        refused = self.sites[name].refused
        formats = [fmt for fmt in self.formats if fmt.name not in refused]
        if isinstance(kept, _Use):
            self._project_operand(kept, place, formats, projector)
        else:
            self._project_output(kept, reference, place, formats, projector)
        projector.finish()

    def _project_operand(
        self, use: _Use, place: int, formats: list[Format], projector: Projector
    ) -> None:
        """Add what rounding one operand of a linear operator changes of it."""
        operand = next(o for o in use.call.operands if _place_of(o.leaf) == place)
        x = _tensor_of(use.operand)
        errors = operand_errors(use.call, operand, x, formats, self.rounded)
        for key, error in errors:
            projector.add(key, error)

    def _project_output(
        self,
        kept: Call,
        reference: Any,
        place: int,
        formats: list[Format],
        projector: Projector,
    ) -> None:
        call = _opened(kept)
        exact = _mapped(_tensor_of, reference)
        if is_linear(call):
            for key, error in result_errors(call, exact, formats, self.rounded):
                projector.add(key, error)
        else:
            for fmt in formats:
                self._project_steps(call, fmt, exact, place, projector)
        if self.release and len(float_tensors(exact)) == 1:
            kept.leaves = []  # the last that holds the operands

    def _project_steps(
        self, call: Call, fmt: Format, exact: Any, place: int, projector: Projector
    ) -> None:
        """Add what each step of executing a call in a format changes at one output."""
        name = str(call.site)
        before = float_tensors(exact)[place]
        for step in rounding_steps(call, fmt, exact, self.rounded):
            after = float_tensors(step.result)[place]
            operand = -1
            sources: tuple[str, ...] = ()
            if step.operand is not None:
                operand = step.operand.leaf
                sources = tuple(sorted(step.operand.sources))
            key = TermKey(name, fmt.name, step.part, operand, sources)
            projector.add(key, None if after is before else after - before)
            before = after


def _run(call: Call, edges: Mapping[int, Tensor]) -> Any:
    """Run a call; without gradients where it refuses them, as the plain model has none.

    So do numpy() and results of integers. ``edges`` stand for some of its leaves.
    """
    try:
        return call.run(
            [edges.get(number, leaf) for number, leaf in enumerate(call.leaves)]
        )
    except RuntimeError:
        detached = [t.detach() if isinstance(t, Tensor) else t for t in call.leaves]
        return call.run(detached)


def _execute(kept: Call, chosen: Format) -> Any:
    """Return the result of a kept call in a format; nothing that is kept changes."""
    call = _opened(kept)
    if call.operator.inplace:
        call.leaves[0] = call.leaves[0].clone()
    with torch.no_grad():
        return execute(call, chosen)


def _straight_through(exact: Any, rounded: Any) -> Any:
    """Return the values of ``rounded`` with the gradients of ``exact``."""
    leaves, structure = tree_flatten(exact)
    pairs = zip(leaves, tree_flatten(rounded)[0], strict=True)
    values = [e + (r - e.detach()) if is_floating(e) else e for e, r in pairs]
    return tree_unflatten(values, structure)


def _opened(kept: Call) -> Call:
    """Return a kept call with its tensors."""
    opened = copy.copy(kept)
    opened.leaves = [_tensor_of(leaf) for leaf in kept.leaves]
    return opened


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``tree_map`` that knows what most results are."""
    if isinstance(value, (Tensor, KeptTensor)):
        return function(value)
    return tree_map(function, value)


def _tensor_of(value: Any) -> Any:
    return value.tensor if isinstance(value, KeptTensor) else value


def measure_batch(
    mode: CallMode,
    probe: Probe,
    forward: Callable[[], list[Tensor]],
    *,
    check: Callable[[], None],
    divided: Callable[[Sequence[Tensor]], Iterable[Division]],
    probes: Callable[[int, float, int], int],
    spread: Callable[[int, Tensor], Tensor] = lambda _, vectors: vectors,
    generator: torch.Generator,
    way: Way,
    parameters: int,
    memory: int | None = None,
) -> tuple[list[Tensor], Division]:
    """Run one forward and the backward passes of one batch, and fill ``probe``.

    Args:
        mode: hands the calls to ``probe``.
        probe: the handler of this batch.
        forward: runs the model, with ``mode`` entered, and returns the target tensors.
        check: may refuse the targets.
        divided: the ways to divide the targets into samples. Where the axes are not
            known, the one that keeps most sites apart is taken.
        probes: says how many probes to draw for a number of samples, a share of the
            sites that mix them, and how many fit in memory one by one. A target of one
            element needs one: its gradient is exact.
        spread: puts the sign vectors of a target, by its number, in the rows of its
            output (see ``OutputRows``).
        generator: draws the sign vectors.
        way: how to send the probes back.
        parameters: size of the model's parameters, in bytes.
        memory: bytes that probe gradients may take; None for the default.

    Returns:
        The target tensors, detached, and how they were divided.
    """
    mode.handler = probe
    mode.begin()
    with torch.enable_grad(), mode, warnings.catch_warnings():
        # the plain model takes numbers out of its tensors without a warning
        warnings.filterwarnings(
            "ignore", message="Converting a tensor with requires_grad=True"
        )
        targets = forward()
    check()
    values = [target.detach() for target in targets]
    division = _divide(probe, targets, list(divided(values)), generator)
    is_number = sum(target.numel() for target in targets) == 1
    room = _room(probe, parameters) if memory is None else memory
    fitting = 1 + room // max(1, probe.stored_bytes)
    count = 1 if is_number else probes(probe.samples, probe.mixed_share, fitting)
    numbered = [(n, t) for n, t in enumerate(targets) if t.requires_grad]
    targets = [target for _, target in numbered]
    vectors = [
        spread(n, draw_signs((count, *t.shape), generator, t)) for n, t in numbered
    ]
    count = len(vectors[0])
    if way is Way.TOGETHER and _fits(probe, count, room):
        way = Way.STORED
    if way is Way.STORED:
        _send_one_by_one(probe, targets, vectors)
    else:
        size = max(1, room // (4 * probe.largest)) if way is Way.TOGETHER else 1
        _send_in_chunks(probe, targets, vectors, size, batched=way is Way.TOGETHER)
    probe.receive = None
    return values, division


def _divide(
    probe: Probe,
    targets: Sequence[Tensor],
    divisions: Sequence[Division],
    generator: torch.Generator,
) -> Division:
    """Return how the batch divides into samples, and find the axes of the sites.

    Axes that are known stay. Else each division is tried until few sites mix samples;
    a trial is a backward pass of one probe that looks at every other sample.
    """
    probe.samples = divisions[0].samples
    if probe.axes or probe.samples == 1:
        return divisions[0]
    tried: list[tuple[int, Division, dict[Any, Any]]] = []
    for division in divisions:
        probe.samples = division.samples
        probe.axes = {}
        probe.release = False
        probe.receive = functools.partial(probe.find_axes, division.kept)
        pairs = [(n, t) for n, t in enumerate(targets) if t.requires_grad]
        masked = [
            division.masked(draw_signs((1, *t.shape), generator, t), number)
            for number, t in pairs
        ]
        backward(
            [t for _, t in pairs], probe.anchor, masked, batched=False, keep_graph=True
        )
        mixed = sum(axis is None for axis in probe.axes.values())
        tried.append((mixed, division, probe.axes))
        if mixed <= FEW_MIXED * len(probe.axes):
            break
    _, best, axes = min(tried, key=lambda trial: trial[0])
    probe.samples = best.samples
    probe.axes = axes
    return best


def _room(probe: Probe, parameters: int) -> int:
    """Return the bytes that probe gradients may take.

    Half of what the parameters' gradients, which a training step has and a budget has
    not, and a quarter of the activations take.
    """
    return max(_SMALL, (probe.kept_bytes // 4 + parameters) // 2)


def _fits(probe: Probe, count: int, room: int) -> bool:
    """Return True if the gradients of all sites may be kept until the last probe.

    Many probes of small tensors cost less together, where nothing has to loop.
    """
    is_small = probe.largest * count <= _TOGETHER_BYTES
    if count > FEW_PROBES and is_small and not probe.loops:
        return False
    return (count - 1) * probe.stored_bytes <= room


def _send_one_by_one(
    probe: Probe, targets: list[Tensor], vectors: list[Tensor]
) -> None:
    count = len(vectors[0])
    for number in range(count):
        is_last = number == count - 1
        probe.release = is_last
        probe.receive = probe.last if is_last else probe.store
        torch.autograd.grad(
            targets,
            probe.anchor,
            [v[number] for v in vectors],
            retain_graph=not is_last,
            allow_unused=True,
        )


def _send_in_chunks(
    probe: Probe,
    targets: list[Tensor],
    vectors: list[Tensor],
    size: int,
    *,
    batched: bool,
) -> None:
    probe.receive = probe.together
    chunks = list(zip(*(torch.split(v, size) for v in vectors), strict=True))
    for number, chunk in enumerate(chunks, 1):
        probe.release = number == len(chunks)
        backward(
            targets,
            probe.anchor,
            list(chunk),
            batched=batched,
            keep_graph=not probe.release,
        )
