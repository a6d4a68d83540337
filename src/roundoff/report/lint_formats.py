"""Findings of ``roundoff lint`` for machines: SARIF 2.1.0 and GitHub's commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from roundoff.foreign import visible
from roundoff.packages import installed_version
from roundoff.report.strict import json_text

if TYPE_CHECKING:
    from roundoff.lint import Finding, LintResult, Rule

#: What a severity is called in SARIF, and the command of GitHub for it.
_SARIF_LEVELS = {"warning": "warning", "advice": "note"}
_GITHUB_COMMANDS = {"warning": "warning", "advice": "notice"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def lint_sarif(result: LintResult, rules: Sequence[Rule]) -> str:
    """Return the text of findings in SARIF 2.1.0, as GitHub's code scanning takes it.

    Paths are relative to the current folder where they lie below it.
    """
    places = {rule.code: place for place, rule in enumerate(rules)}
    driver = {
        "name": "roundoff",
        "version": installed_version(),
        "rules": [_sarif_rule(rule) for rule in rules],
    }
    unread = [
        {
            "level": "warning",
            "message": {"text": unread.reason},
            "locations": [_location(unread.path)],
        }
        for unread in result.unread
    ]
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {"executionSuccessful": True, "toolExecutionNotifications": unread}
        ],
        "results": [_sarif_result(each, places) for each in result.findings],
    }
    return json_text({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]})


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.message},
        "fullDescription": {"text": rule.why},
        "help": {
            "text": f"wrong:\n{rule.wrong}\nright:\n{rule.right}",
            "markdown": f"Wrong:\n```python\n{rule.wrong}```\nRight:\n```python\n{rule.right}```\n",
        },
        "defaultConfiguration": {"level": _SARIF_LEVELS[rule.severity]},
    }


def _sarif_result(finding: Finding, places: dict[str, int]) -> dict[str, Any]:
    region = {
        "startLine": finding.line,
        "startColumn": finding.column,
        "endLine": finding.end_line,
        "endColumn": finding.end_column,
    }
    in_cell = "" if finding.cell is None else f"cell {finding.cell}: "
    return {
        "ruleId": finding.code,
        "ruleIndex": places[finding.code],
        "level": _SARIF_LEVELS[finding.severity],
        "message": {"text": in_cell + finding.message},
        "locations": [_location(finding.path, region)],
    }


def _location(path: str, region: dict[str, int] | None = None) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(path)}}
    if region is not None:
        physical["region"] = region
    return {"physicalLocation": physical}


def _uri(path: str) -> str:
    place = Path(path)
    try:
        place = place.absolute().relative_to(Path.cwd())
    except ValueError:
        return place.absolute().as_uri()
    return quote(place.as_posix())


def github_lines(result: LintResult) -> Iterator[str]:
    """Yield a workflow command for each finding and each file that was not read."""
    for finding in result.findings:
        fields = {
            "file": finding.path,
            "line": finding.line,
            "col": finding.column,
            "endLine": finding.end_line,
            "endColumn": finding.end_column,
            "title": f"{finding.code} {finding.name}",
        }
        in_cell = "" if finding.cell is None else f"cell {finding.cell}: "
        name = _GITHUB_COMMANDS[finding.severity]
        yield _command(name, fields, in_cell + finding.message)
    for unread in result.unread:
        yield _command("warning", {"file": unread.path}, f"not linted: {unread.reason}")


def _command(name: str, fields: dict[str, Any], message: str) -> str:
    settings = ",".join(f"{key}={_property(v)}" for key, v in fields.items())
    return visible(f"::{name} {settings}::{_data(message)}", lines=False)


def _data(text: str) -> str:
    """Escape what ends a command, as GitHub's toolkit does."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: object) -> str:
    return _data(str(value)).replace(":", "%3A").replace(",", "%2C")
