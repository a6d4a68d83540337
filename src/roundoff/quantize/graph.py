"""Graph: which call of a model reads which values, from running it on its batches.

A value is named by the site that made it, through views and copies: what ``body.0.r/relu`` returned is called
``body.0.r/relu`` wherever it is read. Values joined by ``cat`` carry the names of all their parts. What comes from outside
(an input of the model, a constant) is named by who reads it: ``stem.0/conv2d:0``, the first operand of that call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.ops import Call, CallMode, Excluded, Operand, float_tensors, watch
from roundoff.plan import Plain
from roundoff.preserve import preserve
from roundoff.workload import Workload

#: Why calls are no sites that round nothing.
_HARMLESS = (
    "moves values, rounds nothing",
    "does not depend on values",
    "random",
    "integer or boolean result",
)


@dataclass(frozen=True)
class Use:
    """One floating-point operand of a call: the value it reads and how (``operand`` has axes and role)."""

    value: str
    operand: Operand
    shape: tuple[int, ...]
    #: ``parameter`` (itself, no view or copy of one), ``made`` of parameters and buffers alone, or ``data``
    origin: str = "data"

    @property
    def weight(self) -> bool:
        """A parameter, or moved from parameters alone."""
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

    @property
    def groups(self) -> int:
        """The groups of a convolution, from its shapes; 1 for other calls."""
        weight = next((u for u in self.uses if u.operand.leaf == 1), None)
        if self.kind != "conv" or weight is None:
            return 1
        axis = 1 - len(weight.shape)
        channels = (
            self.shapes[0][axis]
            if "transpose" in self.operator
            else self.uses[0].shape[axis]
        )
        return channels // max(weight.shape[1], 1)


@dataclass
class Graph:
    """All calls of a model on some batches, in order, and what could not be seen."""

    nodes: dict[str, Node] = field(default_factory=dict)
    #: calls that are no sites, by operator and reason
    excluded: list[Excluded] = field(default_factory=list)
    #: sites that read other values in other batches: the model branches on its data
    changing: set[str] = field(default_factory=set)
    #: sites that compute something of parameters and buffers alone
    made: set[str] = field(default_factory=set)
    #: sites that not every batch ran
    sometimes: set[str] = field(default_factory=set)
    #: whether the code asks for the value of a tensor (``if x.sum() > 0``), so that other data may take other branches
    asks: bool = False
    #: values that are part of the output
    outputs: set[str] = field(default_factory=set)

    @property
    def hidden(self) -> list[tuple[str, str]]:
        """(first place, reason) of the excluded calls that round: their arithmetic no site stands for."""
        return [
            (row.examples[0], row.reason)
            for row in self.excluded
            if row.reason not in _HARMLESS
        ]

    def readers(self, value: str) -> list[Node]:
        """The calls that read a value, whole or as a part."""
        return self._readers.get(value, [])

    @cached_property
    def _readers(self) -> Mapping[str, list[Node]]:
        found: dict[str, list[Node]] = {}
        for node in self.nodes.values():
            for name in dict.fromkeys(
                n for use in node.uses for n in use.value.split(" ")
            ):
                found.setdefault(name, []).append(node)
        return found


_ASKS = (
    Tensor.__bool__,
    Tensor.item,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.tolist,
    torch.equal,
)


class _Asking(CallMode):
    """Notes whether the value of a tensor becomes one of Python's."""

    asks = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.asks |= func in _ASKS
        return super().__torch_function__(func, types, args, kwargs)


class _Tracer(Plain):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.nodes: dict[str, Node] = {}
        self.parameters = {id(p): name for name, p in model.named_parameters()}
        self.buffers = {id(b) for b in model.buffers()}
        self.made: set[str] = set()

    def call(self, call: Call) -> Any:
        result = call.run()
        outputs = float_tensors(result)
        if outputs:
            site = str(call.site)
            uses = tuple(
                Use(
                    value_name(site, o),
                    o,
                    tuple(call.leaves[o.leaf].shape),
                    self._origin(call.leaves[o.leaf], o),
                )
                for o in call.operands
            )
            integers = any(
                isinstance(v, Tensor) and not v.is_floating_point() for v in call.leaves
            )
            if uses and not integers and all(u.origin != "data" for u in uses):
                self.made.add(site)
            settings = tuple(
                v for v in call.leaves if isinstance(v, int | float | str | bool | None)
            )
            shapes = tuple(tuple(t.shape) for t in outputs)
            self.nodes[site] = Node(
                site, call.operator.name, call.kind, uses, shapes, settings
            )
        return result

    def _origin(self, value: Tensor, operand: Operand) -> str:
        if id(value) in self.parameters:
            return "parameter"
        if id(value) in self.buffers or id(value._base) in self.buffers:
            return "made"
        known = self.made.union(self.parameters.values())
        return "made" if operand.sources and operand.sources <= known else "data"


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
        raise QuantizationError(
            "no calibration data",
            where=workload.name,
            expected="one batch or more",
            got="none",
            do="give the batches that the model is calibrated on",
        )
    tracer = _Tracer(workload.model)
    with (
        preserve(workload.model),
        torch.no_grad(),
        watch(workload.model.eval(), tracer, _Asking) as mode,
    ):
        for batch in batches:
            mode.begin()
            tracer.nodes, tracer.made = {}, set()
            with mode:
                output = workload.run(batch)
            for tensor in float_tensors(output) or _tensors(output):
                graph.outputs |= mode._sources_of(tensor)
            for site, node in tracer.nodes.items():
                runs[site] += 1
                graph.made |= tracer.made
                known = graph.nodes.setdefault(site, node)
                if _read(known) != _read(node):
                    graph.changing.add(site)
        graph.asks = isinstance(mode, _Asking) and mode.asks
        graph.excluded = list(mode.excluded.values())
    graph.sometimes = {site for site, count in runs.items() if count < len(batches)}
    if not graph.nodes:
        raise QuantizationError(
            "no operator of this model can be seen",
            where=workload.name,
            got=type(workload.model).__name__,
            expected="a module that calls torch on floating-point tensors",
        )
    return graph


def _read(node: Node) -> list[tuple[str, int]]:
    return [(use.value, use.operand.leaf) for use in node.uses]


def _tensors(output: Any) -> list[Tensor]:
    from roundoff.workload import named_tensors

    return list(named_tensors(output).values())
