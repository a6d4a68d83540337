"""Fold BatchNorm into the layer before it, or the layer behind it.

In evaluation mode BatchNorm is ``y = a·x + d`` for each channel, with
``a = γ / √(σ² + ε)`` and ``d = β - a·μ`` (Ioffe and Szegedy, arXiv:1502.03167,
algorithm 2). After a layer ``W·x + b`` that is the layer ``a·W``, ``a·b + d``; before a
layer it is the layer ``W·a``, ``b + W·d``, where every output sees every input: not
where zeros are padded behind the BatchNorm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from roundoff.errors import QuantizationError
from roundoff.quantize.channels.changed_copy import (
    check_same,
    replace_,
    submodule,
    take_over_,
)
from roundoff.quantize.channels.follow import follow_channels
from roundoff.quantize.channels.groups import components
from roundoff.quantize.channels.labels import Ids, Labels
from roundoff.quantize.graph import Graph, Node, trace
from roundoff.workload import Workload

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Folded:
    """One BatchNorm call: the layer that it is now part of, or why it is still there.

    Attributes:
        norm: site of the call.
        layer: path of the layer, ``""`` when it was not folded.
        reason: why not, ``""`` when it was.
    """

    norm: str
    layer: str
    reason: str = ""


def fold_batch_norm_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> list[Folded]:
    """Fold every BatchNorm that can be folded, in place.

    The layer takes its values, its module becomes ``nn.Identity``. The weights are
    computed in float64 and rounded once to their dtype. The model's outputs on the
    first batch are compared before and after.

    Args:
        model: in evaluation mode (a BatchNorm in training mode stays, with that
            reason).
        batches: run to see the calls; one is enough unless the control flow depends on
            the data.
        forward: ``forward(model, batch)``; by default as :class:`~roundoff.Workload`
            calls a model.

    Returns:
        One row for each BatchNorm call.

    Raises:
        QuantizationError: no batches, or the outputs are not the same; the model is
            then as before.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).eval()
        >>> fold_batch_norm_(net, [torch.zeros(1, 1, 4, 4)])
        [Folded(norm='1/batch_norm', layer='0', reason='')]
        >>> net[1]
        Identity()
    """
    workload = Workload(model, batches, forward=forward)
    trial = workload.with_model(copy.deepcopy(model))
    rows = fold_norms_(trial, trace(workload), like=workload)
    if any(row.layer for row in rows):
        take_over_(model, trial.model)
    return rows


def fold_norms_(workload: Workload, graph: Graph, *, like: Workload) -> list[Folded]:
    """Fold the BatchNorm of a workload's model, in place, whose calls ``graph`` has.

    ``like`` has the same model unfolded. Raises ``QuantizationError`` where its output
    on the first batch is not the same; the model is then spoilt.
    """
    channels = _Channels(follow_channels(like))
    nodes = [node for node in graph.nodes.values() if node.operator == "batch_norm"]
    rows = [_fold(workload.model, graph, node, channels) for node in nodes]
    if any(row.layer for row in rows):
        check_same(like, workload, "folding BatchNorm", depth=len(graph.nodes))
    return rows


class _Channels:
    """Compares the channels of a BatchNorm with a layer's outputs or inputs."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.component = components(labels, "rescale")
        self.pairs = np.concatenate([*labels.same, np.zeros((0, 2), np.int64)])

    def follow(self, norm: str, layer: str, size: int) -> bool:
        """True if the BatchNorm scales what the layer makes.

        Whatever becomes of it later does not matter (a shuffle joins channels).
        """
        if size == 1:
            return True  # the layer makes one channel only
        norm_span = self._span(f"{norm}.running_mean", "batch_norm")
        layer_span = self._span(f"{layer}.weight", "producer")
        first = self.pairs[:, 0]
        second = self.pairs[:, 1]
        ties = np.concatenate(
            [
                _ties(first, second, norm_span, layer_span),
                _ties(second, first, norm_span, layer_span),
            ],
            1,
        )
        of_norm, of_layer = ties - np.array([[norm_span[0]], [layer_span[0]]])
        covers_all = norm_span[1] == layer_span[1] == size == len(np.unique(of_norm))
        return covers_all and np.array_equal(of_norm, of_layer)

    def lead(self, norm: str, layer: str, size: int) -> bool:
        """True if the layer's inputs are what the BatchNorm makes, one by one."""
        if size == 1:
            return True
        of_norm = self._components(f"{norm}.running_mean", "batch_norm")
        of_layer = self._components(f"{layer}.weight", "consumer")
        covers_all = len(of_norm) == size == len(np.unique(of_norm))
        return covers_all and np.array_equal(of_norm, of_layer)

    def _components(self, name: str, part: str) -> Ids:
        first, count = self._span(name, part)
        return self.component[first : first + count]

    def _span(self, name: str, part: str) -> tuple[int, int]:
        """The first label of the one axis, and the count; (0, 0) unless there is one."""
        spans = [
            span
            for space, span in self.labels.spaces.items()
            if (space.name, space.part) == (name, part)
        ]
        return spans[0] if len(spans) == 1 else (0, 0)


def _ties(
    left: Ids, right: Ids, left_span: tuple[int, int], right_span: tuple[int, int]
) -> Ids:
    """The pairs with labels in a left and a right span, ``[2, pairs]``."""
    kept = _within(left, left_span) & _within(right, right_span)
    return np.stack((left[kept], right[kept]))


def _within(ids: Ids, span: tuple[int, int]) -> NDArray[np.bool_]:
    return (ids >= span[0]) & (ids < span[0] + span[1])


def _path(node: Node) -> str:
    """The path of the module that makes a call."""
    return node.site.rpartition("/")[0]


def _fold(model: nn.Module, graph: Graph, node: Node, channels: _Channels) -> Folded:
    """Fold one BatchNorm call into the layer before it, or else behind it."""
    path = _path(node)
    norm = submodule(model, path)
    if not isinstance(norm, _BatchNorm):
        reason = "the call is in the code of a module, not a BatchNorm module's own"
        return Folded(node.site, "", reason)
    reason = _why_not_norm(norm, graph, path)
    if reason:
        return Folded(node.site, "", reason)
    before = _fold_before(model, graph, node, norm, channels)
    if not before.reason:
        return before
    behind = _fold_behind(model, graph, node, norm, channels)
    if not behind.reason:
        return behind
    reason = f"layer before it: {before.reason}; layer behind it: {behind.reason}"
    return Folded(node.site, "", reason)


def _why_not_norm(norm: _BatchNorm, graph: Graph, path: str) -> str:
    if norm.training or norm.running_mean is None or norm.running_var is None:
        return "it is in training mode or keeps no statistics: call model.eval()"
    calls = [n for n in graph.nodes.values() if n.operator == "batch_norm"]
    if sum(_path(call) == path for call in calls) > 1:
        return "the module is used more than once"
    if norm._forward_hooks or norm._forward_pre_hooks:
        return "the module has hooks"
    return ""


def _fold_before(
    model: nn.Module, graph: Graph, node: Node, norm: _BatchNorm, channels: _Channels
) -> Folded:
    """Fold a BatchNorm into the layer that makes its input."""
    value = node.uses[0].value
    producer = graph.nodes.get(value)
    if producer is None:
        return Folded(node.site, "", "no single operator makes its input")
    path = _path(producer)
    layer = submodule(model, path)
    reason = _why_not_before(layer, graph, producer, value)
    if reason:
        return Folded(node.site, "", reason)
    size = _size(layer, "out")
    if size != norm.num_features or not channels.follow(_path(node), path, size):
        reason = f"the channels of {value} are not those of the BatchNorm"
        return Folded(node.site, "", reason)
    _fold_into_producer(layer, norm)
    replace_(model, _path(node), nn.Identity())
    return Folded(node.site, path)


def _fold_behind(
    model: nn.Module, graph: Graph, node: Node, norm: _BatchNorm, channels: _Channels
) -> Folded:
    """Fold a BatchNorm into the one layer that reads its output."""
    readers = graph.readers(node.site)
    if len(readers) != 1 or node.site in graph.outputs:
        reason = "its output is read by several, or is the model's output"
        return Folded(node.site, "", reason)
    path = _path(readers[0])
    layer = submodule(model, path)
    reason = _why_not_behind(layer, graph, node, readers[0])
    if reason:
        return Folded(node.site, "", reason)
    size = _size(layer, "in")
    if size != norm.num_features or not channels.lead(_path(node), path, size):
        reason = f"the channels of {readers[0].site} are not those of the BatchNorm"
        return Folded(node.site, "", reason)
    _fold_into_consumer(layer, norm)
    replace_(model, _path(node), nn.Identity())
    return Folded(node.site, path)


def _why_not_before(
    layer: nn.Module | None, graph: Graph, producer: Node, value: str
) -> str:
    if producer.kind not in ("conv", "linear"):
        return f"{producer.site} is no convolution or linear layer"
    reason = _why_not_layer(layer, graph, producer)
    if reason:
        return reason
    if len(graph.readers(value)) > 1 or value in graph.outputs:
        return f"the output of {value} is read elsewhere too"
    return ""


def _why_not_behind(
    layer: nn.Module | None, graph: Graph, node: Node, reader: Node
) -> str:
    if not isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
        return f"{reader.site} is no convolution or linear layer"
    if reader.uses[0].value != node.site:
        return f"{reader.site} reads other values as well"
    if pads_with_zeros(layer):
        return f"{reader.site} pads with zeros behind it"
    return _why_not_layer(layer, graph, reader)


def pads_with_zeros(layer: nn.Module) -> bool:
    """True if a linear layer or convolution reads zeros beside its input."""
    if not isinstance(layer, CONVOLUTIONS):
        return False
    if isinstance(layer.padding, str):
        return layer.padding == "same" and any(size != 1 for size in layer.kernel_size)
    return any(size != 0 for size in layer.padding)


def _why_not_layer(layer: nn.Module | None, graph: Graph, node: Node) -> str:
    plain = isinstance(layer, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED))
    if not plain or not isinstance(getattr(layer, "weight", None), nn.Parameter):
        return f"{node.site} is not in a plain convolution or linear module"
    weights = [use.value for use in node.uses if use.weight]
    if len(weights) != 1 or _count_uses(graph, weights[0]) > 1:
        return f"the weight of {node.site} is used more than once"
    return ""


def _count_uses(graph: Graph, value: str) -> int:
    return sum(use.value == value for n in graph.nodes.values() for use in n.uses)


def _affine(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """a and d of ``a·x + d``, float64."""
    mean = norm.running_mean
    var = norm.running_var
    if mean is None or var is None:  # checked by the caller
        raise QuantizationError("a BatchNorm without statistics cannot be folded")
    a = (var.double() + norm.eps).rsqrt()
    if norm.affine:
        a = a * norm.weight.detach().double()
    shift = norm.bias.detach().double() if norm.affine else 0.0
    d = -a * mean.double() + shift
    return a, d


@torch.no_grad()
def _fold_into_producer(layer: Any, norm: _BatchNorm) -> None:
    a, d = _affine(norm)
    weight = layer.weight.double()
    if isinstance(layer, TRANSPOSED):
        # [in, out / groups, ...]: row block g makes outputs of group g
        shape = weight.shape
        split = weight.view(layer.groups, shape[0] // layer.groups, shape[1], -1)
        scaled = (split * a.view(layer.groups, 1, -1, 1)).view(shape)
    else:
        scaled = weight * a.view(-1, *[1] * (weight.ndim - 1))
    bias = d if layer.bias is None else layer.bias.double() * a + d
    _set_parameters_(layer, scaled, bias)


@torch.no_grad()
def _fold_into_consumer(layer: Any, norm: _BatchNorm) -> None:
    a, d = _affine(norm)
    weight = layer.weight.double()
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    split = weight.view(groups, weight.shape[0] // groups, weight.shape[1], -1)
    shift = (split * d.view(groups, 1, -1, 1)).sum((2, 3)).view(-1)
    scaled = (split * a.view(groups, 1, -1, 1)).view(weight.shape)
    bias = shift if layer.bias is None else layer.bias.double() + shift
    _set_parameters_(layer, scaled, bias)


def _set_parameters_(layer: Any, weight: Tensor, bias: Tensor) -> None:
    layer.weight.copy_(weight)
    if layer.bias is None:
        layer.bias = nn.Parameter(
            bias.to(layer.weight), requires_grad=layer.weight.requires_grad
        )
    else:
        layer.bias.copy_(bias)


def _size(layer: nn.Module | None, side: str) -> int:
    """The channels that a layer makes (``out``) or reads (``in``); 0 for others."""
    kind = "features" if isinstance(layer, nn.Linear) else "channels"
    size: int = getattr(layer, f"{side}_{kind}", 0)
    return size
