"""BatchNorm folded into the layer before it, or after it.

In evaluation mode BatchNorm is ``y = a·x + d`` for each channel, with ``a = γ / √(σ² + ε)`` and ``d = β - a·μ`` (Ioffe and
Szegedy, arXiv:1502.03167, algorithm 2). After a layer ``W·x + b`` that is the layer ``a·W``, ``a·b + d``; before a layer it
is the layer ``W·a``, ``b + W·d``, where every output sees every input: not where zeros are padded behind the BatchNorm.
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
from roundoff.ops import float_tensors
from roundoff.preserve import preserve
from roundoff.quantize.channels.groups import components, followed
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
    """Fold every BatchNorm that can be folded, in place: the layer takes its values, its module becomes ``nn.Identity``.

    The weights are computed in float64 and rounded once to their dtype. The model's outputs on the first batch are
    compared before and after.

    Args:
        model: in evaluation mode (a BatchNorm in training mode stays, with that reason).
        batches: the calls are found by running them; one is enough unless the control flow depends on the data.
        forward: ``forward(model, batch)``; by default as :class:`~roundoff.Workload` calls a model.

    Returns:
        One row for each BatchNorm call.

    Raises:
        QuantizationError: no batches, or the outputs are not the same; the model is then as before.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).eval()
        >>> fold_batch_norm_(net, [torch.zeros(1, 1, 4, 4)]), type(net[1]).__name__
        ([Folded(norm='1/batch_norm', layer='0', reason='')], 'Identity')
    """
    workload = Workload(model, batches, forward=forward)
    trial = workload.with_model(copy.deepcopy(model))
    rows = fold_norms_(trial, trace(workload), like=workload)
    if any(row.layer for row in rows):
        take_over_(model, trial.model)
    return rows


def fold_norms_(workload: Workload, graph: Graph, *, like: Workload) -> list[Folded]:
    """Fold the BatchNorm of a workload's model, in place, whose calls ``graph`` has.

    ``like`` has the same model unfolded. Raises ``QuantizationError`` where its output on
    the first batch is not the same; the model is then spoilt.
    """
    channels = _Channels(followed(like).labels)
    nodes = [node for node in graph.nodes.values() if node.operator == "batch_norm"]
    rows = [_fold(workload.model, graph, node, channels) for node in nodes]
    if any(row.layer for row in rows):
        check_same(like, workload, "folding BatchNorm", depth=len(graph.nodes))
    return rows


class _Channels:
    """Whether channel i of a BatchNorm is channel i of a layer's output or input."""

    def __init__(self, labels: Labels) -> None:
        self.labels, self.component = labels, components(labels, "rescale")
        self.pairs = np.concatenate([*labels.same, np.zeros((0, 2), np.int64)])

    def follow(self, norm: str, layer: str, size: int) -> bool:
        """Whether the BatchNorm scales what the layer makes, whatever becomes of it later (a shuffle joins channels)."""
        mine, made = (
            self._ids(f"{norm}.running_mean", "batch_norm"),
            self._ids(f"{layer}.weight", "producer"),
        )
        if size == 1:
            return True  # all that is made is one channel
        one, other = self.pairs[:, 0], self.pairs[:, 1]
        met = [
            np.stack((a[keep], b[keep]))
            for a, b in ((one, other), (other, one))
            for keep in (_within(a, mine) & _within(b, made),)
        ]
        channel, of_layer = np.concatenate(met, 1) - np.array([[mine[0]], [made[0]]])
        return mine[1] == made[1] == size == len(np.unique(channel)) and np.array_equal(
            channel, of_layer
        )

    def lead(self, norm: str, layer: str, size: int) -> bool:
        """Whether the layer's inputs are what the BatchNorm makes, one by one."""
        if size == 1:
            return True
        mine, read = (
            self.component[a : a + n]
            for a, n in (
                self._ids(f"{norm}.running_mean", "batch_norm"),
                self._ids(f"{layer}.weight", "consumer"),
            )
        )
        return len(mine) == size == len(np.unique(mine)) and np.array_equal(mine, read)

    def _ids(self, name: str, part: str) -> tuple[int, int]:
        """The first label of an axis, and how many there are."""
        found = [
            ids
            for space, ids in self.labels.spaces.items()
            if (space.name, space.part) == (name, part)
        ]
        return found[0] if len(found) == 1 else (0, 0)


def _within(ids: Ids, span: tuple[int, int]) -> NDArray[np.bool_]:
    return (ids >= span[0]) & (ids < span[0] + span[1])


def _fold(model: nn.Module, graph: Graph, node: Node, channels: _Channels) -> Folded:
    path = node.site.rpartition("/")[0]
    norm = _module(model, path)
    if not isinstance(norm, _BatchNorm):
        return Folded(
            node.site,
            "",
            "the call is in the code of a module, not a BatchNorm module's own",
        )
    if norm.training or norm.running_mean is None or norm.running_var is None:
        return Folded(
            node.site,
            "",
            "it is in training mode or keeps no statistics: call model.eval()",
        )
    if (
        sum(
            n.operator == "batch_norm" and n.site.rpartition("/")[0] == path
            for n in graph.nodes.values()
        )
        > 1
    ):
        return Folded(node.site, "", "the module is used more than once")
    if norm._forward_hooks or norm._forward_pre_hooks:
        return Folded(node.site, "", "the module has hooks")
    value = node.uses[0].value
    before = graph.nodes.get(value)
    reason = _why_not_before(model, graph, before, value)
    path_before = before.site.rpartition("/")[0] if before is not None else ""
    made = _size(_module(model, path_before), "out")
    if not reason and (
        made != norm.num_features or not channels.follow(path, path_before, made)
    ):
        reason = f"the channels of {value} are not those of the BatchNorm"
    if not reason:
        _fold_into_producer(_module(model, path_before), norm)
        _replace(model, path, nn.Identity())
        return Folded(node.site, path_before)
    readers = graph.readers(node.site)
    reason_after = _why_not_after(model, graph, node, readers)
    path_after = readers[0].site.rpartition("/")[0] if readers else ""
    read = _size(_module(model, path_after), "in")
    if not reason_after and (
        read != norm.num_features or not channels.lead(path, path_after, read)
    ):
        reason_after = (
            f"the channels of {readers[0].site} are not those of the BatchNorm"
        )
    if reason_after:
        return Folded(
            node.site, "", f"layer before it: {reason}; layer behind it: {reason_after}"
        )
    _fold_into_consumer(_module(model, path_after), norm)
    _replace(model, path, nn.Identity())
    return Folded(node.site, path_after)


def _why_not_before(
    model: nn.Module, graph: Graph, before: Node | None, value: str
) -> str:
    if before is None:
        return "no single operator makes its input"
    if before.kind not in ("conv", "linear"):
        return f"{before.site} is no convolution or linear layer"
    layer = _module(model, before.site.rpartition("/")[0])
    reason = _why_not_layer(layer, graph, before)
    if reason:
        return reason
    if len(graph.readers(value)) > 1 or value in graph.outputs:
        return f"the output of {value} is read elsewhere too"
    return ""


def _why_not_after(
    model: nn.Module, graph: Graph, node: Node, readers: list[Node]
) -> str:
    if len(readers) != 1 or node.site in graph.outputs:
        return "its output is read by several, or is the model's output"
    layer = _module(model, readers[0].site.rpartition("/")[0])
    if not isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
        return f"{readers[0].site} is no convolution or linear layer"
    if readers[0].uses[0].value != node.site:
        return f"{readers[0].site} reads other values as well"
    if not isinstance(layer, nn.Linear) and (
        layer.padding == "same" or any(p for p in layer.padding if p != 0)
    ):
        return f"{readers[0].site} pads with zeros behind it"
    return _why_not_layer(layer, graph, readers[0])


def _why_not_layer(layer: nn.Module | None, graph: Graph, node: Node) -> str:
    if not isinstance(layer, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)) or not isinstance(
        layer.weight, nn.Parameter
    ):
        return f"{node.site} is not in a plain convolution or linear module"
    weights = [use.value for use in node.uses if use.weight]
    if (
        len(weights) != 1
        or sum(use.value == weights[0] for n in graph.nodes.values() for use in n.uses)
        > 1
    ):
        return f"the weight of {node.site} is used more than once"
    return ""


def _affine(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """a and d of ``a·x + d``, float64."""
    mean, var = norm.running_mean, norm.running_var
    if mean is None or var is None:  # checked by the caller
        raise QuantizationError("a BatchNorm without statistics cannot be folded")
    a = (var.double() + norm.eps).rsqrt()
    if norm.affine:
        a = a * norm.weight.detach().double()
    d = -a * mean.double() + (norm.bias.detach().double() if norm.affine else 0.0)
    return a, d


@torch.no_grad()
def _fold_into_producer(layer: Any, norm: _BatchNorm) -> None:
    a, d = _affine(norm)
    weight = layer.weight.double()
    if isinstance(
        layer, TRANSPOSED
    ):  # [in, out / groups, ...]: row block g makes outputs of group g
        shape = weight.shape
        split = weight.view(layer.groups, shape[0] // layer.groups, shape[1], -1)
        scaled = (split * a.view(layer.groups, 1, -1, 1)).view(shape)
    else:
        scaled = weight * a.view(-1, *[1] * (weight.ndim - 1))
    bias = d if layer.bias is None else layer.bias.double() * a + d
    _set(layer, scaled, bias)


@torch.no_grad()
def _fold_into_consumer(layer: Any, norm: _BatchNorm) -> None:
    a, d = _affine(norm)
    weight = layer.weight.double()
    groups = 1 if isinstance(layer, nn.Linear) else layer.groups
    split = weight.view(groups, weight.shape[0] // groups, weight.shape[1], -1)
    shift = (split * d.view(groups, 1, -1, 1)).sum((2, 3)).view(-1)
    scaled = (split * a.view(groups, 1, -1, 1)).view(weight.shape)
    _set(layer, scaled, shift if layer.bias is None else layer.bias.double() + shift)


def _set(layer: Any, weight: Tensor, bias: Tensor) -> None:
    layer.weight.copy_(weight)
    if layer.bias is None:
        layer.bias = nn.Parameter(
            bias.to(layer.weight), requires_grad=layer.weight.requires_grad
        )
    else:
        layer.bias.copy_(bias)


def _module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _size(layer: nn.Module | None, side: str) -> int:
    """How many channels a layer makes (``out``) or reads (``in``)."""
    found: int = getattr(
        layer,
        f"{side}_features" if isinstance(layer, nn.Linear) else f"{side}_channels",
        0,
    )
    return found


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
    module.train(model.training)


def check_same(before: Workload, after: Workload, what: str, *, depth: int) -> None:
    """Raise when two models that are equal in real arithmetic differ by more than rounding on the first batch.

    Each of ``depth`` operators rounds by at most a few units of the last place of its largest value; 64 of them for each
    operator, measured against the largest output, is what a difference in the function itself exceeds by far.
    """
    batch = before.batches[0]
    outputs = []
    for workload in (before, after):
        with preserve(workload.model), torch.no_grad():
            workload.model.eval()
            outputs.append(float_tensors(workload.run(batch)))
    for reference, found in zip(*outputs, strict=True):
        finite = reference[
            torch.isfinite(reference)
        ]  # NaN and Inf have to stay what they are
        scale = finite.abs().amax().item() if finite.numel() else 0.0
        bound = 64 * depth * torch.finfo(reference.dtype).eps * scale
        if reference.shape != found.shape or not torch.allclose(
            reference, found, rtol=0.0, atol=bound, equal_nan=True
        ):
            off = (
                "another shape"
                if reference.shape != found.shape
                else f"{(reference - found).abs().max():.3g}"
            )
            raise QuantizationError(
                f"{what} changed the model's output",
                expected=f"a difference of at most {bound:.3g}",
                got=off,
                do="leave it out for this model: its code depends on what was changed",
            )


@torch.no_grad()
def take_over_(model: nn.Module, changed: nn.Module) -> None:
    """Make ``model`` what its changed copy is. Modules whose type is the same and parameters whose shape is the same stay
    the same objects (with their hooks, and known to an optimizer); others are those of the copy."""
    for path, module in changed.named_modules(remove_duplicate=False):
        own = _module(model, path)
        if own is None or type(own) is not type(module):
            _put(model, path, module)
            continue
        plain = {
            k: v
            for k, v in vars(module).items()
            if isinstance(v, (int, float, str, tuple)) and k[0] != "_"
        }
        vars(own).update(plain)
        for mine, others in (
            (own._parameters, module._parameters),
            (own._buffers, module._buffers),
        ):
            for name, tensor in others.items():
                old = mine.get(name)
                if (
                    old is not None
                    and tensor is not None
                    and old.shape == tensor.shape
                    and old.dtype == tensor.dtype
                ):
                    old.copy_(tensor)
                elif old is not tensor:
                    mine[name] = tensor  # type: ignore[assignment]


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module
