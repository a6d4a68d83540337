"""A model as it is measured: in evaluation mode, without gradients of its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from roundoff.preserve import preserve


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Prepare a model to be measured; it is as it was at the end, however that comes."""
    with preserve(model):
        model.eval()
        # a scripted module has no requires_grad_ of its own
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        yield


def kept(model: nn.Module, is_pure: bool) -> AbstractContextManager[None]:
    """Return what brings the model back to before a block, where that is needed.

    ``is_pure`` says that forward passes leave it as it was.
    """
    return nullcontext() if is_pure else preserve(model)
