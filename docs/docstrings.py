"""Our docstrings as Markdown: examples in blocks of code, names in code instead of roles."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:\w+:)?\w+:`~?([^`]+)`")
_EXAMPLE = re.compile(r"(?:^[ \t]*>>> .*\n(?:[ \t]*\S.*\n?)*)+", re.MULTILINE)


class Markdown(griffe.Extension):
    """Change each docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    text = _ROLE.sub(r"`\1`", docstring)
    if "\n" not in text:
        return text
    # what stands under "Examples:" is a section that the parser knows
    text = re.sub(r"(?m)^Example:$", "Examples:", text)
    sections = re.split(r"(?m)^(?=Examples:$)", text)
    sections[0] = _EXAMPLE.sub(_fenced, sections[0] + "\n")
    return "".join(sections)


def _fenced(match: re.Match[str]) -> str:
    indent = re.match(r"[ \t]*", match[0])[0]
    return f"{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"
