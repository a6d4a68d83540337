"""Site names in few columns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

GAP = "…"


def elide(name: str, width: int, others: Collection[str] = ()) -> str:
    """``name`` in at most ``width`` characters, cut in the middle so that it is not mistaken for one of ``others``.

    Keeps the operator where it can, and the number of a layer where only that tells two names apart. Names that
    fit come back as they are; below three characters only the gap is left.

    >>> elide("encoder.layer.0.output.dense/linear", 24)
    'encoder.laye…ense/linear'
    >>> elide("encoder.layer.0.output.dense/linear", 24, ["encoder.layer.1.output.dense/linear"])
    'encoder.layer.0…e/linear'
    """
    if len(name) <= width:
        return name
    if width < 3:
        return GAP[:width]
    best, least = name[: width - 1] + GAP, len(others) + 1
    for parts in _cuts(name, width):
        confused = sum(_matches(parts, other) for other in others if other != name)
        if confused < least:
            best, least = GAP.join(parts), confused
        if not confused:
            break
    return best


def _cuts(name: str, width: int) -> Iterator[tuple[str, ...]]:
    """Parts to keep, in the order of preference: head and tail, then also a number between them."""
    operator = len(name) - name.rfind("/")
    room = width - 1

    def keep(tail: int, room: int) -> tuple[bool, int]:
        return tail < operator, abs(2 * tail - room)

    for tail in sorted(range(1, room), key=lambda t: keep(t, room)):
        yield name[: room - tail], name[len(name) - tail :]
    for number in re.finditer(r"\.\d+(?=[./])", name):
        middle = number[0] + name[number.end()]
        room = width - 2 - len(middle)
        for tail in sorted(range(1, room), key=lambda t: keep(t, room + room // 2)):
            if room - tail < number.start() and tail < len(name) - number.end() - 1:
                yield name[: room - tail], middle, name[len(name) - tail :]


def _matches(parts: tuple[str, ...], other: str) -> bool:
    head, *middle, tail = parts
    if len(other) < sum(map(len, parts)) or not (
        other.startswith(head) and other.endswith(tail)
    ):
        return False
    return not middle or middle[0] in other[len(head) : len(other) - len(tail)]
