"""Graph: which call of a model reads which values, from running it on its batches.

A value is named by the site that made it, through views and copies: what
``body.0.r/relu`` returned is called ``body.0.r/relu`` wherever it is read. Values joined
by ``cat`` carry the names of all their parts. What comes from outside (an input of the
model, a constant) is named by who reads it: ``stem.0/conv2d:0``, the first operand of
that call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from roundoff.errors import QuantizationError
from roundoff.ops import Call, CallMode, Excluded, Operand, float_tensors, watch
from roundoff.plan import Plain
from roundoff.preserve import preserve
from roundoff.workload import Workload, named_tensors

#: Batches, at most, that a model is traced on that never asks for a tensor's value.
SAMPLED_BATCHES = 4
#: Why calls are no sites that round nothing.
_HARMLESS = (
    "moves values, rounds nothing",
    "does not depend on values",
    "random",
    "integer or boolean result",
)


@dataclass(frozen=True)
class Use:
    """One floating-point operand of a call: the value it reads, and its axes and role.

    ``origin`` is ``parameter`` (itself, no view or copy of one), ``computed`` (from
    parameters and buffers alone) or ``data``.
    """

    value: str
    operand: Operand
    shape: tuple[int, ...]
    origin: str = "data"

    @property
    def weight(self) -> bool:
        """Return True for a parameter, or what is moved from parameters alone."""
        return self.operand.role == "weight"


@dataclass(frozen=True)
class Node:
    """One call: what it reads and what it returned.

    ``settings`` are the other arguments, such as the bounds of a clamp or the groups of
    a convolution.
    """

    site: str
    operator: str
    kind: str
    uses: tuple[Use, ...]
    shapes: tuple[tuple[int, ...], ...]
    settings: tuple[Any, ...] = ()

    def use(self, leaf: int) -> Use | None:
        """Return the use at a place of the call's arguments."""
        return next((u for u in self.uses if u.operand.leaf == leaf), None)

    @property
    def activations(self) -> list[Use]:
        """The operands that are neither weights nor biases."""
        return [use for use in self.uses if use.operand.role == "activation"]

    @property
    def groups(self) -> int:
        """The groups of a convolution, from its shapes; 1 for other calls."""
        weight = self.use(1)
        if self.kind != "conv" or weight is None:
            return 1
        axis = 1 - len(weight.shape)
        transposed = "transpose" in self.operator
        shape = self.shapes[0] if transposed else self.uses[0].shape
        return shape[axis] // max(weight.shape[1], 1)


@dataclass
class Graph:
    """All calls of a model on some batches, in order, and what could not be seen.

    Attributes:
        nodes: the calls, by site.
        excluded: calls that are no sites, by operator and reason.
        changing: sites that read other values in other batches: the model branches on
            its data.
        of_parameters: sites that compute something from parameters and buffers alone.
        occasional: sites that not every batch ran.
        asks: True where the code asks for the value of a tensor (``if x.sum() > 0``),
            so that other data may take other branches.
        outputs: values that are part of the output.
        sizes_vary: sites that have other sizes in another batch of the same shapes: the
            data decide which rows they get (top-k, boolean masks), so that the rows of
            two runs are not the same rows.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    excluded: list[Excluded] = field(default_factory=list)
    changing: set[str] = field(default_factory=set)
    of_parameters: set[str] = field(default_factory=set)
    occasional: set[str] = field(default_factory=set)
    asks: bool = False
    outputs: set[str] = field(default_factory=set)
    sizes_vary: set[str] = field(default_factory=set)

    @property
    def hidden(self) -> list[tuple[str, str]]:
        """(first place, reason) of excluded calls that round: no site stands for them."""
        return [
            (row.examples[0], row.reason)
            for row in self.excluded
            if row.reason not in _HARMLESS
        ]

    @property
    def branches(self) -> bool:
        """True where the data were seen to decide which calls are made."""
        return self.asks and bool(self.occasional or self.changing)

    def readers(self, value: str) -> list[Node]:
        """Return the calls that read a value, whole or as a part."""
        return self._readers.get(value, [])

    @cached_property
    def _readers(self) -> Mapping[str, list[Node]]:
        readers: dict[str, list[Node]] = {}
        for node in self.nodes.values():
            parts = [name for use in node.uses for name in use.value.split(" ")]
            for name in dict.fromkeys(parts):
                readers.setdefault(name, []).append(node)
        return readers


_ASKS = (
    Tensor.__bool__,
    Tensor.item,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.tolist,
    torch.equal,
)


class _AskingMode(CallMode):
    """Notes when the value of a tensor becomes one of Python's."""

    asks = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.asks |= func in _ASKS
        return super().__torch_function__(func, types, args, kwargs)


class _Tracer(Plain):
    """Notes each call of one batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {id(p): name for name, p in model.named_parameters()}
        self.buffers = {id(b) for b in model.buffers()}
        self.begin()

    def begin(self) -> None:
        """Start the next batch."""
        self.nodes: dict[str, Node] = {}
        self.of_parameters: set[str] = set()

    def call(self, call: Call) -> Any:
        result = call.run()
        outputs = float_tensors(result)
        if outputs:
            self._note(call, outputs)
        return result

    def _note(self, call: Call, outputs: Sequence[Tensor]) -> None:
        site = str(call.site)
        uses = tuple(self._use(site, call, operand) for operand in call.operands)
        if uses and not _reads_integers(call) and all(u.origin != "data" for u in uses):
            self.of_parameters.add(site)
        settings = tuple(
            v for v in call.leaves if isinstance(v, int | float | str | bool | None)
        )
        shapes = tuple(tuple(t.shape) for t in outputs)
        self.nodes[site] = Node(
            site, call.operator.name, call.kind, uses, shapes, settings
        )

    def _use(self, site: str, call: Call, operand: Operand) -> Use:
        value = call.leaves[operand.leaf]
        origin = self._origin(value, operand)
        return Use(value_name(site, operand), operand, tuple(value.shape), origin)

    def _origin(self, value: Tensor, operand: Operand) -> str:
        if id(value) in self.parameters:
            return "parameter"
        if id(value) in self.buffers or id(value._base) in self.buffers:
            return "computed"
        constant = self.of_parameters.union(self.parameters.values())
        is_constant = operand.sources and operand.sources <= constant
        return "computed" if is_constant else "data"


def _reads_integers(call: Call) -> bool:
    return any(isinstance(v, Tensor) and not v.is_floating_point() for v in call.leaves)


def value_name(site: str, operand: Operand) -> str:
    """Name the value that an operand of a call holds."""
    return " ".join(sorted(operand.sources)) or f"{site}:{operand.leaf}"


def trace(workload: Workload, batches: Iterable[Any] | None = None) -> Graph:
    """Run a workload's model on its batches and return the graph of its calls.

    The model runs in evaluation mode and without gradients, and is left as it was.
    Raises ``QuantizationError`` without batches or without a call that is a site.
    """
    batches = workload.batches if batches is None else list(batches)
    if not batches:
        raise no_data(workload.name)
    graph = Graph()
    runs = Counter[str]()
    tracer = _Tracer(workload.model)
    seen: dict[tuple[Any, ...], dict[str, Node]] = {}
    with (
        preserve(workload.model),
        torch.no_grad(),
        watch(workload.model.eval(), tracer, _AskingMode) as mode,
    ):
        for batch in batches:
            mode.begin()
            tracer.begin()
            with mode:
                output = workload.run(batch)
            runs.update(list(tracer.nodes))
            for tensor in _output_tensors(output):
                graph.outputs |= mode._sources_of(tensor)
            _add_batch(graph, tracer)
            _compare_sizes(graph, tracer, seen.setdefault(_shapes(batch), {}))
        graph.asks = isinstance(mode, _AskingMode) and mode.asks
        graph.excluded = list(mode.excluded.values())
    graph.occasional = {site for site, count in runs.items() if count < len(batches)}
    if not graph.nodes:
        raise QuantizationError(
            "no operator of this model can be seen",
            where=workload.name,
            got=type(workload.model).__name__,
            expected="a module that calls torch on floating-point tensors",
        )
    return graph


def trace_sampled(workload: Workload) -> Graph:
    """Trace ``SAMPLED_BATCHES`` of a workload's batches, spread over all of them.

    A model that may branch on the values of its data is traced on all batches.
    """
    sample = workload.batches[:: -(-len(workload.batches) // SAMPLED_BATCHES)]
    graph = trace(workload, sample)
    if graph.asks and len(sample) < len(workload.batches):
        return trace(workload)
    return graph


def no_data(where: str) -> QuantizationError:
    """The error for calibration without batches."""
    return QuantizationError(
        "no calibration data",
        where=where,
        expected="one batch or more",
        got="none",
        do="give the batches that the model is calibrated on",
    )


def _add_batch(graph: Graph, tracer: _Tracer) -> None:
    """Add the calls of one batch to a graph."""
    graph.of_parameters |= tracer.of_parameters
    for site, node in tracer.nodes.items():
        first = graph.nodes.setdefault(site, node)
        if _places_read(first) != _places_read(node):
            graph.changing.add(site)


def _compare_sizes(graph: Graph, tracer: _Tracer, seen: dict[str, Node]) -> None:
    """Note calls that have other sizes than in an earlier batch of the same shapes."""
    for site, node in tracer.nodes.items():
        first = seen.setdefault(site, node)
        if first.shapes != node.shapes:
            graph.sizes_vary.add(site)


def _shapes(batch: Any) -> tuple[Any, ...]:
    """What a batch consists of: tensors by shape, numbers by value."""
    leaves = tree_flatten(batch)[0]
    return tuple(
        tuple(leaf.shape) if isinstance(leaf, Tensor | np.ndarray) else repr(leaf)
        for leaf in leaves
    )


def _places_read(node: Node) -> list[tuple[str, int]]:
    return [(use.value, use.operand.leaf) for use in node.uses]


def _output_tensors(output: Any) -> list[Tensor]:
    return float_tensors(output) or list(named_tensors(output).values())
