"""The adjoint error budget: what every site's rounding costs the output, from one forward and one batched backward.

With z the target tensor and J_i the Jacobian of z by the output of site i, an error e_i at that output changes z by
J_i e_i to first order. For random sign vectors v, E[(v . J_i e_i)^2] = |J_i e_i|^2 because E[v v^T] = I
(M. F. Hutchinson, Commun. Stat. Simul. 18, 1989, eq. 2-4, applied to (J e)(J e)^T); one vector-Jacobian product gives
v^T J_i for all sites. The error e_i in a format is what the operator itself computes differently when its operands,
weights and output are rounded (``capture.execute.steps``), so a new format costs no new pass. Errors are computed in
the backward hooks, projected on the K probe gradients of that site, and dropped.
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

from roundoff.budget.probes import backward, hand_over, on_output, sample_axis
from roundoff.budget.signs import draw_signs
from roundoff.budget.terms import TermKey, Terms, arrange, by_sample, project
from roundoff.formats import Format
from roundoff.ops import Call, CallMode, execute, float_tensors, runs, sizes, steps

#: Bytes that are not worth another backward pass.
_SMALL = 2**24


@dataclass
class SiteInfo:
    """What is known of one site besides its errors."""

    site: str
    operator: str
    kind: str
    params: tuple[str, ...]
    sizes: dict[str, float]
    refused: dict[str, str]
    no_path: str | None = "its output does not reach the target"
    batches: int = 0
    #: sites that share this one's format, because one writes into what the other made
    tied: tuple[str, ...] = ()


def describe(
    call: Call,
    outputs: list[Tensor],
    sites: dict[str, SiteInfo],
    formats: Sequence[Format],
) -> SiteInfo:
    """What ``sites`` keeps of the site of a call, with this call's sizes added."""
    name = str(call.site)
    info = sites.get(name)
    if info is None:
        named = set().union(
            *(o.sources for o in call.operands if o.role != "activation")
        )
        params = tuple(
            sorted(n for n in named if n and "/" not in n)
        )  # a bias may be computed
        refused = {f.name: why for f in formats if (why := runs(call, f)) is not None}
        info = SiteInfo(name, call.operator.name, call.kind, params, {}, refused)
        sites[name] = info
    info.batches += 1
    for key, value in sizes(call, outputs).items():
        info.sizes[key] = info.sizes.get(key, 0.0) + value
    return info


class _Held:
    """A tensor kept until the backward pass, copied first if something is about to write into it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


@dataclass
class Probe:
    """The handler of one batch's forward pass, and what its backward hooks measure."""

    formats: Sequence[Format]
    sites: dict[str, SiteInfo]
    chosen: Callable[[str], Format | None]
    anchor: Tensor
    wanted: str | None = None
    found: Tensor | None = None
    samples: int = 1
    keep: Tensor | None = None
    axes: dict[tuple[str, int], tuple[int, int] | None] = field(default_factory=dict)
    terms: Terms = field(default_factory=Terms)
    reached: set[str] = field(default_factory=set)
    release: bool = True
    listening: bool = False
    kept_bytes: int = 0
    largest: int = 1
    _held: dict[int, list[weakref.ref[_Held]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def before_write(self, tensor: Tensor) -> None:
        """Copy what is held of this storage before it changes."""
        for reference in self._held.pop(tensor.untyped_storage().data_ptr(), []):
            held = reference()
            if held is not None:
                held.tensor = held.tensor.clone()

    def call(self, call: Call) -> Any:
        """Run the call so that gradients reach its output, and measure its errors when they come back."""
        if call.operator.inplace and isinstance(call.leaves[0], Tensor):
            before = call.leaves[0].detach().clone()
        else:
            before = None
        chosen = self.chosen(str(call.site))
        try:
            exact = call.run()
        except RuntimeError:  # numpy() or a result of integers: refused to what has a gradient, fine in the plain model
            exact = call.run(
                [t.detach() if isinstance(t, Tensor) else t for t in call.leaves]
            )
        outputs = float_tensors(exact)
        if not outputs:
            return exact
        info = describe(call, outputs, self.sites, self.formats)
        written = [t.numel() * t.element_size() for t in outputs]
        self.kept_bytes, self.largest = (
            self.kept_bytes + sum(written),
            max(self.largest, *written),
        )
        if not torch.is_grad_enabled():
            info.no_path = "computed under torch.no_grad"
            return exact
        leaves = [before, *call.leaves[1:]] if before is not None else list(call.leaves)
        held = [
            self._hold(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        kept = dataclasses.replace(call, leaves=held)
        result, reference = self._attach(exact, kept, chosen)
        if str(call.site) == self.wanted and self.found is None:
            # a copy: what the model writes over it later does not count
            self.found = float_tensors(result)[0].clone()
        for place, tensor in enumerate(float_tensors(result)):
            hook = functools.partial(self._hook, kept, reference, place)
            on_output(tensor, hook, written=call.operator.inplace)
        return result

    def _hold(self, tensor: Tensor) -> _Held:
        held = _Held(tensor)
        self._held[tensor.untyped_storage().data_ptr()].append(weakref.ref(held))
        return held

    def _attach(self, exact: Any, kept: Call, chosen: Format | None) -> tuple[Any, Any]:
        """The result with a gradient path, executed in the chosen format (straight through), and the reference."""
        reference = tree_map(
            lambda t: self._hold(t) if isinstance(t, Tensor) else t, exact
        )
        inplace = kept.operator.inplace
        if chosen is not None and runs(kept, chosen) is None:
            with torch.no_grad():
                call = _open(kept)
                call.leaves = [
                    leaf.clone() if inplace and i == 0 else leaf
                    for i, leaf in enumerate(call.leaves)
                ]
                rounded = execute(call, chosen)
            if inplace:
                self.before_write(exact)
                exact.data.copy_(
                    rounded
                )  # .data: the gradient formula may have kept this tensor
                return self._anchored(exact, inplace), reference
            flat, spec = tree_flatten(exact)
            pairs = zip(flat, tree_flatten(rounded)[0], strict=True)
            exact = tree_unflatten(
                [e + (r - e.detach()) if _is_float(e) else e for e, r in pairs], spec
            )
        return self._anchored(exact, inplace), reference

    def _anchored(self, result: Any, inplace: bool) -> Any:
        def anchored(t: Any) -> Any:
            if (
                not isinstance(t, Tensor)
                or not t.is_floating_point()
                or t.requires_grad
            ):
                return t
            # adding -0.0 changes no value, not even the sign of a zero
            anchor = self.anchor.to(t.device, t.dtype)
            return t.add_(anchor) if inplace else t + anchor

        return tree_map(anchored, result)

    def _hook(self, kept: Call, reference: Any, place: int, gradient: Tensor) -> None:
        if (
            not self.listening
        ):  # the model itself asks for gradients in its forward pass
            return
        hand_over(gradient, functools.partial(self._measure, kept, reference, place))

    def _measure(
        self, kept: Call, reference: Any, place: int, gradients: Tensor
    ) -> None:
        name = str(kept.site)
        self.reached.add(name)
        call = _open(kept)
        exact = tree_map(lambda t: t.tensor if isinstance(t, _Held) else t, reference)
        if self.keep is not None:  # the last probe is the masked one
            if (name, place) not in self.axes:
                self.axes[name, place] = sample_axis(
                    gradients[-1], self.samples, self.keep
                )
            gradients = gradients[:-1]
        if not len(gradients):
            return
        axis = self.axes.get((name, place))
        probes = by_sample(gradients, axis, self.samples)
        refused = self.sites[name].refused
        for fmt in self.formats:
            if fmt.name in refused:
                continue
            last = float_tensors(exact)[place]
            for step in steps(call, fmt, exact):
                now = float_tensors(step.result)[place]
                operand = -1 if step.operand is None else step.operand.leaf
                sources = (
                    () if step.operand is None else tuple(sorted(step.operand.sources))
                )
                key = TermKey(name, fmt.name, step.part, operand, sources)
                values, overflow = project(
                    probes, arrange(now - last, axis, self.samples)
                )
                self.terms.add(key, place, values, overflow)
                last = now
        if self.release and len(float_tensors(exact)) == 1:
            kept.leaves = []  # the last that holds the operands


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _open(kept: Call) -> Call:
    return dataclasses.replace(
        kept,
        leaves=[
            leaf.tensor if isinstance(leaf, _Held) else leaf for leaf in kept.leaves
        ],
    )


def measure_batch(
    mode: CallMode,
    probe: Probe,
    forward: Callable[[], list[Tensor]],
    *,
    check: Callable[[], None],
    probes: Callable[[int], int],
    generator: torch.Generator,
    learn_axes: bool,
    batched: bool,
    parameters: int,
) -> list[Tensor]:
    """One forward and the backward passes of one batch; fills ``probe`` and returns the target tensors, detached.

    ``forward`` runs the model, with ``mode`` entered, and returns the target tensors; ``check`` may refuse what it
    found. ``probes`` says how many probes to draw for a number of samples. A target of one element needs one: its
    gradient is exact. ``parameters`` is the size in bytes of the model's.
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
    values = [t.detach() for t in targets]
    rows = {t.shape[0] if t.ndim else 1 for t in targets}
    probe.samples = rows.pop() if len(rows) == 1 else 1
    count = 1 if sum(t.numel() for t in targets) == 1 else probes(probe.samples)
    targets = [t for t in targets if t.requires_grad]
    vectors = [draw_signs((count, *t.shape), generator, t) for t in targets]
    masked: list[Tensor] = []
    if learn_axes and probe.samples > 1:
        probe.keep = torch.arange(probe.samples) % 2 == 0
        rest = ~probe.keep.to(targets[0].device)
        masked = [v[:1].masked_fill(_rows(rest, v), 0.0) for v in vectors]
        if not batched:
            probe.release = False
            backward(targets, probe.anchor, masked, batched=False, keep_graph=True)
            probe.keep = None
    together = _together(probe, parameters) if batched else 1
    chunks = list(zip(*(torch.split(v, together) for v in vectors), strict=True))
    for number, chunk in enumerate(chunks):
        probe.release = number + 1 == len(chunks)
        if probe.keep is not None:
            chunk = tuple(torch.cat([v, m]) for v, m in zip(chunk, masked, strict=True))
        backward(
            targets,
            probe.anchor,
            list(chunk),
            batched=batched,
            keep_graph=not probe.release,
        )
        probe.keep = None
    return values


def _together(probe: Probe, parameters: int) -> int:
    """How many probes to send back at once. About four gradients of the largest site exist for each at a time; they get
    half of what the parameters' gradients, which a training step has and a budget has not, and a quarter of the
    activations take."""
    room = max(_SMALL, (probe.kept_bytes // 4 + parameters) // 2)
    return max(1, room // (4 * probe.largest))


def _rows(mask: Tensor, vectors: Tensor) -> Tensor:
    return mask.view(1, -1, *(1 for _ in range(vectors.ndim - 2)))
