"""Models that write over what autograd has saved: fine in inference, an error in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum

from torch import Tensor
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    saved_tensors_hooks,
)

__all__ = ["KeptTensor", "Writes", "saving"]


class Writes(Enum):
    """What is done about writes into tensors that autograd has saved.

    REFUSED: nothing; the backward pass fails.
    COPIED: what a call is about to write is copied first.
    FOLLOWED: every kernel is watched, which sees writes inside of calls too, and costs
        as much as the kernels of a small network.
    """

    REFUSED = "refused"
    COPIED = "copied"
    FOLLOWED = "followed"


class KeptTensor:
    """A tensor kept until the backward pass.

    It is copied first if something is about to write into it.
    """

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = self.tensor._version

    def copy(self) -> None:
        """Keep the values as they are now, whatever is written over them."""
        self.tensor = self.tensor.clone()
        self.version = self.tensor._version

    def unwritten(self) -> Tensor:
        """Return the tensor; raise RuntimeError where it was written over all the same."""
        if self.tensor._version != self.version:
            raise RuntimeError("a kernel wrote over a saved tensor")
        return self.tensor


def saving(
    writes: Writes, keep: Callable[[Tensor], KeptTensor]
) -> AbstractContextManager[object]:
    """Return what a forward pass and its backward passes run in.

    ``keep`` keeps a tensor so that it is copied before it is written.
    """
    if writes is Writes.COPIED:
        return _copied(keep)
    if writes is Writes.FOLLOWED:
        return allow_mutation_on_saved_tensors()
    return nullcontext()


@contextmanager
def _copied(keep: Callable[[Tensor], KeptTensor]) -> Iterator[None]:
    with saved_tensors_hooks(keep, KeptTensor.unwritten):
        yield
