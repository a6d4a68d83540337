"""What a rule is: its texts, and a function from a script to the places it is broken at.

A theme is a file in ``rules/`` with a tuple ``RULES``; ``rules/table.py`` lists the
themes. A check reads a :class:`roundoff.lint.script.Script` (names, definitions, calls
by what they call) or its ``loops`` (the events of training in their order), and yields a
:class:`Hit` for each place. The tests run the check on the rule's own two examples: the
wrong one must give this code and no other, the right one nothing, and the fixed text of
the wrong one nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roundoff.lint.findings import Severity

if TYPE_CHECKING:
    from roundoff.lint.script import Script


@dataclass(frozen=True)
class Edit:
    """A piece of text that replaces another.

    ``start`` and ``end`` are offsets in the bytes of the script (UTF-8), as
    ``Script.span`` gives them.
    """

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Hit:
    """A place where a rule is broken.

    Args:
        node: the part of the script that is shown.
        message: what is wrong there; the rule's own message when empty.
        edits: what mends it, all or none; empty where no safe fix exists.
    """

    node: ast.AST
    message: str = ""
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A rule: what it is called, why it matters, an example of each, and its check.

    Args:
        code: ``RO`` and three digits; the first says the theme.
        name: a few words with hyphens.
        message: what is wrong and what to write, one sentence without a full stop.
        why: what goes wrong at run time, with the measured effect.
        wrong: the shortest script that breaks this rule, and no other.
        right: the same script as it should be.
        check: yields a :class:`Hit` for each place.
        frameworks: the check runs on scripts that import one of these.
        severity: whether it is wrong or could only be faster.
    """

    code: str
    name: str
    message: str
    why: str
    wrong: str
    right: str
    check: Callable[[Script], Iterable[Hit]] = field(repr=False)
    frameworks: tuple[str, ...] = ("torch",)
    severity: Severity = Severity.WARNING
