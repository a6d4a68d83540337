"""Convolutions and linear layers whose result goes into a batch normalization: found by
running the model, folded, or freed of a bias that the normalization takes out again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.utils.hooks import RemovableHandle

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_CONVOLUTION = nn.modules.conv._ConvNd
_TRANSPOSED = nn.modules.conv._ConvTransposeNd


@dataclass(frozen=True, slots=True)
class NormalizedLayer:
    """A layer and the batch normalization that alone follows it, by their paths."""

    layer: str
    norm: str
    has_bias: bool


def normalized_layers(
    model: nn.Module, run: Callable[[], object]
) -> tuple[NormalizedLayer, ...]:
    """Return the pairs of a layer and the batch normalization that reads its result.

    Only modules that run once in ``run()``, and whose parameters no other module has.
    """
    names = {module: name for name, module in model.named_modules()}
    watch = _Watch()
    handles = list(watch.attach(model))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    shared = _shared_parameters(model)
    return tuple(
        NormalizedLayer(names[layer], names[norm], layer.bias is not None)
        for layer, norm in watch.pairs
        if watch.calls[layer] == 1 and not shared & set(map(id, layer.parameters()))
    )


class _Watch:
    """Notes which batch normalization reads the result of which layer."""

    def __init__(self) -> None:
        self.calls: Counter[nn.Module] = Counter()
        self.pairs: list[tuple[nn.Module, nn.Module]] = []
        self._made_by: dict[int, tuple[nn.Module, Tensor]] = {}

    def attach(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """Register what notes, on all layers and normalizations."""
        for module in model.modules():
            if isinstance(module, _CONVOLUTION | nn.Linear):
                yield module.register_forward_hook(self._after)
            if isinstance(module, _BATCH_NORM):
                yield module.register_forward_pre_hook(self._before)

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        self.calls[module] += 1
        if isinstance(output, Tensor):
            # the tensor is kept, so that no other takes its id
            self._made_by[id(output)] = (module, output)

    def _before(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        source = self._made_by.get(id(inputs[0])) if inputs else None
        if source is not None:
            self.pairs.append((source[0], module))


def _shared_parameters(model: nn.Module) -> set[int]:
    users = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    return {parameter for parameter, count in users.items() if count > 1}


def fold(model: nn.Module, pairs: Sequence[tuple[str, str]]) -> None:
    """Fold batch normalizations into the layers before them, for evaluation."""
    for layer_name, norm_name in pairs:
        layer = model.get_submodule(layer_name)
        norm = model.get_submodule(norm_name)
        set_module(model, layer_name, _folded(layer, norm))
        set_module(model, norm_name, nn.Identity())


def _folded(layer: Any, norm: Any) -> Any:
    layer.eval()
    norm.eval()
    if isinstance(layer, nn.Linear):
        return fuse_linear_bn_eval(layer, norm)
    return fuse_conv_bn_eval(layer, norm, transpose=isinstance(layer, _TRANSPOSED))


def drop_biases(model: nn.Module, pairs: Sequence[tuple[str, str]]) -> None:
    """Remove the biases before batch normalizations; running means move with them."""
    for layer_name, norm_name in pairs:
        layer: Any = model.get_submodule(layer_name)
        norm: Any = model.get_submodule(norm_name)
        if layer.bias is None:
            continue
        if norm.running_mean is not None:
            with torch.no_grad():
                norm.running_mean -= layer.bias
        layer.bias = None


def set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module in the place of the one at a path."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
