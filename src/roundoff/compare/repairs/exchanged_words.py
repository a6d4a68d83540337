"""Parameters whose names differ in one word, exchanged wherever that word stands.

A loader that takes queries for keys fills all that is called after them: the projection of
each block, its bias, and the convolution behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations

from torch import Tensor

from roundoff.compare.repairs.leaf_changes import LeafChange
from roundoff.compare.values.value_flow import Flow, Value

_WORD = re.compile("[A-Za-z]+")


def exchanged_words(flow: Flow, leaves: Sequence[Value]) -> Iterator[LeafChange]:
    """Yield all parameters of one word and those of another in each other's place.

    Args:
        flow: of the candidate.
        leaves: the parameters that are near, of which the words are taken.
    """
    every = {
        value.row.name: value
        for value in flow.in_order()
        if value.row.name and not value.is_call
    }
    words = {word for leaf in leaves for word in _WORD.findall(leaf.row.name or "")}
    for word, other in combinations(sorted(words), 2):
        tensors: dict[int, Tensor] = {}
        for name, leaf in every.items():
            twin = every.get(_with(name, word, other))
            if twin is None or twin.key == leaf.key:
                continue
            first, second = flow.tensor(leaf.key), flow.tensor(twin.key)
            if first is not None and second is not None and first.shape == second.shape:
                tensors |= {leaf.key: second, twin.key: first}
        if len(tensors) > 2:
            stand = f"all that is called {word} and {other} stand in for each other"
            yield LeafChange(tensors, stand)


def _with(name: str, word: str, other: str) -> str:
    """Return a name with another word in one's place, wherever it stands alone.

    >>> _with("block.key_depthwise.bias", "key", "query")
    'block.query_depthwise.bias'
    >>> _with("keys.bias", "key", "query")
    'keys.bias'
    """
    return re.sub(rf"(?<![A-Za-z]){re.escape(word)}(?![A-Za-z])", other, name)
