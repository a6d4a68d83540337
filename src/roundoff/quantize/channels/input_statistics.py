"""What the weights of a model read: largest and mean magnitude of each channel, and second moments, from full precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.ops import Call, watch
from roundoff.preserve import preserve
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.graph import Node
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.weights.hessian import Hessian

#: Bytes of second moments that are kept at a time; more weights than that take more passes over the data.
MOMENTS = 2**29


@dataclass(frozen=True)
class Reader:
    """One call with a weight: where it reads the value, along which axis (from the back), and its weight."""

    site: str
    place: int
    axis: int
    weight: str
    operator: str
    groups: int


@dataclass
class Inputs:
    """One value that weights read: its readers, and over all batches for each channel the largest and the mean magnitude.

    ``moments`` has ``E[x xᵀ]`` for each reader's site, ``[groups, in, in]``, where they were asked for.
    """

    value: str
    readers: list[Reader]
    largest: Tensor = field(default_factory=lambda: torch.zeros(0))
    mean: Tensor = field(default_factory=lambda: torch.zeros(0))
    moments: dict[str, Tensor] = field(default_factory=dict)
    #: some tokens of the value, ``[tokens, channels]``, where they were asked for
    rows: Tensor = field(default_factory=lambda: torch.zeros(0, 0))


def inputs_of(
    calibration: Calibration,
    *,
    moments: bool = False,
    tokens: int = 0,
) -> list[Inputs]:
    """The values that quantized weights of linear layers, products and convolutions read, in the order of the graph.

    ``tokens``: so many rows of each value are kept, at most, evenly from all batches.
    Second moments are of linear layers and products alone, and of as many at a time as ``MOMENTS`` bytes hold.
    """
    found: dict[tuple[str, int], Inputs] = {}
    for node in calibration.graph.nodes.values():
        reader = _reader(calibration.model, node)
        if reader is None or (moments and node.kind == "conv"):
            continue
        use = next(u for u in node.uses if u.operand.leaf == reader.place)
        found.setdefault(
            (use.value, use.shape[reader.axis]), Inputs(use.value, [])
        ).readers.append(reader)
    every = list(found.values())
    per_batch = -(-tokens // max(len(calibration.batches), 1))
    for some in _portions(every, found) if moments else [every]:
        _see(calibration, some, moments, per_batch)
    return every


def _reader(model: QuantizedModel, node: Node) -> Reader | None:
    route = model.routes.get(node.site)
    if (
        route is None
        or route.executes is not None
        or node.kind not in ("linear", "matmul", "conv")
    ):
        return None
    sources = [u for u in node.uses if u.operand.role == "activation"]
    weights = [u for u in node.uses if u.weight and u.operand.leaf in route.uses]
    if len(sources) != 1 or len(weights) != 1 or weights[0].origin != "parameter":
        return None
    (source,), (weight,) = sources, weights
    if node.kind != "conv" and len(weight.shape) != 2:
        return None
    operator = node.operator
    if node.kind != "conv":
        operator = "linear" if weight.operand.reduce % 2 else "matmul"
    axis = source.operand.reduce - (
        len(source.shape) if source.operand.reduce >= 0 else 0
    )
    return Reader(
        node.site, source.operand.leaf, axis, weight.value, operator, node.groups
    )


def _portions(
    every: Sequence[Inputs], sizes: Iterable[tuple[str, int]]
) -> Iterable[list[Inputs]]:
    portion: list[Inputs] = []
    held = 0
    for inputs, (_, size) in zip(every, sizes, strict=True):
        if portion and held + 4 * size * size > MOMENTS:
            yield portion
            portion, held = [], 0
        portion.append(inputs)
        held += 4 * size * size
    if portion:
        yield portion


class _Sees:
    def __init__(
        self, model: QuantizedModel, every: Sequence[Inputs], moments: bool, tokens: int
    ) -> None:
        self.model, self.tokens = model, tokens
        self.by_site = {
            reader.site: (inputs, reader)
            for inputs in every
            for reader in inputs.readers
        }
        self.total: dict[int, Tensor] = {}
        self.rows: dict[int, int] = {}
        self.hessians = {id(inputs): Hessian() for inputs in every} if moments else {}
        self.done: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def before_write(self, tensor: Tensor) -> None:
        """Nothing is remembered."""

    def call(self, call: Call) -> Any:
        site = str(call.site)
        route = self.model.routes.get(site)
        leaves = (
            call.leaves
            if route is None
            else self.model.divided(route, call.leaves, WeakIdKeyDictionary())
        )
        if (
            site in self.by_site
            and self.by_site[site][1] is self.by_site[site][0].readers[0]
        ):
            inputs, reader = self.by_site[site]
            moved = leaves[reader.place].movedim(reader.axis, -1)
            rows = moved.reshape(-1, moved.shape[-1])
            largest, key = rows.abs().amax(0), id(inputs)
            inputs.largest = (
                torch.maximum(inputs.largest, largest)
                if inputs.largest.numel()
                else largest
            )
            self.total[key] = self.total.get(
                key, torch.zeros_like(largest)
            ) + rows.abs().sum(0)
            self.rows[key] = self.rows.get(key, 0) + len(rows)
            if self.tokens:
                some = rows[:: -(-len(rows) // self.tokens)]
                inputs.rows = (
                    torch.cat([inputs.rows, some])
                    if inputs.rows.numel()
                    else some.clone()
                )
            if key in self.hessians:
                self.hessians[key].add(rows)
        return call.run(leaves)


def _see(
    calibration: Calibration,
    some: Sequence[Inputs],
    moments: bool,
    tokens: int,
) -> None:
    """One pass over the batches in full precision."""
    handler = _Sees(calibration.model, some, moments, tokens)
    network = calibration.workload.model
    with preserve(network), torch.no_grad(), watch(network.eval(), handler) as mode:
        for batch in calibration.batches:
            mode.begin()
            with mode:
                calibration.workload.run(batch)
    for inputs in some:
        inputs.mean = handler.total[id(inputs)] / handler.rows[id(inputs)]
        if moments:
            inputs.moments = {
                reader.site: handler.hessians[id(inputs)].matrix
                for reader in inputs.readers
            }
