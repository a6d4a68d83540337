"""``roundoff lint``: what is wrong with training scripts, without running them."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roundoff.cli import kinds
from roundoff.cli import options as o
from roundoff.cli.talk import talk
from roundoff.errors import RoundoffError

if TYPE_CHECKING:
    from roundoff.lint import LintResult


class OutputFormat(enum.StrEnum):
    """How findings are written."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


def command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Scripts, notebooks, or folders with them.", metavar="PATH..."
        ),
    ] = None,
    select: Annotated[
        list[kinds.Names] | None,
        kinds.option(
            "--select",
            parse=kinds.lint_codes,
            help="Run these rules alone: codes or their beginnings, with commas. Repeatable.",
            metavar="CODES",
        ),
    ] = None,
    ignore: Annotated[
        list[kinds.Names] | None,
        kinds.option(
            "--ignore",
            parse=kinds.lint_codes,
            help="Leave these rules out. Repeatable.",
            metavar="CODES",
        ),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Mend what can be mended safely, in place.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show what --fix would change.")
    ] = False,
    output_format: Annotated[
        OutputFormat, typer.Option("--format", help="How findings are written.")
    ] = OutputFormat.TEXT,
    strict: Annotated[
        bool, typer.Option("--strict", help="Let advice alone make the exit code 1.")
    ] = False,
    explain: Annotated[
        kinds.Names | None,
        kinds.option(
            "--explain",
            parse=kinds.lint_code,
            help="Print a rule, why it matters and its examples; `all` lists the rules.",
            metavar="CODE",
        ),
    ] = None,
) -> int:
    """Read training scripts and say what is wrong with their mixed precision, formulas,
    losses, loops and input pipelines. Nothing is imported or run.

    The exit code is 1 where something is wrong or a file cannot be read, 0 where nothing
    is or all that is found is advice, 2 for bad input.
    """
    import roundoff

    if explain is not None:
        return _explain(explain)
    if not paths:
        raise RoundoffError("no file or folder is named", where="roundoff lint")
    result = roundoff.lint(
        paths,
        select=_codes(select),
        ignore=_codes(ignore),
        fix=fix,
        diff=diff,
    )
    if diff:
        _print_diff(result)
    else:
        _print(result, output_format)
    counted = result.findings if strict else result.warnings
    return 1 if counted or result.unread else 0


def _codes(options: list[kinds.Names] | None) -> list[str]:
    """Return the codes of an option that may be repeated."""
    return [code for option in options or () for code in option]


def _print(result: LintResult, output_format: OutputFormat) -> None:
    from roundoff.lint import RULES
    from roundoff.report import github_lines, lint_lines, lint_sarif

    if output_format is OutputFormat.JSON:
        o.print_json(_as_json(result))
    elif output_format is OutputFormat.SARIF:
        print(lint_sarif(result, RULES))
    elif output_format is OutputFormat.GITHUB:
        _print_lines(github_lines(result))
    elif not talk().quiet:
        _print_lines(lint_lines(result))


def _as_json(result: LintResult) -> dict[str, Any]:
    """Return findings and what was not read as one object."""
    return {
        "files": result.files,
        "findings": [asdict(finding) for finding in result.findings],
        "unread": [asdict(unread) for unread in result.unread],
        "fixed": [
            {"path": file.path, "fixes": file.fixes}
            for file in result.fixed
            if file.fixes
        ],
    }


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _print_diff(result: LintResult) -> None:
    from roundoff.report import diff_lines

    for line in diff_lines(result):
        sys.stdout.write(line if line.endswith("\n") else f"{line}\n")


def _explain(codes: kinds.Names) -> int:
    """Print the rules of some codes: one whole, several as a list."""
    from roundoff.lint import RULES
    from roundoff.report import rule_text

    chosen = [rule for rule in RULES if rule.code in codes]
    if len(chosen) == 1:
        print(rule_text(chosen[0]))
        return 0
    for rule in chosen:
        print(f"{rule.code} {rule.name}: {rule.message}")
    return 0
