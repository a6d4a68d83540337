"""Site: the identity of one observed call or parameter, and the patterns that name sites.

A call is named by the path of the module whose ``forward`` made it, the operator, and
which call of that operator in that module it is:
``encoder.layer.0.attention.self/matmul#1`` is the second ``matmul``. ``#0`` is left
out. Calls outside any submodule have an empty path: ``/mean``. A parameter is a site
too, named by its fully qualified name, which never contains a slash.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roundoff.errors import PatternError, examples


@dataclass(frozen=True, order=True)
class Site:
    """One operator call inside a module.

    >>> str(Site("encoder.0", "matmul", 1)), str(Site("encoder.0", "linear"))
    ('encoder.0/matmul#1', 'encoder.0/linear')
    >>> Site.parse("encoder.0/matmul#1")
    Site(module='encoder.0', operator='matmul', call=1)
    """

    module: str
    operator: str
    call: int = 0

    def __str__(self) -> str:
        return f"{self.module}/{self.operator}" + (f"#{self.call}" if self.call else "")

    @classmethod
    def parse(cls, text: str) -> Site:
        """Return the site that ``text`` names.

        Raises ``PatternError`` when it has no slash or a bad call index.
        """
        module, slash, rest = text.rpartition("/")
        operator, mark, call = rest.partition("#")
        if not slash or not operator or (mark and not call.isdecimal()):
            raise PatternError(
                "not the name of a site",
                expected="module.path/operator or module.path/operator#call",
                got=repr(text),
                do="take the name from the ranked table, or `roundoff budget --json`",
            )
        return cls(module, operator, int(call or 0))


def select(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a glob pattern matches, in their order (``*`` crosses dots
    and slashes).

    Raises ``PatternError`` with the nearest names when nothing matches.

    >>> select("*/softmax", ["a/softmax", "a/linear", "b/softmax"])
    ['a/softmax', 'b/softmax']
    """
    names = list(names)
    matching = [name for name in names if matches(pattern, name)]
    if not matching:
        near = examples(pattern, names)
        raise PatternError(
            f"the pattern {pattern!r} matches no site",
            expected=f"a glob over {len(names)} site names, such as {near}",
            got=repr(pattern),
            do="copy a name from the ranked table; * stands for any characters",
        )
    return matching


def matches(pattern: str, name: str) -> bool:
    """Return True if a glob pattern, or an exact name, names this site.

    Exact names win over glob characters. ``op:NAME`` names every call of an operator,
    wherever it is.

    >>> matches("*/softmax", "a/softmax"), matches("*/softmax", "a/softmax#1"), matches("op:softmax", "a/softmax#1")
    (True, False, True)
    """
    if pattern.startswith("op:"):
        return name.rpartition("/")[2].partition("#")[0] == pattern[3:] and "/" in name
    return pattern == name or fnmatch.fnmatchcase(name, pattern)


def first_match(rules: Sequence[tuple[str, str]], name: str) -> str | None:
    """Return the value of the first ``(pattern, value)`` rule that names ``name``, or None."""
    return next((value for pattern, value in rules if matches(pattern, name)), None)
