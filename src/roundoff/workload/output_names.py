"""Named outputs: which tensors of a model's output are judged together, and patterns over them.

A few tensors are judged each for itself. Many, the keys and values of every layer say,
become a few outputs: tensors whose names differ in numbers alone, or else all below one
name. Within such an output every tensor counts alike, whatever its size or scale.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

#: Outputs that are measured apart, at most.
MOST_OUTPUTS = 8


def output_names(tensors: Iterable[str], apart: Iterable[str] = ()) -> dict[str, str]:
    """Return the name of the output that each tensor belongs to, by the name of the tensor.

    An output of one tensor has its name, one of several a glob that matches theirs. The
    patterns ``apart`` make outputs of their own, also of tensors that would be judged
    with others.

    >>> output_names(["cls", "price"])
    {'cls': 'cls', 'price': 'price'}
    >>> caches = [f"past.{layer}.{part}" for layer in range(6) for part in range(2)]
    >>> set(output_names(["logits", *caches], apart=["past.5"]).values()) == {"logits", "past.*", "past.5"}
    True
    """
    names = list(tensors)
    together = _few(names)
    members = _members(together)
    labels = dict(together)
    for pattern in apart:
        inside = [name for name in names if is_output(pattern, name)]
        for name in inside:
            if not set(members[together[name]]) <= set(inside):
                labels[name] = pattern
    return {
        name: name if len(group) == 1 else label
        for label, group in _members(labels).items()
        for name in group
    }


def _few(names: Sequence[str]) -> dict[str, str]:
    """Return the label of each name; as many labels as may be, ``MOST_OUTPUTS`` at most."""
    choices = (_labels(names, label) for label in (str, _numbered, _first_key, _all))
    return next(
        labels for labels in choices if len(set(labels.values())) <= MOST_OUTPUTS
    )


def _labels(names: Sequence[str], label: Callable[[str], str]) -> dict[str, str]:
    return {name: label(name) for name in names}


def _members(labels: dict[str, str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for name, label in labels.items():
        members.setdefault(label, []).append(name)
    return members


def _numbered(name: str) -> str:
    """Return the name with stars for its numbers.

    >>> _numbered("past_key_values.3.0"), _numbered("box_2")
    ('past_key_values.*', 'box_*')
    """
    return re.sub(r"\*(\.\*)+", "*", re.sub(r"\d+", "*", name))


def _first_key(name: str) -> str:
    key, dot, _ = name.partition(".")
    return f"{key}.*" if dot else name


def _all(_: str) -> str:
    return "*"


def is_output(pattern: str, name: str) -> bool:
    """Return True if a pattern names an output: by its name, one above it, or as a glob.

    >>> is_output("past", "past.0.1"), is_output("past.*", "past.0.1"), is_output("pa", "past.0.1")
    (True, True, False)
    """
    inside = name.startswith(f"{pattern}.")
    return pattern == name or inside or fnmatch.fnmatchcase(name, pattern)
