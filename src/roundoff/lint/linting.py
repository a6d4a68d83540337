"""Files linted and mended: each by itself, so that one that fails stops no other."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from roundoff.files import atomic_path
from roundoff.lint.config import LintConfig
from roundoff.lint.engine import FixableFinding, check, mended, parse
from roundoff.lint.files import Text, encoded, files_below, read
from roundoff.lint.findings import Finding, FixedFile, LintResult, Unread
from roundoff.lint.rule import Edit, Rule

#: Findings of one file that are mended at once.
_MOST_FIXES = 500


def lint_paths(
    paths: Sequence[Path], config: LintConfig, *, mend: bool = False
) -> LintResult:
    """Lint files and folders; with ``mend``, also return mended texts.

    Nothing is written. Findings of a mended file are those that its new text has left.
    """
    rules = config.rules()
    findings: list[Finding] = []
    unread: list[Unread] = []
    fixed: list[FixedFile] = []
    count = 0
    for path in _unique(paths, config):
        try:
            text = read(path)
            places = lint_text(text, config.rules_for(path, rules))
        except ValueError as error:
            unread.append(Unread(str(path), str(error)))
            continue
        count += 1
        if mend and not text.cells and any(each.edits for each in places):
            file, places = _mend(text, places, config.rules_for(path, rules))
            fixed.append(file)
        findings.extend(each.finding for each in places)
    return LintResult(tuple(findings), tuple(unread), count, tuple(fixed))


def _unique(paths: Iterable[Path], config: LintConfig) -> Iterable[Path]:
    """Return each file once, in the order in which they are named."""
    files = (file for path in paths for file in files_below(path, config.exclude))
    return {os.path.realpath(file): file for file in files}.values()


def lint_text(text: Text, rules: Iterable[Rule]) -> list[FixableFinding]:
    """Lint one text. Raises ``ValueError`` with the reason where it is no Python."""
    try:
        places = check(parse(text.code, str(text.path), text.cells), rules)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if text.cells:
        return [_in_cell(each, text) for each in places]
    return places


def _in_cell(place: FixableFinding, text: Text) -> FixableFinding:
    """Return a finding with its place in the notebook; notebooks are not mended."""
    finding = place.finding
    cell, line = text.cells[finding.line - 1]
    end_line = text.cells[finding.end_line - 1][1]
    placed = replace(finding, cell=cell, line=line, end_line=end_line, fixable=False)
    return FixableFinding(placed, ())


def _mend(
    text: Text, places: list[FixableFinding], rules: Sequence[Rule]
) -> tuple[FixedFile, list[FixableFinding]]:
    """Mend one finding after the other, and lint anew each time.

    An edit stays where the text is Python behind it, its finding is gone and no other
    has come.
    """
    code = text.code
    refused: set[tuple[str, tuple[Edit, ...]]] = set()
    fixes = 0
    while fixes < _MOST_FIXES:
        waiting = [
            each
            for each in places
            if each.edits and (each.finding.code, each.edits) not in refused
        ]
        if not waiting:
            break
        chosen = waiting[0]
        candidate = mended(code.encode(), chosen.edits).decode()
        after = _lint_or_none(replace(text, code=candidate), rules)
        if after is None or not _is_better(after, places, chosen):
            refused.add((chosen.finding.code, chosen.edits))
            continue
        code = candidate
        places = after
        fixes += 1
    left = [_without_refused(each, refused) for each in places]
    return FixedFile(str(text.path), text.code, code, fixes), left


def _without_refused(
    place: FixableFinding, refused: set[tuple[str, tuple[Edit, ...]]]
) -> FixableFinding:
    """Return a finding without a fix that would have broken another rule."""
    if (place.finding.code, place.edits) not in refused:
        return place
    return FixableFinding(replace(place.finding, fixable=False), ())


def _lint_or_none(text: Text, rules: Sequence[Rule]) -> list[FixableFinding] | None:
    try:
        return lint_text(text, rules)
    except ValueError:
        return None


def _is_better(
    after: list[FixableFinding],
    before: list[FixableFinding],
    mended_one: FixableFinding,
) -> bool:
    """Return True where a finding of one code is gone, and none of another has come."""
    counts = Counter(each.finding.code for each in before)
    counts[mended_one.finding.code] -= 1
    counts_after = Counter(each.finding.code for each in after)
    return all(number <= counts[code] for code, number in counts_after.items())


def write_fixed(result: LintResult) -> None:
    """Write mended texts over their files, which keep their rights and byte-order mark.

    Raises ``OutputError`` where that fails.
    """
    for file in result.fixed:
        if file.after == file.before:
            continue
        path = Path(os.path.realpath(file.path))
        mode = stat.S_IMODE(path.stat().st_mode)
        data = encoded(file.after, path.read_bytes())
        with atomic_path(path) as temporary:
            temporary.write_bytes(data)
        path.chmod(mode)
