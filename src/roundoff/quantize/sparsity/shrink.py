"""Parameters, buffers and module attributes without some of their channels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from roundoff.quantize.channels.fold_batch_norm import CONVOLUTIONS, TRANSPOSED
from roundoff.quantize.channels.groups import ChannelGroup


def shrink_(model: nn.Module, removals: Sequence[tuple[ChannelGroup, Tensor]]) -> None:
    """Remove channels (indices of each group) from everything that the groups bind."""
    gone: dict[tuple[str, int], set[int]] = defaultdict(set)
    for group, removed in removals:
        for binding in group.bindings:
            lost = binding.index[removed].flatten()
            if binding.groups > 1:
                lost = lost % (model.get_parameter(binding.name).shape[binding.axis])
            gone[binding.name, binding.axis].update(lost.tolist())
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    smaller: dict[int, Tensor] = {}
    for (name, axis), places in gone.items():
        tensor = smaller.get(id(named[name]), named[name])
        smaller[id(named[name])] = _without(tensor, axis, places)
    for module in model.modules():
        _replace_tensors_(module, smaller)


def _without(tensor: Tensor, axis: int, places: set[int]) -> Tensor:
    """The tensor without some places along an axis; a parameter stays one."""
    kept = [i for i in range(tensor.shape[axis]) if i not in places]
    index = torch.tensor(kept, dtype=torch.int64, device=tensor.device)
    values = tensor.detach().index_select(axis, index)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, tensor.requires_grad)
    return values


def _replace_tensors_(module: nn.Module, new: dict[int, Tensor]) -> None:
    """Put new tensors, by the ``id`` of the old ones, where a module holds them itself."""
    changed = False
    registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for registry in registries:
        for name, tensor in registry.items():
            if id(tensor) in new:
                registry[name] = new[id(tensor)]
                changed = True
    if changed:
        _attributes_(module)


def _attributes_(module: Any) -> None:
    """Set what a module says of its size by its tensors."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, CONVOLUTIONS):
        rows, columns = module.weight.shape[:2]
        if _is_depthwise(module):
            module.groups = rows * module.groups // module.out_channels
        module.out_channels = rows
        module.in_channels = columns * module.groups
    elif isinstance(module, TRANSPOSED):
        rows, columns = module.weight.shape[:2]
        if _is_depthwise(module):
            module.groups = rows
        module.in_channels = rows
        module.out_channels = columns * module.groups
    elif isinstance(module, _NormBase):
        per_channel: Any = module.weight if module.affine else module.running_mean
        module.num_features = len(per_channel)
    elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        module.normalized_shape = tuple(module.weight.shape)
    elif isinstance(module, nn.GroupNorm):
        module.num_channels = len(module.weight)
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        module.num_embeddings, module.embedding_dim = module.weight.shape


def _is_depthwise(module: Any) -> bool:
    """Return True where the groups are the channels."""
    return bool(1 < module.groups == module.in_channels)
