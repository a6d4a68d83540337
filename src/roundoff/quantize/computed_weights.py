"""Weights that a module computes of other parameters on every call, stored as they are.

``torch.nn.utils`` does so by parametrizations (``weight_norm``, ``spectral_norm``,
``orthogonal``), by hooks before the call (the older ``weight_norm`` and
``spectral_norm``), and by masks (``prune``). In evaluation they are constants.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.utils import (
    parametrizations,
    parametrize,
    prune,
    remove_spectral_norm,
    remove_weight_norm,
)
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def store_computed_weights_(model: nn.Module) -> list[str]:
    """Make parameters of weights that modules compute of others; return their names.

    The model is changed in place and computes the same, in evaluation. Other modules may
    share its classes: copies of parametrized modules do, which stay as they are.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    >>> store_computed_weights_(layer.eval()), type(layer).__name__
    (['weight'], 'Linear')
    """
    stored = []
    for path, module in list(model.named_modules()):
        for name in [*_store_parametrized(module), *_store_hooked(module)]:
            stored.append(f"{path}.{name}" if path else name)
    return stored


def computed_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield tensors with a history that modules keep as attributes.

    A weight that a hook computed is one: ``copy.deepcopy`` refuses it.
    """
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                yield value


def _store_parametrized(module: nn.Module) -> list[str]:
    if not parametrize.is_parametrized(module):
        return []
    names: nn.ModuleDict = module.parametrizations  # type: ignore[assignment]
    values = {name: getattr(module, name).detach() for name in names}
    del module.parametrizations
    # not torch's remove_parametrizations: it changes the class, which copies share
    module.__class__ = type(module).__bases__[0]
    for name, value in values.items():
        _store(module, name, value)
    _forget_loading(module)
    return list(values)


def _forget_loading(module: nn.Module) -> None:
    """Drop the hooks by which a parametrization reads the parameters of older versions."""
    hooks = module._load_state_dict_pre_hooks
    for key, hook in list(hooks.items()):
        loads = getattr(hook, "hook", hook)
        if getattr(loads, "__module__", "") == parametrizations.__name__:
            del hooks[key]


def _store_hooked(module: nn.Module) -> Iterator[str]:
    for hook in list(module._forward_pre_hooks.values()):
        if isinstance(hook, WeightNorm):
            name = hook.name
            remove_weight_norm(module, name)
        elif isinstance(hook, SpectralNorm):
            name = hook.name
            remove_spectral_norm(module, name)
        elif isinstance(hook, prune.BasePruningMethod):
            name = hook._tensor_name
            prune.remove(module, name)  # type: ignore[no-untyped-call]
        else:
            continue
        if name not in module._parameters:
            value: Tensor = getattr(module, name)
            delattr(module, name)
            _store(module, name, value.detach())
        yield name


def _store(module: nn.Module, name: str, value: Tensor) -> None:
    module.register_parameter(name, nn.Parameter(value.clone()))
