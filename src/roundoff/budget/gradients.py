"""The adjoint of the gradients: what every rounding of a training step costs dL/dw.

The target is G = dL/dw, all parameter gradients. A step that rounds the tensors t_i
(operands and outputs of the forward pass, and the gradients that the backward pass
receives and writes) changes it by sum_i (dG/dt_i) d_i to first order. For a random sign
vector v, s = v . G is a scalar, and one backward pass through the backward pass gives
ds/dt_i for all i at once (B. A. Pearlmutter, Fast exact multiplication by the Hessian,
Neural Computation 6, 1994, section 3: reverse mode over reverse mode);
E (ds/dt_i . d_i)^2 = |dG/dt_i d_i|^2 because E v v^T = I, as in ``adjoint.py``.

Every operand and every output of a call passes an *edge*, a view of itself, so that
ds/dt counts this use of the tensor only: the forward value and the saved value of this
call's own backward. Where a gradient passes an edge in the first backward pass it gets
an edge of its own.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map

from roundoff.budget.adjoint import SiteInfo, describe
from roundoff.budget.kinks import Kinks
from roundoff.budget.signs import draw_signs
from roundoff.budget.terms import TermKey, Terms, arrange, by_sample, project
from roundoff.formats import Format
from roundoff.ops import (
    MATRIX_KINDS,
    Call,
    CallMode,
    Operand,
    float_tensors,
    is_floating,
    numbers_of,
    round_gradient,
    round_operand,
    round_output,
)
from roundoff.preserve import random_states, set_random_states

#: Where an edge lies in its call: the leaf of an operand, or the place of an output
#: among the outputs.
Spot = tuple[str, int]
OUTPUT = "output"
OPERAND = "operand"

#: Relative difference of sums over the same elements in another order.
SAME_SUM = 1e-9

#: Phases in which a gradient that passes an edge is looked at.
FIRST_BACKWARD = "backward"
PROBE = "probe"


@dataclass(frozen=True, slots=True)
class EdgeError:
    """One error of one tensor, kept until the probes have passed."""

    key: TermKey
    place: int
    values: Tensor

    def project(self, terms: Terms, adjoint: Tensor) -> None:
        """Add what the error does to the target, as this adjoint says, to ``terms``."""
        probe = by_sample(adjoint.detach().unsqueeze(0), None, 1)
        values, overflow = project(probe, arrange(self.values, None, 1))
        terms.add(self.key, self.place, values, overflow)


@dataclass
class CallEdges:
    """One call of the forward pass: the tensors that pass its edges, and their errors.

    Attributes:
        call: without its arguments once the forward pass is over.
        name: of the site.
        operands: the operands that the call reads, by leaf.
        outputs: where autograd goes on from each output.
        gradients: what the first backward pass brings to each spot.
        edges: its edge there.
        forward: errors of the forward pass.
        backward: errors of the first backward pass.
        bend: of an operator whose derivative jumps; see ``kinks.py``.
    """

    call: Call
    name: str
    operands: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, GradientEdge] = field(default_factory=dict)
    gradients: dict[Spot, Tensor] = field(default_factory=dict)
    edges: dict[Spot, Tensor] = field(default_factory=dict)
    forward: dict[Spot, list[EdgeError]] = field(
        default_factory=lambda: defaultdict(list)
    )
    backward: dict[Spot, list[EdgeError]] = field(
        default_factory=lambda: defaultdict(list)
    )
    bend: Tensor | None = None

    def at(self, kind: str) -> dict[int, Tensor]:
        """Return the gradients at operands, or at outputs, by number."""
        return {
            number: gradient
            for (spot, number), gradient in self.gradients.items()
            if spot == kind
        }


@dataclass
class Edges:
    """The handler of one batch's forward pass: edges, and the errors made at them.

    ``cut`` names sites whose backward has no derivative: what they write is taken as a
    constant.
    """

    formats: Sequence[Format]
    sites: dict[str, SiteInfo]
    kinks: Kinks
    cut: frozenset[str] = frozenset()
    calls: list[CallEdges] = field(default_factory=list)
    terms: Terms = field(default_factory=Terms)
    loss: Terms = field(default_factory=Terms)
    reached: set[str] = field(default_factory=set)
    ends: list[Tensor] = field(default_factory=list)
    users: dict[str, list[tuple[CallEdges, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    phase: str = ""

    def before_write(self, tensor: Tensor) -> None:
        """Nothing is kept of what the model writes."""

    def call(self, call: Call) -> Any:
        """Run a call between edges; the errors of its forward pass come at once."""
        if not torch.is_grad_enabled():
            return self._without_gradient(call)
        edges = CallEdges(call, str(call.site))
        leaves = list(call.leaves)
        for operand in call.operands:
            leaves[operand.leaf] = self._edge(leaves[operand.leaf])
            edges.operands[operand.leaf] = leaves[operand.leaf]
        # what attention and recurrent layers drop
        is_random = call.kind in ("attention", "rnn")
        drawn = random_states() if is_random else None
        if len(call.operands) == 1:
            exact = leaves[call.operands[0].leaf].detach()
            edges.bend = self.kinks.derivative(call, exact)
        result = call.again(leaves)
        outputs = float_tensors(result)
        if not outputs:
            return call.run()
        info = describe(call, outputs, self.sites, self.formats)
        self._tie(call, info)
        with _random_state_kept(is_random):
            self._forward_errors(edges, info, drawn)
        self._listen(edges)
        place = iter(range(len(outputs)))
        result = tree_map(
            lambda t: self._output(edges, next(place), t) if is_floating(t) else t,
            result,
        )
        self.calls.append(edges)
        # the arguments are not needed any more
        edges.call = Call(call.site, call.operator, call.func, [], [], call.operands)
        if not call.operator.inplace:
            return result
        return call.leaves[0].copy_(float_tensors(result)[0])

    def _without_gradient(self, call: Call) -> Any:
        result = call.run()
        outputs = float_tensors(result)
        if outputs:
            info = describe(call, outputs, self.sites, self.formats)
            info.no_path = "computed under torch.no_grad"
        return result

    def _tie(self, call: Call, info: SiteInfo) -> None:
        """Tie an operator that writes in place to the format of what it writes into."""
        if not call.operator.inplace or info.tied:
            return
        info.tied = _written_sites(call)
        if not info.tied:
            reason = "writes in place into a tensor that no site made"
            info.refused |= {fmt.name: reason for fmt in self.formats}

    def _edge(self, x: Tensor) -> Tensor:
        """Return a view with a gradient of its own."""
        if x.requires_grad:
            return x.view_as(x)
        end = x.detach().requires_grad_()
        self.ends.append(end)
        return end

    def _output(self, edges: CallEdges, place: int, y: Tensor) -> Tensor:
        if not y.requires_grad:
            return y
        edges.outputs[place] = get_gradient_edge(y)
        edge = y.view_as(y)
        self._hook(edge, edges, (OUTPUT, place))
        return edge

    def _listen(self, edges: CallEdges) -> None:
        """Look at the gradients of the operands, and remember who reads what."""
        for operand in edges.call.operands:
            self._hook(edges.operands[operand.leaf], edges, (OPERAND, operand.leaf))
            for source in operand.sources:
                self.users[source].append((edges, operand.leaf))

    def _hook(self, tensor: Tensor, edges: CallEdges, spot: Spot) -> None:
        tensor.register_hook(functools.partial(self._passes, edges, spot))  # type: ignore[no-untyped-call]

    def _passes(self, edges: CallEdges, spot: Spot, gradient: Tensor) -> Tensor | None:
        """Look at a gradient that reaches an edge of the forward pass."""
        if self.phase == FIRST_BACKWARD:
            return self._gradient_edge(edges, spot, gradient)
        if self.phase == PROBE:
            self._project(edges, edges.forward, spot, gradient)
        return None

    def _gradient_edge(self, edges: CallEdges, spot: Spot, gradient: Tensor) -> Tensor:
        """Return the gradient through an edge of its own."""
        edges.gradients[spot] = gradient
        is_operand = spot[0] == OPERAND
        if edges.bend is not None and is_operand:
            x = edges.operands[spot[1]]
            received = edges.gradients[OUTPUT, 0].detach()
            gradient = gradient + (received * edges.bend) * (x - x.detach())
        if is_operand and edges.name in self.cut:
            gradient = gradient.detach()
        edge = self._edge(gradient)
        edges.edges[spot] = edge
        project = functools.partial(self._project, edges, edges.backward, spot)
        edge.register_hook(project)  # type: ignore[no-untyped-call]
        return edge

    def _project(
        self,
        edges: CallEdges,
        errors: Mapping[Spot, list[EdgeError]],
        spot: Spot,
        adjoint: Tensor,
    ) -> None:
        if self.phase != PROBE:
            return
        self.reached.add(edges.name)
        for error in errors.get(spot, ()):
            error.project(self.terms, adjoint)

    def _forward_errors(
        self, edges: CallEdges, info: SiteInfo, drawn: tuple[Tensor, ...] | None
    ) -> None:
        """Keep the errors of operands, one by one, and of the output that follows.

        ``drawn`` is the random state in which the call ran.
        """
        call = edges.call
        for fmt in self.formats:
            rule = fmt.execution
            if rule is None or fmt.name in info.refused:
                continue
            leaves = rerunnable(call)
            for operand in call.operands:
                if not _rounds(fmt, operand):
                    continue
                exact = call.leaves[operand.leaf].detach()
                rounded = round_operand(exact, operand, fmt)
                leaves[operand.leaf] = rounded
                error = EdgeError(_operand_key(edges, fmt, operand), 0, rounded - exact)
                edges.forward[OPERAND, operand.leaf].append(error)
            if not rule.output:
                continue
            if drawn is not None:
                set_random_states(drawn)  # its dropout falls as it did
            with torch.no_grad():
                outputs = float_tensors(call.again(leaves))
            key = TermKey(edges.name, fmt.name, "output", -1, ())
            for place, values in enumerate(outputs):
                error = EdgeError(key, place, round_output(values, fmt) - values)
                edges.forward[OUTPUT, place].append(error)

    def first_pass(
        self, loss: Tensor, weights: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of the weights, with a graph of their own.

        The errors of the loss and of all gradients follow.
        """
        self.phase = FIRST_BACKWARD
        gradients = torch.autograd.grad(
            loss, weights, create_graph=True, allow_unused=True
        )
        self.phase = ""
        for edges in self.calls:
            for spot, gradient in edges.gradients.items():
                for error in edges.forward.get(spot, ()):
                    error.project(self.loss, gradient.detach())
            self._backward_errors(edges)
        return list(gradients)

    def _backward_errors(self, edges: CallEdges) -> None:
        """Keep the errors of the gradients that a call receives and writes."""
        users = self._users(edges)
        for fmt in self.formats:
            rule = fmt.execution
            if rule is None or fmt.name in self.sites[edges.name].refused:
                continue
            received = self._received(edges, fmt, users)
            if not rule.output:
                continue
            for leaf, gradient in self._written(edges, received).items():
                key = TermKey(edges.name, fmt.name, "gradient", leaf, ())
                rounded = round_gradient(gradient, fmt, written=True)
                error = EdgeError(key, 0, rounded - gradient)
                edges.backward[OPERAND, leaf].append(error)

    def _received(
        self, edges: CallEdges, fmt: Format, users: tuple[str, ...]
    ) -> dict[int, Tensor]:
        """Return the gradients of the outputs, rounded, and keep their errors."""
        key = TermKey(edges.name, fmt.name, "gradient", -1, users)
        received = {}
        for place in edges.outputs:
            if (OUTPUT, place) not in edges.gradients:
                continue
            exact = edges.gradients[OUTPUT, place].detach()
            rounded = round_gradient(exact, fmt, written=False)
            received[place] = rounded
            if rounded is not exact:
                error = EdgeError(key, place, rounded - exact)
                edges.backward[OUTPUT, place].append(error)
        return received

    def _written(
        self, edges: CallEdges, received: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return the operand gradients that follow from rounded output gradients.

        An addition only passes them on, and then rounds nothing more. A contraction
        mixes many; whether its inputs are rounded says nothing of its results.
        """
        exact = {
            leaf: edges.gradients[OPERAND, leaf].detach()
            for leaf in edges.operands
            if (OPERAND, leaf) in edges.gradients
        }
        is_matrix = edges.call.kind in MATRIX_KINDS
        if not exact or is_matrix or edges.name in self.cut:
            return exact
        gradients = torch.autograd.grad(
            [edges.outputs[place] for place in received],
            [edges.operands[leaf] for leaf in exact],
            list(received.values()),
            retain_graph=True,
            allow_unused=True,
        )
        pairs: Iterable[tuple[tuple[int, Tensor], Tensor | None]] = zip(
            exact.items(), gradients, strict=True
        )
        return {leaf: value if g is None else g for (leaf, value), g in pairs}

    def _users(self, edges: CallEdges) -> tuple[str, ...]:
        """Return the calls that use the output, if no two of their gradients meet.

        Each element's gradient then arrives in the format that one of them writes. Sums
        of absolute values and of squares agree only then.
        """
        users = [
            (user, user.gradients[OPERAND, leaf].detach())
            for user, leaf in self.users.get(edges.name, ())
            if (OPERAND, leaf) in user.gradients
        ]
        parts = [gradient for _, gradient in users]
        whole = [gradient.detach() for gradient in edges.at(OUTPUT).values()]
        for power in (1, 2):
            received = power_sum(whole, power)
            if abs(power_sum(parts, power) - received) > SAME_SUM * received:
                return ()
        return tuple(sorted({user.name for user, _ in users}))

    def probe(
        self,
        gradients: Sequence[Tensor],
        signs: Sequence[Tensor],
        weights: Iterable[Tensor],
    ) -> None:
        """Send one sign vector back through both passes.

        Every error is projected where it was made.
        """
        self.phase = PROBE
        try:
            torch.autograd.grad(
                gradients,
                [*weights, *self.ends],
                signs,
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            self.phase = ""

    def closed_sites(self) -> dict[str, str]:
        """Return the sites whose backward has no derivative, and what autograd says.

        To be called after ``first_pass``.
        """
        closed = {}
        for edges in self.calls:
            reason = None if edges.name in self.cut else _closed(edges)
            if reason is not None:
                closed[edges.name] = reason
        return closed


def _closed(edges: CallEdges) -> str | None:
    """Return why the backward of a call has no derivative; None where it has one."""
    sent = [g for g in edges.at(OPERAND).values() if g.requires_grad]
    received = [edge for (kind, _), edge in edges.edges.items() if kind == OUTPUT]
    if not sent or not received:
        return None
    ones = [torch.ones_like(gradient) for gradient in sent]
    try:
        torch.autograd.grad(sent, received, ones, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _rounds(fmt: Format, operand: Operand) -> bool:
    """Return True if a format rounds an operand."""
    rule = fmt.execution
    if rule is None:
        return False
    if operand.role == "activation":
        return rule.activation is not None
    if operand.role == "bias":
        return rule.weight is not None and rule.bias
    return rule.weight is not None


def _operand_key(edges: CallEdges, fmt: Format, operand: Operand) -> TermKey:
    part = "activation" if operand.role == "activation" else "weight"
    sources = tuple(sorted(operand.sources))
    return TermKey(edges.name, fmt.name, part, operand.leaf, sources)


def _written_sites(call: Call) -> tuple[str, ...]:
    """Return the sites that made the tensor that a call writes into."""
    written = [operand for operand in call.operands if operand.leaf == 0]
    sources = {name for operand in written for name in operand.sources}
    return tuple(sorted(name for name in sources if "/" in name))


@contextmanager
def _random_state_kept(needed: bool) -> Iterator[None]:
    """Bring the random state back after the block, where this is needed."""
    state = random_states() if needed else None
    yield
    if state is not None:
        set_random_states(state)


def rerunnable(call: Call) -> list[Any]:
    """Return the arguments for a second run.

    They have copies of what a normalization keeps for itself (running statistics),
    which a run writes.
    """
    operands = {operand.leaf for operand in call.operands}
    keeps_statistics = call.kind == "normalization"

    def argument(number: int, value: Any) -> Any:
        if not is_floating(value):
            return value
        if keeps_statistics and number not in operands:
            return value.clone()
        return value.detach()

    return [argument(number, value) for number, value in enumerate(call.leaves)]


def power_sum(tensors: Iterable[Tensor], power: int) -> float:
    """Return the sum of absolute values (1) or squares (2) of all elements."""
    return sum(numbers_of([t.double().abs().pow(power).sum() for t in tensors]))


def measure_gradients(
    mode: CallMode,
    edges: Edges,
    forward: Callable[[], Tensor],
    weights: Sequence[Tensor],
    *,
    check: Callable[[Tensor], None],
    probes: int,
    generator: torch.Generator,
    scale: float = 1.0,
) -> tuple[Tensor, list[Tensor | None]]:
    """Run one forward, one backward and ``probes`` double backward passes of one batch.

    Fills ``edges.terms`` (projections of the gradients' errors) and ``edges.loss`` (the
    exact first-order change of the loss).

    Args:
        mode: hands the calls to ``edges``.
        edges: the handler of this batch.
        forward: returns the loss, with ``mode`` entered.
        weights: what gradients are taken of.
        check: may refuse the loss.
        probes: sign vectors.
        generator: draws them.
        scale: the backward pass starts from this times the loss: gradients, projections
            and changes of the loss are all that much larger.

    Returns:
        The loss and the gradients.
    """
    mode.handler = edges
    mode.begin()
    with torch.enable_grad(), mode:
        loss = forward()
    check(loss)
    gradients = edges.first_pass(loss * scale, weights)
    reached = [gradient for gradient in gradients if gradient is not None]
    for _ in range(probes):
        signs = [draw_signs(g.shape, generator, g) for g in reached]
        edges.probe(reached, signs, weights)
    return loss.detach(), [None if g is None else g.detach() for g in gradients]
