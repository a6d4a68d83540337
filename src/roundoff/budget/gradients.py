"""The adjoint of the gradients: what every rounding of a training step, forward and backward, costs dL/dw.

The target is G = dL/dw, all parameter gradients. A step that rounds the tensors t_i (operands and outputs of the forward
pass, and the gradients that the backward pass receives and writes) changes it by sum_i (dG/dt_i) d_i to first order. For a
random sign vector v, s = v . G is a scalar, and one backward pass through the backward pass gives ds/dt_i for all i at once
(B. A. Pearlmutter, Fast exact multiplication by the Hessian, Neural Computation 6, 1994, section 3: reverse mode over
reverse mode); E (ds/dt_i . d_i)^2 = |dG/dt_i d_i|^2 because E v v^T = I, as in ``adjoint.py``.

Every operand and every output of a call passes an *edge*, a view of itself, so that ds/dt counts this use of the tensor
only: the forward value and the saved value of this call's own backward. Where a gradient passes an edge in the first
backward pass it gets an edge of its own.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map

from roundoff.budget.adjoint import SiteInfo, describe
from roundoff.budget.edges import (
    OPERAND,
    OUTPUT,
    Error,
    Spot,
    Use,
    floating,
    power_sum,
    project_error,
    rerunnable,
)
from roundoff.budget.kinks import Kinks
from roundoff.budget.signs import draw_signs
from roundoff.budget.terms import TermKey, Terms
from roundoff.formats import Format
from roundoff.ops import (
    MATRIX_KINDS,
    Call,
    CallMode,
    float_tensors,
    round_gradient,
    round_operand,
    round_output,
)


@dataclass
class Edges:
    """The handler of one batch's forward pass: edges, and the errors that are made at them.

    ``cut`` names sites whose backward has no derivative: what they write is taken as a constant.
    """

    formats: Sequence[Format]
    sites: dict[str, SiteInfo]
    kinks: Kinks
    cut: frozenset[str] = frozenset()
    uses: list[Use] = field(default_factory=list)
    terms: Terms = field(default_factory=Terms)
    loss: Terms = field(default_factory=Terms)
    reached: set[str] = field(default_factory=set)
    ends: list[Tensor] = field(default_factory=list)
    users: dict[str, list[tuple[Use, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    phase: str = ""

    def before_write(self, tensor: Tensor) -> None:
        """Nothing is held of what the model writes."""

    def call(self, call: Call) -> Any:
        """Run the call between edges; the errors of its forward pass are computed at once."""
        if not torch.is_grad_enabled():
            return self._without_gradient(call)
        use = Use(call, str(call.site))
        leaves = list(call.leaves)
        for operand in call.operands:
            leaves[operand.leaf] = use.operands[operand.leaf] = self._edge(
                leaves[operand.leaf]
            )
        drawn = torch.get_rng_state() if call.kind in ("attention", "rnn") else None
        if len(call.operands) == 1:
            use.bend = self.kinks.derivative(
                call, leaves[call.operands[0].leaf].detach()
            )
        result = call.again(leaves)
        outputs = float_tensors(result)
        if not outputs:
            return call.run()
        info = describe(call, outputs, self.sites, self.formats)
        self._tie(call, info)
        self._forward_errors(use, info, drawn)
        for operand in call.operands:
            place = (OPERAND, operand.leaf)
            self._hook(use.operands[operand.leaf], use, place)
            for source in operand.sources:
                self.users[source].append((use, operand.leaf))
        count = iter(range(len(outputs)))
        result = tree_map(
            lambda t: self._output(use, next(count), t) if floating(t) else t, result
        )
        self.uses.append(use)
        use.call = Call(
            call.site, call.operator, call.func, [], [], call.operands
        )  # the arguments are not needed
        if not call.operator.inplace:
            return result
        return call.leaves[0].copy_(float_tensors(result)[0])

    def _without_gradient(self, call: Call) -> Any:
        result = call.run()
        if outputs := float_tensors(result):
            info = describe(call, outputs, self.sites, self.formats)
            info.no_path = "computed under torch.no_grad"
        return result

    def _tie(self, call: Call, info: SiteInfo) -> None:
        """An operator that writes in place keeps the format of the tensor it writes into."""
        if not call.operator.inplace or info.tied:
            return
        info.tied = tuple(
            sorted(
                s for o in call.operands if o.leaf == 0 for s in o.sources if "/" in s
            )
        )
        if not info.tied:
            reason = "writes in place into a tensor that no site made"
            info.refused |= {f.name: reason for f in self.formats}

    def _edge(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            return x.view_as(x)
        end = x.detach().requires_grad_()
        self.ends.append(end)
        return end

    def _output(self, use: Use, place: int, y: Tensor) -> Tensor:
        if not y.requires_grad:
            return y
        use.outputs[place] = get_gradient_edge(y)
        edge = y.view_as(y)
        self._hook(edge, use, (OUTPUT, place))
        return edge

    def _hook(self, tensor: Tensor, use: Use, spot: Spot) -> None:
        tensor.register_hook(functools.partial(self._passes, use, spot))  # type: ignore[no-untyped-call]

    def _passes(self, use: Use, spot: Spot, gradient: Tensor) -> Tensor | None:
        """A gradient reaches an edge of the forward pass."""
        if self.phase == "backward":
            use.gradients[spot] = gradient
            if use.bend is not None and spot[0] == OPERAND:
                x, received = use.operands[spot[1]], use.gradients[OUTPUT, 0].detach()
                gradient = gradient + (received * use.bend) * (x - x.detach())
            if (
                use.name in self.cut
                and spot[0] == OPERAND
                or not gradient.requires_grad
            ):
                edge = gradient.detach().requires_grad_()
                self.ends.append(edge)
            else:
                edge = gradient.view_as(gradient)
            use.edges[spot] = edge
            edge.register_hook(
                functools.partial(self._project, use, use.backward, spot)
            )  # type: ignore[no-untyped-call]
            return edge
        if self.phase == "probe":
            self._project(use, use.forward, spot, gradient)
        return None

    def _project(
        self, use: Use, errors: dict[Spot, list[Error]], spot: Spot, adjoint: Tensor
    ) -> None:
        if self.phase != "probe":
            return
        self.reached.add(use.name)
        for error in errors.get(spot, ()):
            project_error(self.terms, error, adjoint)

    def _forward_errors(self, use: Use, info: SiteInfo, drawn: Tensor | None) -> None:
        """Errors of operands, one by one, and of the output that the rounded operands give."""
        call, after = use.call, torch.get_rng_state() if drawn is not None else None
        for fmt in self.formats:
            rule = fmt.execution
            if rule is None or fmt.name in info.refused:
                continue
            leaves = rerunnable(call)
            for operand in call.operands:
                how = rule.activation if operand.role == "activation" else rule.weight
                if how is None or (operand.role == "bias" and not rule.bias):
                    continue
                exact = call.leaves[operand.leaf].detach()
                leaves[operand.leaf] = round_operand(exact, operand, fmt)
                part = "activation" if operand.role == "activation" else "weight"
                key = TermKey(
                    use.name,
                    fmt.name,
                    part,
                    operand.leaf,
                    tuple(sorted(operand.sources)),
                )
                use.forward[OPERAND, operand.leaf].append(
                    Error(key, 0, leaves[operand.leaf] - exact)
                )
            if not rule.output:
                continue
            if drawn is not None:
                torch.set_rng_state(drawn)  # its dropout falls as it did
            with torch.no_grad():
                again = float_tensors(call.again(leaves))
            for place, values in enumerate(again):
                key = TermKey(use.name, fmt.name, "output", -1, ())
                use.forward[OUTPUT, place].append(
                    Error(key, place, round_output(values, fmt) - values)
                )
        if after is not None:
            torch.set_rng_state(after)

    def first_pass(
        self, loss: Tensor, weights: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of the weights, with a graph of their own; the errors of the loss and of all gradients follow."""
        self.phase = "backward"
        found = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        self.phase = ""
        for use in self.uses:
            for spot, gradient in use.gradients.items():
                for error in use.forward.get(spot, ()):
                    project_error(self.loss, error, gradient.detach())
            self._backward_errors(use)
        return list(found)

    def _backward_errors(self, use: Use) -> None:
        received = {
            place: use.gradients[OUTPUT, place]
            for place in use.outputs
            if (OUTPUT, place) in use.gradients
        }
        users = self._users(use)
        for fmt in self.formats:
            rule = fmt.execution
            if rule is None or fmt.name in self.sites[use.name].refused:
                continue
            rounded = {}
            for place, gradient in received.items():
                exact = gradient.detach()
                rounded[place] = round_gradient(exact, fmt, written=False)
                if rounded[place] is not exact:
                    key = TermKey(use.name, fmt.name, "gradient", -1, users)
                    use.backward[OUTPUT, place].append(
                        Error(key, place, rounded[place] - exact)
                    )
            if not rule.output:
                continue
            for leaf, gradient in self._written(use, rounded).items():
                key = TermKey(use.name, fmt.name, "gradient", leaf, ())
                error = round_gradient(gradient, fmt, written=True) - gradient
                use.backward[OPERAND, leaf].append(Error(key, 0, error))

    def _written(self, use: Use, received: dict[int, Tensor]) -> dict[int, Tensor]:
        """The operand gradients that follow from the rounded output gradients: an addition only passes them on, and then
        rounds nothing more. A contraction mixes many; whether its inputs are rounded says nothing of its results."""
        plain = {
            leaf: use.gradients[OPERAND, leaf].detach()
            for leaf in use.operands
            if (OPERAND, leaf) in use.gradients
        }
        if not plain or use.call.kind in MATRIX_KINDS or use.name in self.cut:
            return plain
        places = list(received)
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            [use.outputs[p] for p in places],
            [use.operands[leaf] for leaf in plain],
            [received[p] for p in places],
            retain_graph=True,
            allow_unused=True,
        )
        return {
            leaf: plain[leaf] if g is None else g
            for leaf, g in zip(plain, found, strict=True)
        }

    def _users(self, use: Use) -> tuple[str, ...]:
        """The calls that use the output, where each element's gradient comes from one of them: then it arrives in the
        format that they write. Sums of absolute values and of squares agree only if no two gradients meet."""
        users = [
            (u, leaf)
            for u, leaf in self.users.get(use.name, ())
            if (OPERAND, leaf) in u.gradients
        ]
        parts = [u.gradients[OPERAND, leaf].detach() for u, leaf in users]
        whole = [g.detach() for (kind, _), g in use.gradients.items() if kind == OUTPUT]
        for power in (1, 2):
            sent, came = power_sum(parts, power), power_sum(whole, power)
            if abs(sent - came) > 1e-9 * came:
                return ()
        return tuple(sorted({u.name for u, _ in users}))

    def probe(
        self,
        gradients: Sequence[Tensor],
        signs: Sequence[Tensor],
        weights: Iterable[Tensor],
    ) -> None:
        """Send one sign vector back through both passes; every error is projected where it was made."""
        self.phase = "probe"
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
        """The sites whose backward has no derivative, and what autograd says of it; after ``first_pass``."""
        found = {}
        for use in self.uses:
            sent = [
                g
                for (kind, _), g in use.gradients.items()
                if kind == OPERAND and g.requires_grad
            ]
            came = [edge for (kind, _), edge in use.edges.items() if kind == OUTPUT]
            if not sent or not came or use.name in self.cut:
                continue
            try:
                ones = [torch.ones_like(g) for g in sent]
                torch.autograd.grad(
                    sent, came, ones, retain_graph=True, allow_unused=True
                )
            except RuntimeError as error:
                found[use.name] = str(error).splitlines()[0]
        return found


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
    """One forward, one backward and ``probes`` double backward passes of one batch; fills ``edges.terms`` (projections of
    the gradients' errors) and ``edges.loss`` (the exact first-order change of the loss). Returns loss and gradients.

    ``forward`` returns the loss, with ``mode`` entered; ``check`` may refuse it. The backward pass starts from ``scale``
    times the loss: gradients, projections and changes of the loss are all that much larger.
    """
    mode.handler = edges
    mode.begin()
    with torch.enable_grad(), mode:
        loss = forward()
    check(loss)
    gradients = edges.first_pass(loss * scale, weights)
    found = [g for g in gradients if g is not None]
    for _ in range(probes):
        signs = [draw_signs(g.shape, generator, g) for g in found]
        edges.probe(found, signs, weights)
    return loss.detach(), [None if g is None else g.detach() for g in gradients]
