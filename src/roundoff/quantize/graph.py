"""Graph: which call of a model reads which values, from running it on its batches.

A value is named by the site that made it, through views and copies: what ``body.0.r/relu`` returned is called
``body.0.r/relu`` wherever it is read. Values joined by ``cat`` carry the names of all their parts. What comes from outside
(an input of the model, a constant) is named by who reads it: ``stem.0/conv2d:0``, the first operand of that call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.capture.calls import Call, Operand, float_tensors, watch
from roundoff.errors import QuantizationError
from roundoff.plan.rounded import Plain
from roundoff.workload import Workload, preserve


@dataclass(frozen=True)
class Use:
    """One floating-point operand of a call: the value it reads and how (``operand`` has axes and role)."""

    value: str
    operand: Operand
    shape: tuple[int, ...]
    #: a parameter itself, no part or view of one
    whole: bool = False

    @property
    def weight(self) -> bool:
        """A parameter, or made of parameters alone."""
        return self.operand.role == "weight"


@dataclass(frozen=True)
class Node:
    """One call: what it reads and what it returned."""

    site: str
    operator: str
    kind: str
    uses: tuple[Use, ...]
    shapes: tuple[tuple[int, ...], ...]
    #: the other arguments, such as the bounds of a clamp or the groups of a convolution
    settings: tuple[Any, ...] = ()

    def use(self, leaf: int) -> Use | None:
        """The use at a place of the call's arguments."""
        return next((u for u in self.uses if u.operand.leaf == leaf), None)


@dataclass
class Graph:
    """All calls of a model on some batches, in order, and what could not be seen."""

    nodes: dict[str, Node] = field(default_factory=dict)
    #: operator, reason -> how often: calls that are no sites
    excluded: dict[tuple[str, str], int] = field(default_factory=dict)
    #: sites that read other values in other batches: the model branches on its data
    changing: set[str] = field(default_factory=set)
    #: sites that not every batch ran
    sometimes: set[str] = field(default_factory=set)
    #: values that are part of the output
    outputs: set[str] = field(default_factory=set)

    def readers(self, value: str) -> list[Node]:
        """The calls that read a value, whole or as a part."""
        return self._readers().get(value, [])

    def _readers(self) -> Mapping[str, list[Node]]:
        if not hasattr(self, "_found"):
            found: dict[str, list[Node]] = {}
            for node in self.nodes.values():
                for name in dict.fromkeys(n for use in node.uses for n in use.value.split(" ")):
                    found.setdefault(name, []).append(node)
            self._found = found
        return self._found


class _Tracer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, Node] = {}

    def call(self, call: Call) -> Any:
        result = call.run()
        outputs = float_tensors(result)
        if outputs:
            site = str(call.site)
            uses = tuple(
                Use(value_name(site, o), o, tuple(call.leaves[o.leaf].shape), isinstance(call.leaves[o.leaf], nn.Parameter))
                for o in call.operands
            )
            settings = tuple(v for v in call.leaves if isinstance(v, int | float | str | bool | None))
            shapes = tuple(tuple(t.shape) for t in outputs)
            self.nodes[site] = Node(site, call.operator.name, call.kind, uses, shapes, settings)
        return result


def value_name(site: str, operand: Operand) -> str:
    """The name of the value that an operand of a call holds."""
    return " ".join(sorted(operand.sources)) or f"{site}:{operand.leaf}"


def trace(workload: Workload, batches: Iterable[Any] | None = None) -> Graph:
    """Run a workload's model on its batches, in evaluation mode and without gradients, and return what it did.

    The model is left as it was. Raises ``QuantizationError`` without batches or without a call that is a site.
    """
    graph, runs = Graph(), Counter[str]()
    batches = workload.batches if batches is None else list(batches)
    if not batches:
        raise QuantizationError("no calibration data", where=workload.name, expected="one batch or more", got="none",
                                do="give the batches that the model is calibrated on")  # fmt: skip
    tracer = _Tracer()
    with preserve(workload.model), torch.no_grad(), watch(workload.model.eval(), tracer) as mode:
        for batch in batches:
            mode.begin()
            tracer.nodes = {}
            with mode:
                output = workload.run(batch)
            for tensor in float_tensors(output) or _tensors(output):
                graph.outputs |= mode._sources_of(tensor)
            for site, node in tracer.nodes.items():
                runs[site] += 1
                known = graph.nodes.setdefault(site, node)
                if [u.value for u in known.uses] != [u.value for u in node.uses]:
                    graph.changing.add(site)
        graph.excluded = {key: row.count for key, row in mode.excluded.items()}
    graph.sometimes = {site for site, count in runs.items() if count < len(batches)}
    if not graph.nodes:
        raise QuantizationError("no operator of this model can be seen", where=workload.name,
                                got=type(workload.model).__name__,
                                expected="a module that calls torch on floating-point tensors")  # fmt: skip
    return graph


def _tensors(output: Any) -> list[Tensor]:
    from roundoff.attribute.target import named_tensors

    return list(named_tensors(output).values())
