"""One call whose channels are followed, and the words that rules are written in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from roundoff.ops import facts, float_tensors
from roundoff.quantize.channels.labels import Labels, Passed


@dataclass(frozen=True)
class FollowedCall:
    """A call that has run.

    Attributes:
        labels: of all tensors.
        site: of the call.
        name: of the operator.
        args, kwargs: of the call.
        outputs: its floating-point results.
    """

    labels: Labels
    site: str
    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[Tensor]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, as far as the operator's names are known."""
        positional = zip(facts(self.name).arguments, self.args, strict=False)
        return dict(positional) | self.kwargs

    @property
    def x(self) -> Any:
        """The operand: the first argument, or ``input``."""
        if self.args and isinstance(self.args[0], Tensor):
            return self.args[0]
        return self.arguments.get("input")

    @property
    def out(self) -> Tensor:
        """The first result."""
        return self.outputs[0]

    def note(self, labels: Tensor, law: str) -> None:
        """These channels pass the call; ``law`` is that of a factor of a channel."""
        self.labels.note(labels, Passed(self.site, self.name, law))

    def keep_labels(
        self, x: Tensor, law: str, bounds: tuple[float, float] | None = None
    ) -> None:
        """The result has the labels of ``x``, whose channels pass the call."""
        labels = self.labels.get(x)
        self.labels.note(labels, Passed(self.site, self.name, law, bounds))
        self.labels.put(self.out, labels)

    def bind(
        self, tensor: Tensor | None, axis: int, ndim: int, part: str, channels: Tensor
    ) -> None:
        """Tie a vector of values to the channels on one of ``ndim`` axes."""
        if tensor is None or tensor.numel() == 1:
            return
        vector = None
        if tensor.ndim == 1:
            vector = self.labels.along(tensor, 0, part)
        if vector is None:
            reason = f"a value for each channel ({self.site}) is computed in the code"
            self.labels.pin(channels, reason)
            return
        self.labels.tie(channels, vector.view(on_axis(axis, ndim)))

    def pin_operands(self) -> None:
        """Pin the channels of all operands: no rule knows the call."""
        reason = f"what {self.name} ({self.site}) does to channels is not known"
        for tensor in float_tensors((self.args, self.kwargs)):
            self.labels.pin(self.labels.get(tensor), reason)


def on_axis(axis: int, ndim: int) -> list[int]:
    """The shape of a vector that lies along one of ``ndim`` axes."""
    shape = [1] * ndim
    shape[axis] = -1
    return shape
