"""Where a forward pass is: the modules that run, and the number of the next call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A position that was kept, to go on from there later."""

    path: tuple[str, ...] = ()
    counts: tuple[tuple[tuple[str, str], int], ...] = ()
    forwards: int = 0


class Position:
    """The stack of modules whose ``forward`` runs, and how often each has called each operator.

    It names sites: ``module/operator#number``. Hooks call ``enter`` and ``leave``;
    torch.compile traces both, so they are plain Python on plain containers.

    Args:
        period: forward passes of the whole model until call numbers start again; 0:
            they start again at ``begin`` alone.

    >>> position = Position()
    >>> position.enter("block.0")
    >>> position.next_call("linear"), position.next_call("linear")
    (('block.0', 0), ('block.0', 1))
    """

    __slots__ = ("counts", "forwards", "path", "period")

    def __init__(self, period: int = 0) -> None:
        self.period = period
        #: forward passes of the whole model; not counted where each is a period of its own,
        #: because compiled code guards on what it reads
        self.forwards = 0
        self.path: list[str] = []
        self.counts: dict[tuple[str, str], int] = {}

    @property
    def module(self) -> str:
        """The path of the innermost module that runs; "" outside of all, and for the model."""
        return self.path[-1] if self.path else ""

    def enter(self, path: str) -> None:
        """A module's forward begins; outside of all others, a forward pass of the model does."""
        if not path and not self.path:
            if self.period and self.forwards % self.period == 0:
                self.counts.clear()
            if self.period != 1:
                self.forwards += 1
        self.path.append(path)

    def leave(self) -> str:
        """A module's forward ends, or failed. Return its path."""
        return self.path.pop() if self.path else ""

    def next_call(self, operator: str) -> tuple[str, int]:
        """Return the module that calls an operator now, and which of its calls this is."""
        module = self.path[-1] if self.path else ""
        number = self.counts.get((module, operator), 0)
        self.counts[module, operator] = number + 1
        return module, number

    def begin(self) -> None:
        """Start again: outside of all modules, with the first call of each."""
        self.path.clear()
        self.counts.clear()
        self.forwards = 0

    def place(self) -> Place:
        """Return a copy of this position."""
        return Place(tuple(self.path), tuple(self.counts.items()), self.forwards)

    def go_to(self, place: Place) -> None:
        """Go on from a place that was kept."""
        self.begin()
        self.path += place.path
        self.counts.update(place.counts)
        self.forwards = place.forwards
