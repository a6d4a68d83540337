"""Files of other tools, read so that an error can name the line: JSON, TOML, YAML and
shell-like environment files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from roundoff.errors import PlanError, did_you_mean, nearest
from roundoff.foreign import is_too_deep, parse_json, parse_toml, read_text

# Strings and comments that nothing ends go as far as they can, so that the time is in
# proportion to the text.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?')
_COMMENT = re.compile(
    r'"(?:[^"\\\n]|\\.)*+"?|(?P<comment>//[^\n]*|/\*.*?(?:\*/|\Z)|#[^\n]*)',
    re.DOTALL,
)
_SETTING = re.compile(
    r"^(?:export\s+|set\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>.*?)\s*;?$"
)


class Name(str):
    """A string of a file, with its line (counted from 1); 0 where the text has none."""

    line: int = 0

    @classmethod
    def at(cls, text: str, line: int) -> Name:
        """``text``, found at ``line``."""
        name = cls(text)
        name.line = line
        return name


def place(name: str) -> str:
    """Where a name stands: ``line 3``, or nothing where that is not known."""
    line = getattr(name, "line", 0)
    return f"line {line}" if line else ""


def read_file(path: Path) -> Any:
    """What a file holds, by its ending: .json, .toml, .yaml or .yml; any other is an
    environment file, or JSON.

    Raises ``PlanError`` naming the file and line for what cannot be read.
    """
    try:
        text = read_text(path, "utf-8-sig")
    except (OSError, ValueError) as error:
        raise PlanError(f"not a readable file: {error}", where=str(path)) from error
    if path.suffix == ".toml":
        try:
            return parse_toml(text)
        except ValueError as error:
            raise PlanError(f"not TOML: {error}", where=str(path)) from error
    if path.suffix in (".yaml", ".yml"):
        return read_yaml(text, str(path))
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        return read_json(text, str(path))
    return read_settings(text, str(path))


def read_json(text: str, where: str) -> Any:
    """JSON with every string a ``Name``.

    Raises ``PlanError``: comments and a key given twice too, with their lines.
    """
    try:
        data = parse_json(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        raise _not_json(text, where, error) from error
    except ValueError as error:
        raise PlanError(f"not JSON: {error}", where=where) from error
    return _with_lines(data, _lines_of(_STRING.finditer(text), text), where)


def _lines_of(matches: Iterable[re.Match[str]], text: str) -> Iterator[int]:
    """The line that each match begins in, counted from 1."""
    line = 1
    counted = 0
    for match in matches:
        line += text.count("\n", counted, match.start())
        counted = match.start()
        yield line


def _not_json(text: str, where: str, error: json.JSONDecodeError) -> PlanError:
    comments = (match for match in _COMMENT.finditer(text) if match["comment"])
    lines = list(dict.fromkeys(_lines_of(comments, text)))
    if lines:
        plural = "lines" if len(lines) > 1 else "line"
        shown = ", ".join(map(str, lines[:_MOST_LINES]))
        more = f" and {len(lines) - _MOST_LINES} more" if lines[_MOST_LINES:] else ""
        return PlanError(
            "JSON has no comments",
            where=f"{where}, line {lines[0]}",
            got=f"comments at {plural} {shown}{more}"
            " (samples in Ascend's documentation have them)",
            do="delete them",
        )
    last = max(text.count("\n"), 1)
    line = (text.splitlines() or [""])[min(error.lineno, last) - 1].strip()
    return PlanError(
        f"not JSON: {error.msg}",
        where=f"{where}, line {error.lineno}",
        got=repr(line[:60]) if line else "nothing",
        expected="commas between entries, none after the last, names in double quotes",
    )


def read_settings(text: str, where: str) -> dict[str, str]:
    """``NAME=VALUE`` lines, with or without ``export`` and quotes; a name given twice
    is an error, as in no shell.
    """
    settings: dict[str, str] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _SETTING.match(line)
        if match is None:
            raise PlanError(
                "not a setting",
                where=f"{where}, line {number}",
                expected="NAME=VALUE",
                got=repr(line[:60]),
            )
        name = Name.at(match["name"], number)
        if name in settings:
            first = next(other for other in settings if other == name)
            raise PlanError(
                f"{name} is set twice",
                where=f"{where}, line {number}",
                got=f"the first is at {place(first)}",
                do="keep one",
            )
        settings[name] = Name.at(_unquoted(match["value"]), number)
    return settings


def _unquoted(value: str) -> str:
    """The value inside its quotes; without quotes, what stands before a comment."""
    if value[:1] in ("'", '"') and value.count(value[0]) > 1:
        return value[1 : value.index(value[0], 1)]
    return f" {value}".partition(" #")[0].strip()


#: Of comments that JSON has not, in a message.
_MOST_LINES = 8
#: Characters of YAML, which is read at a tenth of the speed of other texts.
_LONGEST_YAML = 500_000
#: Aliases, which may make a text of some lines into billions.
_ALIASES = re.compile(r"(?:^|[\s\[,:-])\*[A-Za-z0-9_-]+\s*(?:$|[,\]}])", re.MULTILINE)


def read_yaml(text: str, where: str) -> Any:
    """YAML. Raises ``PlanError`` where it is none, or names the extra where PyYAML is missing."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise PlanError(
            "YAML needs PyYAML, which is not installed",
            where=where,
            do="pip install 'roundoff[yaml]'",
        ) from error
    if len(text) > _LONGEST_YAML:
        raise PlanError(
            "too long for a configuration in YAML",
            where=where,
            got=f"{len(text)} characters",
            expected=f"at most {_LONGEST_YAML}",
        )
    if is_too_deep(text) or _ALIASES.search(text):
        raise PlanError("nested too deep, or with aliases", where=where)
    try:
        return yaml.safe_load(text)
    except RecursionError as error:
        raise PlanError("nested too deep", where=where) from error
    except (ValueError, TypeError, AttributeError) as error:
        # dates, numbers and keys that Python cannot make
        raise PlanError(f"not YAML: {error}", where=where) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{where}, line {mark.line + 1}" if mark is not None else where
        raise PlanError(
            f"not YAML: {getattr(error, 'problem', None) or error}", where=at
        ) from error


def check_keys(
    keys: Iterable[str], allowed: tuple[str, ...], where: str, what: str = "setting"
) -> None:
    """Raise ``PlanError`` for the first key that is not ``allowed``, with its line and
    the nearest that is.
    """
    for key in keys:
        if key in allowed:
            continue
        at = ", ".join(part for part in (where, place(key)) if part)
        raise PlanError(
            f"an unknown {what}: {key}",
            where=at,
            expected=", ".join(allowed),
            do=did_you_mean(nearest(str(key), allowed, at_most=1)),
        )


def names_of(value: Any, where: str) -> list[str]:
    """A list of names. Raises ``PlanError`` for anything else."""
    is_list = isinstance(value, (list, tuple, set, frozenset))
    if not is_list or not all(isinstance(name, str) for name in value):
        raise PlanError(
            "not a list of names",
            where=where,
            expected='["MatMul", "Conv2D"]',
            got=repr(value)[:60],
        )
    return list(value) if isinstance(value, (list, tuple)) else sorted(value)


class _Pairs(list[tuple[str, Any]]):
    """An object of JSON in the order of its text, with keys that come twice."""


def _with_lines(data: Any, lines: Iterator[int], where: str) -> Any:
    """Strings come in the order of the text, so their lines are handed out in turn."""
    if isinstance(data, _Pairs):
        entries: dict[str, Any] = {}
        for key, value in data:
            name = Name.at(key, next(lines))
            if name in entries:
                first = next(other for other in entries if other == name)
                raise PlanError(
                    f"{json.dumps(key)} comes twice in one object",
                    where=f"{where}, line {name.line}",
                    got=f"the first is at {place(first)}",
                    do="join them: readers of JSON keep the last and drop the others in silence",
                )
            entries[name] = _with_lines(value, lines, where)
        return entries
    if isinstance(data, list):
        return [_with_lines(value, lines, where) for value in data]
    return Name.at(data, next(lines)) if isinstance(data, str) else data
