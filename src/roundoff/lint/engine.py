"""The rules on one text: findings that ``noqa`` does not silence, and their edits."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roundoff.foreign import script_lines
from roundoff.lint.findings import Finding
from roundoff.lint.rule import Edit, Hit, Rule
from roundoff.lint.script import Script

_NOQA = re.compile(
    r"#\s*noqa(?!\w)(?P<codes>\s*:\s*[A-Z]+\d*(?:[,\s]+[A-Z]+\d+)*)?", re.I
)


@dataclass(frozen=True)
class FixableFinding:
    """A finding, and the edits that mend it."""

    finding: Finding
    edits: tuple[Edit, ...]


def parse(code: str, path: str, cells: Sequence[tuple[int, int]] = ()) -> Script:
    """Return a script. Raises ``ValueError`` with the reason where it is no Python.

    ``cells`` are the places of the lines in a notebook, as ``Text`` has them.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Script(code, path)
    except SyntaxError as error:
        where = _place(error.lineno, cells)
        raise ValueError(f"does not parse: {where}{error.msg}") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    except MemoryError:
        raise ValueError("nested too deep for the parser") from None


def _place(line: int | None, cells: Sequence[tuple[int, int]]) -> str:
    """Return where a script does not parse, as the start of a sentence."""
    if line is None:
        return ""
    if 0 < line <= len(cells):
        cell, line_of_cell = cells[line - 1]
        return f"cell {cell}, line {line_of_cell}: "
    return f"line {line}: "


def check(script: Script, rules: Iterable[Rule]) -> list[FixableFinding]:
    """Return what the rules find in a script, in the order of lines, each place once."""
    findings: dict[tuple[str, int, int], FixableFinding] = {}
    silenced = _silenced(script.text)
    for rule in rules:
        if not any(script.uses(framework) for framework in rule.frameworks):
            continue
        for hit in rule.check(script):
            fixable = _finding(script, rule, hit)
            finding = fixable.finding
            if not _is_silenced(silenced, finding):
                place = (finding.code, finding.line, finding.column)
                findings.setdefault(place, fixable)
    return sorted(
        findings.values(),
        key=lambda each: (each.finding.line, each.finding.column, each.finding.code),
    )


def _finding(script: Script, rule: Rule, hit: Hit) -> FixableFinding:
    start, end = script.span(hit.node)
    line, column = script.position(start)
    end_line, end_column = script.position(end)
    finding = Finding(
        path=script.path,
        line=line,
        column=column,
        end_line=end_line,
        end_column=end_column,
        code=rule.code,
        name=rule.name,
        message=hit.message or rule.message,
        fixable=bool(hit.edits),
        severity=rule.severity,
    )
    return FixableFinding(finding, hit.edits)


def _silenced(text: str) -> dict[int, frozenset[str] | None]:
    """Return the lines with a ``noqa`` and its codes; None stands for every code."""
    if "noqa" not in text.lower():
        return {}
    lines: dict[int, frozenset[str] | None] = {}
    for number, line in enumerate(script_lines(text), 1):
        match = _NOQA.search(line)
        if match is None:
            continue
        codes = re.findall(r"[A-Z]+\d*", (match["codes"] or "").upper())
        lines[number] = frozenset(codes) or None
    return lines


def _is_silenced(silenced: dict[int, frozenset[str] | None], finding: Finding) -> bool:
    """Return True where the first or the last line of a finding has a fitting ``noqa``."""
    for line in (finding.line, finding.end_line):
        if line not in silenced:
            continue
        codes = silenced[line]
        if codes is None or any(finding.code.startswith(code) for code in codes):
            return True
    return False


def mended(source: bytes, edits: Sequence[Edit]) -> bytes:
    """Return a text with edits made; they must not overlap."""
    for edit in sorted(edits, key=lambda each: each.start, reverse=True):
        source = source[: edit.start] + edit.text.encode() + source[edit.end :]
    return source
