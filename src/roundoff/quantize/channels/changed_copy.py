"""Change a copy of a model, compare it with the model, then take it over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.ops import float_tensors
from roundoff.preserve import preserve
from roundoff.workload import Workload


def check_same(before: Workload, after: Workload, what: str, *, depth: int) -> None:
    """Raise when two models differ by more than rounding.

    They are equal in real arithmetic, and run on the first batch. Each of ``depth``
    operators rounds by at most a few units of the last place of its largest value; 64
    of them for each operator, measured against the largest output, is what a difference
    in the function itself exceeds by far.
    """
    for reference, output in zip(_outputs(before), _outputs(after), strict=True):
        _check_same_output(reference, output, what, depth)


def _outputs(workload: Workload) -> list[Tensor]:
    with preserve(workload.model), torch.no_grad():
        workload.model.eval()
        return float_tensors(workload.run(workload.batches[0]))


def _check_same_output(
    reference: Tensor, output: Tensor, what: str, depth: int
) -> None:
    # NaN and Inf have to stay what they are
    finite = reference[torch.isfinite(reference)]
    scale = finite.abs().amax().item() if finite.numel() else 0.0
    bound = 64 * depth * torch.finfo(reference.dtype).eps * scale
    if reference.shape != output.shape:
        difference = "another shape"
    elif torch.allclose(reference, output, rtol=0.0, atol=bound, equal_nan=True):
        return
    else:
        difference = f"{(reference - output).abs().max():.3g}"
    raise QuantizationError(
        f"{what} changed the model's output",
        expected=f"a difference of at most {bound:.3g}",
        got=difference,
        do="leave it out for this model: its code depends on what was changed",
    )


@torch.no_grad()
def take_over_(model: nn.Module, changed: nn.Module) -> None:
    """Make ``model`` what its changed copy is.

    Modules whose type is the same and parameters whose shape is the same stay the same
    objects (with their hooks, and known to an optimizer); others are those of the copy.
    """
    for path, module in changed.named_modules(remove_duplicate=False):
        current = submodule(model, path)
        if current is None or type(current) is not type(module):
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._modules[name] = module
            continue
        vars(current).update(_settings(module))
        _take_tensors_(current._parameters, module._parameters)
        _take_tensors_(current._buffers, module._buffers)


def _settings(module: nn.Module) -> dict[str, int | float | str | tuple[object, ...]]:
    """The public plain attributes of a module, ``out_features`` say."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (int, float, str, tuple)) and name[0] != "_"
    }


def _take_tensors_(current: dict[str, Any], changed: dict[str, Any]) -> None:
    """Copy tensors of the same kind, and take the others."""
    for name, tensor in changed.items():
        old = current.get(name)
        if old is not None and tensor is not None and _same_kind(old, tensor):
            old.copy_(tensor)
        elif old is not tensor:
            current[name] = tensor


def _same_kind(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def submodule(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a path; None where there is none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def replace_(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put another module at a path."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
