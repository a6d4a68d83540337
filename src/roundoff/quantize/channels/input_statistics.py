"""Statistics of the values that weights read, from runs in full precision.

Largest and mean magnitude of each channel, second moments, and some tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.ops import Call, watch
from roundoff.preserve import preserve
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.graph import Node, Use
from roundoff.quantize.layout import Route
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.weights.hessian import Hessian

#: Bytes of second moments that are kept at a time; more weights take more passes over
#: the data.
MOMENTS = 2**29


@dataclass(frozen=True)
class Reader:
    """One call with a weight.

    Attributes:
        site: of the call.
        place: where among the call's leaves the value stands.
        axis: along which the weight reads it, from the back.
        weight: its name.
        operator: as ``matrix_view`` calls it.
        groups: of the convolution.
    """

    site: str
    place: int
    axis: int
    weight: str
    operator: str
    groups: int


@dataclass
class InputStatistics:
    """One value that weights read, over all batches.

    Attributes:
        value: its name in the graph.
        readers: the calls that read it.
        largest, mean: magnitude of each channel, ``[channels]``.
        moments: ``E[x xᵀ]`` by reader's site, ``[groups, in, in]``, where asked for.
        rows: some tokens of the value, ``[tokens, channels]``, where asked for.
    """

    value: str
    readers: list[Reader]
    largest: Tensor = field(default_factory=lambda: torch.zeros(0))
    mean: Tensor = field(default_factory=lambda: torch.zeros(0))
    moments: dict[str, Tensor] = field(default_factory=dict)
    rows: Tensor = field(default_factory=lambda: torch.zeros(0, 0))


def input_statistics(
    calibration: Calibration,
    *,
    moments: bool = False,
    tokens: int = 0,
) -> list[InputStatistics]:
    """The values that quantized weights read, in the order of the graph.

    Weights of linear layers, products and convolutions count; with ``moments`` those of
    convolutions do not. Second moments are of as many values at a time as ``MOMENTS``
    bytes hold. ``tokens``: so many rows of each value are kept, at most, evenly from
    all batches.
    """
    values: dict[tuple[str, int], InputStatistics] = {}
    for node in calibration.graph.nodes.values():
        reader = _reader(calibration.model, node)
        if reader is None or (moments and node.kind == "conv"):
            continue
        use = next(u for u in node.uses if u.operand.leaf == reader.place)
        key = (use.value, use.shape[reader.axis])
        values.setdefault(key, InputStatistics(use.value, [])).readers.append(reader)
    every = list(values.values())
    tokens_of_batch = -(-tokens // max(len(calibration.batches), 1))
    portions: Iterator[list[InputStatistics]] = iter([every])
    if moments:
        portions = _portions(every, [size for _, size in values])
    for portion in portions:
        _observe(calibration, portion, moments, tokens_of_batch)
    return every


def _reader(model: QuantizedModel, node: Node) -> Reader | None:
    """The node as a reader of a value by a quantized parameter, if it is one."""
    route = model.routes.get(node.site)
    if route is None or route.executes is not None:
        return None
    source = _only(use for use in node.uses if use.operand.role == "activation")
    weight = _only(_quantized_weights(node, route))
    if source is None or weight is None or weight.origin != "parameter":
        return None
    operator = _matrix_operator(node, weight)
    if not operator:
        return None
    place = source.operand.leaf
    axis = source.operand.reduce
    if axis >= 0:
        axis -= len(source.shape)
    return Reader(node.site, place, axis, weight.value, operator, node.groups)


def _quantized_weights(node: Node, route: Route) -> list[Use]:
    uses = [use for use in node.uses if use.operand.leaf in route.uses]
    return [use for use in uses if use.weight]


def _only(uses: Iterable[Use]) -> Use | None:
    """The one use; None where there are none or several."""
    every = list(uses)
    return every[0] if len(every) == 1 else None


def _matrix_operator(node: Node, weight: Use) -> str:
    """The name that ``matrix_view`` has for a call, ``""`` where it has none."""
    if node.kind == "conv":
        return node.operator
    if node.kind not in ("linear", "matmul") or len(weight.shape) != 2:
        return ""
    return "linear" if weight.operand.reduce % 2 else "matmul"


def _portions(
    every: Sequence[InputStatistics], sizes: Sequence[int]
) -> Iterator[list[InputStatistics]]:
    """The values in portions whose second moments take at most ``MOMENTS`` bytes."""
    portion: list[InputStatistics] = []
    held = 0
    for inputs, size in zip(every, sizes, strict=True):
        if portion and held + 4 * size * size > MOMENTS:
            yield portion
            portion = []
            held = 0
        portion.append(inputs)
        held += 4 * size * size
    if portion:
        yield portion


class _Observing:
    """The handler that sums up what the first reader of each value reads."""

    def __init__(
        self,
        model: QuantizedModel,
        every: Sequence[InputStatistics],
        moments: bool,
        tokens: int,
    ) -> None:
        self.model = model
        self.tokens = tokens
        self.by_site = {inputs.readers[0].site: inputs for inputs in every}
        self.total: dict[int, Tensor] = {}
        self.rows: dict[int, int] = {}
        self.hessians = {id(inputs): Hessian() for inputs in every} if moments else {}

    def before_write(self, tensor: Tensor) -> None:
        """Nothing is remembered."""

    def call(self, call: Call) -> Any:
        """The call's result, in full precision."""
        site = str(call.site)
        route = self.model.routes.get(site)
        leaves = call.leaves
        if route is not None:
            leaves = self.model.divided(route, leaves, WeakIdKeyDictionary())
        inputs = self.by_site.get(site)
        if inputs is not None:
            reader = inputs.readers[0]
            moved = leaves[reader.place].movedim(reader.axis, -1)
            self._add(inputs, moved.reshape(-1, moved.shape[-1]))
        return call.run(leaves)

    def _add(self, inputs: InputStatistics, rows: Tensor) -> None:
        magnitudes = rows.abs()
        largest = magnitudes.amax(0)
        if inputs.largest.numel():
            largest = torch.maximum(inputs.largest, largest)
        inputs.largest = largest
        key = id(inputs)
        total = self.total.get(key, torch.zeros_like(largest))
        self.total[key] = total + magnitudes.sum(0)
        self.rows[key] = self.rows.get(key, 0) + len(rows)
        if self.tokens:
            some = rows[:: -(-len(rows) // self.tokens)]
            kept = [inputs.rows, some] if inputs.rows.numel() else [some]
            inputs.rows = torch.cat(kept)
        if key in self.hessians:
            self.hessians[key].add(rows)


def _observe(
    calibration: Calibration,
    portion: Sequence[InputStatistics],
    moments: bool,
    tokens: int,
) -> None:
    """Fill in the statistics by one pass over the batches in full precision."""
    handler = _Observing(calibration.model, portion, moments, tokens)
    network = calibration.workload.model
    with preserve(network), torch.no_grad(), watch(network.eval(), handler) as mode:
        for batch in calibration.batches:
            mode.begin()
            with mode:
                calibration.workload.run(batch)
    for inputs in portion:
        key = id(inputs)
        inputs.mean = handler.total[key] / handler.rows[key]
        if moments:
            matrix = handler.hessians[key].matrix
            inputs.moments = {reader.site: matrix for reader in inputs.readers}
