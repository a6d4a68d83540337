"""A model as it is measured: in evaluation mode, without gradients of its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
