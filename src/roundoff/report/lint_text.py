"""Findings of ``roundoff lint`` for people: a line each, a difference of texts, a rule."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from roundoff.foreign import script_lines, visible
from roundoff.report.figures import count

if TYPE_CHECKING:
    from roundoff.lint import Finding, LintResult, Rule


def lint_lines(result: LintResult) -> Iterator[str]:
    """Yield ``path:line:column: code message`` for each finding, what was not read, and
    a sum. Advice is marked.
    """
    for finding in result.findings:
        text = f"{place(finding)}: {finding.code} {finding.message}{_marks(finding)}"
        yield visible(text, lines=False)
    for unread in result.unread:
        yield visible(f"{unread.path}: not linted: {unread.reason}", lines=False)
    yield _sum(result)


def _marks(finding: Finding) -> str:
    """Return what stands behind a message."""
    advice = "" if finding.severity == "warning" else f" [{finding.severity}]"
    return f"{advice} [fixable]" if finding.fixable else advice


def place(finding: Finding) -> str:
    """Return where a finding is; of a notebook, the cell too."""
    cell = "" if finding.cell is None else f"cell {finding.cell}:"
    return f"{finding.path}:{cell}{finding.line}:{finding.column}"


def _sum(result: LintResult) -> str:
    fixable = sum(finding.fixable for finding in result.findings)
    parts = [
        f"{count(len(result.findings), 'finding')} in {count(result.files, 'file')}"
    ]
    advice = len(result.findings) - len(result.warnings)
    if advice:
        parts.append(f"{advice} of them advice")
    if fixable:
        parts.append(f"--fix mends {fixable}")
    fixes = sum(file.fixes for file in result.fixed)
    if fixes:
        parts.append(f"{count(fixes, 'finding')} mended")
    if result.unread:
        parts.append(f"{count(len(result.unread), 'file')} not linted")
    return "; ".join(parts) + "."


def diff_lines(result: LintResult) -> Iterator[str]:
    """Yield what mending changes, as a unified difference that ``patch`` takes.

    Of a line with control characters other than tabs it does not: they are escapes.
    """
    for file in result.fixed:
        lines = difflib.unified_diff(
            script_lines(file.before),
            script_lines(file.after),
            fromfile=visible(file.path, lines=False),
            tofile=visible(file.path, lines=False),
        )
        yield from map(_visible_but_tabs, lines)


def _visible_but_tabs(line: str) -> str:
    text = line.removesuffix("\n").removesuffix("\r")
    end = line[len(text) :]
    return "\t".join(map(visible, text.split("\t"))) + end


def rule_text(rule: Rule) -> str:
    """Return what a rule says, why, and its two examples."""
    severity = "" if rule.severity == "warning" else f" ({rule.severity})"
    parts = [
        f"{rule.code} {rule.name}{severity}",
        f"{rule.message}.",
        rule.why,
        "wrong:",
        _indented(rule.wrong),
        "right:",
        _indented(rule.right),
    ]
    return "\n".join(parts)


def _indented(code: str) -> str:
    lines = (f"    {line}".rstrip() for line in code.splitlines())
    return "\n".join(lines)
