"""What the names of parameters tell: the module, the name in it, and the layer.

Modules end with a dot, or with a slash where names are paths, as JAX has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_ENDS = re.compile(r"(?<=[./])")


def module_of(name: str) -> str:
    """Return the name of the module of a parameter, with what ends it.

    >>> module_of("blocks.1.query.weight"), module_of("rnn/kernel"), module_of("scale")
    ('blocks.1.query.', 'rnn/', '')
    """
    return "".join(_ENDS.split(name)[:-1])


def name_in_module(name: str) -> str:
    """Return the name that a parameter has in its module.

    >>> name_in_module("blocks.1.query.weight"), name_in_module("rnn/kernel")
    ('weight', 'kernel')
    """
    return _ENDS.split(name)[-1]


def shared_module(names: Sequence[str]) -> str:
    """Return the name of the module that has all of these, with what ends it.

    >>> shared_module(["a.0.left.weight", "a.0.right.weight"]), shared_module(["a.0.weight"])
    ('a.0.', 'a.0.')
    """
    modules = [_ENDS.split(module_of(name)) for name in names]
    shared = []
    for parts in zip(*modules, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "".join(shared)


def numbers_in(name: str) -> tuple[str, ...]:
    """Return the numbers in a name, those of its layer.

    >>> numbers_in("blocks.1.heads.0.key")
    ('1', '0')
    """
    return tuple(re.findall(r"\d+", name))


def without_numbers(name: str) -> str:
    """Return a name as it is in all layers.

    >>> without_numbers("blocks.1.heads.0.key")
    'blocks.#.heads.#.key'
    """
    return re.sub(r"\d+", "#", name)
