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

import dataclasses
import functools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from roundoff.budget.facts import MeasuredSite
from roundoff.budget.probes import backward, hand_over, on_output, sample_axis
from roundoff.budget.signs import draw_signs
from roundoff.budget.terms import TermKey, Terms, arrange, by_sample, project
from roundoff.formats import Format
from roundoff.ops import (
    Call,
    CallMode,
    execute,
    float_tensors,
    is_floating,
    rounding_steps,
    runs,
    sizes,
)

#: Bytes that are not worth another backward pass.
_SMALL = 2**24


@dataclass(frozen=True, slots=True)
class Backward:
    """How the backward passes run.

    ``batched``: all probes at once; ``mutation``: with copies of saved tensors that the
    model writes over.
    """

    batched: bool
    mutation: bool = False


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


class _KeptTensor:
    """A tensor kept until the backward pass.

    It is copied first if something is about to write into it.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


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
        kept_samples: mask of the samples that the last probe looks at; None for a
            backward pass without such a probe.
        axes: axis that counts the samples, by site and number of the output.
        terms: projections of every error.
        reached: names of the sites that gradients came back to.
        release: True in the pass that may free operands.
        listening: True while hooks measure.
        kept_bytes: bytes of all outputs.
        largest: bytes of the largest output.
    """

    formats: Sequence[Format]
    sites: dict[str, SiteInfo]
    chosen: Callable[[str], Format | None]
    anchor: Tensor
    wanted: str | None = None
    wanted_output: Tensor | None = None
    samples: int = 1
    kept_samples: Tensor | None = None
    axes: dict[tuple[str, int], tuple[int, int] | None] = field(default_factory=dict)
    terms: Terms = field(default_factory=Terms)
    reached: set[str] = field(default_factory=set)
    release: bool = True
    listening: bool = False
    kept_bytes: int = 0
    largest: int = 1
    _kept: dict[int, list[weakref.ref[_KeptTensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def before_write(self, tensor: Tensor) -> None:
        """Copy what is kept of this storage before it changes."""
        for reference in self._kept.pop(tensor.untyped_storage().data_ptr(), []):
            kept = reference()
            if kept is not None:
                kept.tensor = kept.tensor.clone()

    def call(self, call: Call) -> Any:
        """Run a call so that gradients reach its output, and listen to them.

        Its errors are measured when they come back.
        """
        leaves = list(call.leaves)
        if call.operator.inplace and isinstance(leaves[0], Tensor):
            leaves[0] = leaves[0].detach().clone()
        chosen = self.chosen(str(call.site))
        exact = _run(call)
        outputs = float_tensors(exact)
        if not outputs:
            return exact
        info = describe(call, outputs, self.sites, self.formats)
        self._count_bytes(outputs)
        if not torch.is_grad_enabled():
            info.no_path = "computed under torch.no_grad"
            return exact
        kept = dataclasses.replace(call, leaves=[self._keep(leaf) for leaf in leaves])
        result, reference = self._attach(exact, kept, chosen)
        tensors = float_tensors(result)
        if info.site == self.wanted and self.wanted_output is None:
            # a copy: what the model writes over it later does not count
            self.wanted_output = tensors[0].clone()
        for place, tensor in enumerate(tensors):
            hook = functools.partial(self._hook, kept, reference, place)
            on_output(tensor, hook, written=call.operator.inplace)
        return result

    def _count_bytes(self, outputs: Sequence[Tensor]) -> None:
        written = [tensor.numel() * tensor.element_size() for tensor in outputs]
        self.kept_bytes += sum(written)
        self.largest = max(self.largest, *written)

    def _keep(self, value: Any) -> Any:
        """Return a tensor as it is kept for the backward pass, other values as is."""
        if not isinstance(value, Tensor):
            return value
        kept = _KeptTensor(value)
        self._kept[value.untyped_storage().data_ptr()].append(weakref.ref(kept))
        return kept

    def _attach(self, exact: Any, kept: Call, chosen: Format | None) -> tuple[Any, Any]:
        """Return the result with a gradient path, and the exact one as it is kept.

        The result is executed in the chosen format; gradients go straight through.
        """
        reference = tree_map(self._keep, exact)
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
        """Return a result whose tensors all have a gradient."""

        def anchored(value: Any) -> Any:
            if not is_floating(value) or value.requires_grad:
                return value
            # adding -0.0 changes no value, not even the sign of a zero
            anchor = self.anchor.to(value.device, value.dtype)
            return value.add_(anchor) if in_place else value + anchor

        return tree_map(anchored, result)

    def _hook(self, kept: Call, reference: Any, place: int, gradient: Tensor) -> None:
        if self.listening:
            measure = functools.partial(self._measure, kept, reference, place)
            hand_over(gradient, measure)
        # else the model itself asks for gradients in its forward pass

    def _measure(
        self, kept: Call, reference: Any, place: int, gradients: Tensor
    ) -> None:
        """Project the errors of one output on its probe gradients."""
        name = str(kept.site)
        self.reached.add(name)
        if self.kept_samples is not None:
            masked = gradients[-1]
            gradients = gradients[:-1]
            if (name, place) not in self.axes:
                axis = sample_axis(masked, self.samples, self.kept_samples)
                self.axes[name, place] = axis
        if not len(gradients):
            return
        call = _opened(kept)
        exact = tree_map(_tensor_of, reference)
        refused = self.sites[name].refused
        axis = self.axes.get((name, place))
        probes = by_sample(gradients, axis, self.samples)
        for fmt in self.formats:
            if fmt.name not in refused:
                self._project_steps(call, fmt, exact, place, probes)
        if self.release and len(float_tensors(exact)) == 1:
            kept.leaves = []  # the last that holds the operands

    def _project_steps(
        self, call: Call, fmt: Format, exact: Any, place: int, probes: Tensor
    ) -> None:
        """Add what each step of executing a call in a format changes at one output."""
        name = str(call.site)
        axis = self.axes.get((name, place))
        before = float_tensors(exact)[place]
        for step in rounding_steps(call, fmt, exact):
            after = float_tensors(step.result)[place]
            operand = -1
            sources: tuple[str, ...] = ()
            if step.operand is not None:
                operand = step.operand.leaf
                sources = tuple(sorted(step.operand.sources))
            key = TermKey(name, fmt.name, step.part, operand, sources)
            error = arrange(after - before, axis, self.samples)
            self.terms.add(key, place, *project(probes, error))
            before = after


def _run(call: Call) -> Any:
    """Run a call; without gradients where it refuses them, as the plain model has none.

    So do numpy() and results of integers.
    """
    try:
        return call.run()
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
    return dataclasses.replace(kept, leaves=[_tensor_of(leaf) for leaf in kept.leaves])


def _tensor_of(value: Any) -> Any:
    return value.tensor if isinstance(value, _KeptTensor) else value


def measure_batch(
    mode: CallMode,
    probe: Probe,
    forward: Callable[[], list[Tensor]],
    *,
    check: Callable[[], None],
    probes: Callable[[int], int],
    spread: Callable[[int, Tensor], Tensor] = lambda _, vectors: vectors,
    generator: torch.Generator,
    learn_axes: bool,
    batched: bool,
    parameters: int,
) -> list[Tensor]:
    """Run one forward and the backward passes of one batch, and fill ``probe``.

    Args:
        mode: hands the calls to ``probe``.
        probe: the handler of this batch.
        forward: runs the model, with ``mode`` entered, and returns the target tensors.
        check: may refuse the targets.
        probes: says how many probes to draw for a number of samples. A target of one
            element needs one: its gradient is exact.
        spread: puts the sign vectors of a target, by its number, in the rows of its
            output (see ``OutputRows``).
        generator: draws the sign vectors.
        learn_axes: find out which axis of each output counts the samples.
        batched: send the probes back together.
        parameters: size of the model's parameters, in bytes.

    Returns:
        The target tensors, detached.
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
    probe.listening = True
    values = [target.detach() for target in targets]
    probe.samples = _samples(targets)
    is_number = sum(target.numel() for target in targets) == 1
    count = 1 if is_number else probes(probe.samples)
    numbered = [(n, t) for n, t in enumerate(targets) if t.requires_grad]
    targets = [target for _, target in numbered]
    vectors = [
        spread(n, draw_signs((count, *t.shape), generator, t)) for n, t in numbered
    ]
    size = _probes_together(probe, parameters) if batched else 1
    chunks = list(zip(*(torch.split(v, size) for v in vectors), strict=True))
    send = functools.partial(backward, targets, probe.anchor, batched=batched)
    if learn_axes and probe.samples > 1:
        probe.kept_samples = torch.arange(probe.samples) % 2 == 0
        # only one output's rows of a target are not zero
        masked = [_masked(v.sum(0, keepdim=True), probe.kept_samples) for v in vectors]
        if batched:
            chunks[0] = tuple(map(torch.cat, zip(chunks[0], masked, strict=True)))
        else:
            probe.release = False
            send(masked, keep_graph=True)
            probe.kept_samples = None
    for number, chunk in enumerate(chunks, 1):
        probe.release = number == len(chunks)
        send(list(chunk), keep_graph=not probe.release)
        probe.kept_samples = None
    return values


def _samples(targets: Sequence[Tensor]) -> int:
    """Return the samples that all targets have on their first axis, else 1."""
    rows = {target.shape[0] if target.ndim else 1 for target in targets}
    return rows.pop() if len(rows) == 1 else 1


def _masked(vectors: Tensor, keep: Tensor) -> Tensor:
    """Return sign vectors ``(K, samples, ...)`` that are zero on the other samples."""
    drop = ~keep.to(vectors.device)
    return vectors.masked_fill(drop.view(1, -1, *[1] * (vectors.ndim - 2)), 0.0)


def _probes_together(probe: Probe, parameters: int) -> int:
    """Return how many probes to send back at once.

    About four gradients of the largest site exist for each at a time. They get half of
    what the parameters' gradients, which a training step has and a budget has not, and
    a quarter of the activations take.
    """
    room = max(_SMALL, (probe.kept_bytes // 4 + parameters) // 2)
    return max(1, room // (4 * probe.largest))
