"""Notes loss functions: their settings, the labels that they are given, and averages of
weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from roundoff.record.graph_node import node_of
from roundoff.record.loader_log import described
from roundoff.record.source_lines import user_line

#: Functions of ``torch.nn.functional`` that compute losses.
LOSSES: Sequence[str] = tuple(
    name
    for name in dir(nn.functional)
    if name.endswith("_loss") or "cross_entropy" in name or name == "kl_div"
)
#: Calls whose labels are noted.
MOST_CALLS = 16
#: Arguments that are superseded, or tensors that the model has computed.
_LEFT_OUT = ("input", "size_average", "reduce")


class LossLog:
    """Notes the losses that a program computes in its first steps.

    Args:
        add: notes a setting: group, of what, name and value.
        add_batch: notes the labels: source, number, indexes and values.
    """

    def __init__(
        self,
        add: Callable[[str, str, str, Any], None],
        add_batch: Callable[[str, int, tuple[int, ...], Any], None],
    ) -> None:
        self._add = add
        self._add_batch = add_batch
        self._lines: dict[tuple[str, str], str] = {}
        self._calls = 0

    def note(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        """Note a call of a loss function."""
        values = _named(function, args, kwargs)
        labels = {
            key: value
            for key, value in values.items()
            if key not in _WEIGHTS and _is_label(value)
        }
        if labels and self._calls < MOST_CALLS:
            self._add_batch("loss", self._calls, (), labels)
            self._calls += 1
        of = self._called(name)
        if of is None:
            return
        for key, value in values.items():
            is_computed = isinstance(value, Tensor) and key not in _WEIGHTS
            if key not in _LEFT_OUT and not is_computed:
                self._add("loss", of, key, described(value))

    def _called(self, name: str) -> str | None:
        """Return what a loss is called: a second line that calls the same function gets
        a number. None where its settings were noted."""
        key = (name, user_line(3) or "")
        if key in self._lines:
            return None
        before = sum(other == name for other, _ in self._lines)
        self._lines[key] = f"{name} {before + 1}" if before else name
        return self._lines[key]


#: Tensors that are settings.
_WEIGHTS = ("weight", "pos_weight")


def _named(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments by name, with their defaults; {} where they have none."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return dict(kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _is_label(value: Any) -> bool:
    return isinstance(value, Tensor) and node_of(value) is None and value.dim() > 0


def average_of(model: Any) -> str:
    """Return how a ``torch.optim.swa_utils.AveragedModel`` averages."""
    for name in ("multi_avg_fn", "avg_fn"):
        function = getattr(model, name, None)
        if function is None:
            continue
        closed = inspect.getclosurevars(inspect.unwrap(function)).nonlocals
        words = ", ".join(f"{key}={described(value)}" for key, value in closed.items())
        kind = getattr(function, "__name__", type(function).__name__)
        return f"{kind}({words})"
    return "equal weights"
