"""Which rules run on which files: ``[tool.roundoff.lint]`` of a ``pyproject.toml``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from roundoff.errors import RoundoffError, did_you_mean, nearest
from roundoff.foreign import fault_of, parse_toml, read_text
from roundoff.lint.files import is_excluded
from roundoff.lint.rule import Rule
from roundoff.lint.rules.table import RULES

_CODE = re.compile(r"RO\d{0,3}")


@dataclass(frozen=True)
class LintConfig:
    """Which rules run, and on what.

    Args:
        select: codes or beginnings of codes; all rules when empty.
        ignore: codes or beginnings of codes that do not run; the longer beginning wins
            over ``select``.
        exclude: patterns of paths that are not linted when their folder is.
        per_file_ignores: codes that do not run on files that fit a pattern.
    """

    select: Sequence[str] = ()
    ignore: Sequence[str] = ()
    exclude: Sequence[str] = ()
    per_file_ignores: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def rules(self) -> tuple[Rule, ...]:
        """Return the rules that run.

        >>> [rule.code for rule in LintConfig(select=("RO101",), ignore=("RO1",)).rules()]
        ['RO101']
        """
        return tuple(rule for rule in RULES if self._runs(rule.code))

    def _runs(self, code: str) -> bool:
        selected = _longest(self.select, code) if self.select else 0
        ignored = _longest(self.ignore, code)
        return selected is not None and (ignored is None or ignored < selected)

    def rules_for(self, path: Path, rules: Sequence[Rule]) -> Sequence[Rule]:
        """Return those of some rules that run on a file."""
        ignored = [
            code
            for pattern, codes in self.per_file_ignores.items()
            if is_excluded(path, [pattern])
            for code in codes
        ]
        return [rule for rule in rules if _longest(ignored, rule.code) is None]


def _longest(beginnings: Sequence[str], code: str) -> int | None:
    """Return the length of the longest beginning that fits a code; None where none does."""
    lengths = [len(each) for each in beginnings if code.startswith(each)]
    return max(lengths, default=None)


def check_codes(codes: Sequence[str], where: str | None = None) -> tuple[str, ...]:
    """Return codes in capitals. Raises ``RoundoffError`` for one that fits no rule.

    >>> check_codes(["ro1"], "--select")
    ('RO1',)
    """
    if not codes and where is None:
        raise RoundoffError("no code is named", expected="such as RO1,RO402")
    upper = tuple(code.strip().upper() for code in codes if code.strip())
    for code in upper:
        _check_code(code, where)
    return upper


def _check_code(code: str, where: str | None) -> None:
    """Raise ``RoundoffError`` for a code, or the beginning of one, that fits no rule."""
    codes = [rule.code for rule in RULES]
    fits = any(each.startswith(code) for each in codes)
    if not fits or not _CODE.fullmatch(code):
        raise RoundoffError(
            f"no rule has the code {code!r}",
            where=where,
            expected="a code such as RO101, or its beginning",
            do=did_you_mean(nearest(code, codes))
            or "see `roundoff lint --explain all`",
        )


def nearest_config(paths: Sequence[Path]) -> LintConfig:
    """Return the configuration of the nearest ``pyproject.toml`` above what is linted.

    Without one, or without its table, the defaults. Raises ``RoundoffError`` where the
    table does not hold what it should.
    """
    start = paths[0].absolute() if paths else Path.cwd()
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            return read_config(file)
    return LintConfig()


def read_config(file: Path) -> LintConfig:
    """Return the configuration of a file."""
    try:
        table = parse_toml(read_text(file))
    except (OSError, ValueError) as error:
        raise RoundoffError(
            "the configuration cannot be read", where=str(file), got=str(error)
        ) from None
    for name in ("tool", "roundoff", "lint"):
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise RoundoffError(f"{name} is no table", where=str(file))
    return _config_of({key.replace("-", "_"): v for key, v in table.items()}, file)


def _config_of(values: Mapping[str, object], file: Path) -> LintConfig:
    where = f"{file}: [tool.roundoff.lint]"
    names = [each.name for each in fields(LintConfig)]
    for key in values:
        if key not in names:
            raise RoundoffError(
                f"unknown key {key!r}", where=where, expected=", ".join(names)
            )
    config = LintConfig(**values)  # type: ignore[arg-type]
    fault = fault_of(config)
    if fault is not None:
        raise RoundoffError(fault, where=where)
    ignores = {
        pattern: check_codes(codes, where)
        for pattern, codes in config.per_file_ignores.items()
    }
    return LintConfig(
        select=check_codes(config.select, where),
        ignore=check_codes(config.ignore, where),
        exclude=tuple(config.exclude),
        per_file_ignores=ignores,
    )
