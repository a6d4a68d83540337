"""Site names in few columns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from rich.cells import cell_len, chop_cells

from roundoff.foreign import visible

GAP = "…"
#: Where a name may be broken: behind these.
BREAKS = re.compile(r"(?<=[./_# ])")


def wrap(name: str, width: int) -> str:
    """Break a name into lines of at most ``width`` columns of the terminal, behind a dot or
    slash if it can be.

    Nothing is left out: joined, the lines are the name, its control characters made
    visible, ends of lines too.

    >>> wrap("encoder.layer.0.output.dense/linear", 16).splitlines()
    ['encoder.layer.0.', 'output.dense/', 'linear']
    """
    lines = [""]
    for part in BREAKS.split(visible(name, lines=False)):
        if cell_len(lines[-1]) + cell_len(part) > width and lines[-1]:
            lines.append("")
        *full, rest = chop_cells(part, width) or [""]
        lines[-1:] = [*full, lines[-1] + rest]
    return "\n".join(lines).rstrip("\n")


def elide(name: str, width: int, others: Collection[str] = ()) -> str:
    """Cut a name in the middle so that it has at most ``width`` characters.

    It is not mistaken for one of ``others``, if it can be helped. Keeps the operator
    where it can, and the number of a layer where only that tells two names apart. Names
    that fit come back as they are; below three characters only the gap is left.

    >>> elide("encoder.layer.0.output.dense/linear", 24)
    'encoder.laye…ense/linear'
    >>> other = "encoder.layer.1.output.dense/linear"
    >>> elide("encoder.layer.0.output.dense/linear", 24, [other])
    'encoder.layer.0…e/linear'
    """
    if len(name) <= width:
        return name
    if width < 3:
        return GAP[:width]
    best = name[: width - 1] + GAP
    fewest = len(others) + 1
    for parts in _cuts(name, width):
        confused = sum(_matches(parts, other) for other in others if other != name)
        if confused < fewest:
            best = GAP.join(parts)
            fewest = confused
        if not confused:
            break
    return best


def _cuts(name: str, width: int) -> Iterator[tuple[str, ...]]:
    """Yield the parts to keep, best first.

    Head and tail, then also a number between them.
    """
    length = len(name)
    room = width - 1
    for tail in _tails(name, room, room):
        yield name[: room - tail], name[length - tail :]
    for number in re.finditer(r"\.\d+(?=[./])", name):
        middle = number[0] + name[number.end()]
        room = width - 2 - len(middle)
        for tail in _tails(name, room, room + room // 2):
            is_before = room - tail < number.start()
            if is_before and tail < length - number.end() - 1:
                yield name[: room - tail], middle, name[length - tail :]


def _tails(name: str, room: int, twice: int) -> list[int]:
    """Return the lengths of a tail in ``room`` characters, best first.

    Those with the operator, and of them those nearest half of ``twice``.
    """
    operator = len(name) - name.rfind("/")
    return sorted(
        range(1, room), key=lambda tail: (tail < operator, abs(2 * tail - twice))
    )


def _matches(parts: tuple[str, ...], other: str) -> bool:
    """Return True if these parts may stand for ``other`` too."""
    head, *middle, tail = parts
    if len(other) < sum(map(len, parts)):
        return False
    if not (other.startswith(head) and other.endswith(tail)):
        return False
    between = other[len(head) : len(other) - len(tail)]
    return not middle or middle[0] in between
