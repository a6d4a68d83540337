"""Plan: ordered rules, site pattern to format, that verify, training, quantization and export obey."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roundoff.errors import FormatError, PlanError
from roundoff.files import atomic_path
from roundoff.formats import parse_format
from roundoff.site import first_match, matches

SCHEMA = 1


@dataclass(frozen=True)
class Rule:
    """The sites that these patterns name run in ``format``."""

    format: str
    sites: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Which site runs in which format: the first rule that names a site decides, else ``default``.

    ``about`` says where the plan comes from: target and predicted SQNR in dB, cost, constraints.

    >>> plan = Plan((Rule("fp32", ("*/softmax",)), Rule("bf16", ("encoder.*",))))
    >>> plan.format_of("encoder.0/softmax"), plan.format_of("encoder.0/linear"), plan.format_of("head/linear")
    ('fp32', 'bf16', 'fp32')
    """

    rules: tuple[Rule, ...]
    default: str = "fp32"
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (self.default, *(rule.format for rule in self.rules)):
            try:
                parse_format(name)
            except FormatError as error:
                raise PlanError(
                    f"a rule asks for an unknown format: {error}", where="plan"
                ) from error

    def format_of(self, site: str) -> str:
        """The format of one site."""
        flat = [(pattern, rule.format) for rule in self.rules for pattern in rule.sites]
        return parse_format(first_match(flat, site) or self.default).name

    def formats(self, sites: Iterable[str]) -> dict[str, str]:
        """The format of each of ``sites``; those that stay in fp32 are left out.

        Raises ``PlanError`` listing the rules that name none of them: the plan belongs to another model.
        """
        sites = list(sites)
        names = frozenset(sites)
        patterns = [pattern for rule in self.rules for pattern in rule.sites]
        lost = [p for p in patterns if p not in names and not any(matches(p, s) for s in sites)]
        if lost:
            shown = "\n    ".join(lost[:10]) + (
                f"\n    and {len(lost) - 10} more" if len(lost) > 10 else ""
            )
            raise PlanError(
                f"{len(lost)} of the plan's {len(patterns)} patterns match no site of this model:\n    {shown}",
                where="plan",
                expected=f"sites of this model, such as {', '.join(sites[:3])}",
                got="a plan made for another model, or for another version of it",
                do="make the plan from a budget of this workload: roundoff budget, then roundoff plan",
            )
        exact = {p: rule.format for rule in reversed(self.rules) for p in rule.sites}
        if all(p in names for p in patterns):  # no globs: one look-up a site
            chosen = {s: exact.get(s, self.default) for s in sites}
        else:
            chosen = {s: self.format_of(s) for s in sites}
        named = {s: parse_format(f).name for s, f in chosen.items()}
        return {s: f for s, f in named.items() if f != "fp32"}

    @classmethod
    def from_formats(cls, formats: Mapping[str, str], about: Mapping[str, Any]) -> Plan:
        """One rule a format, naming its sites; fp32 is the default and has none."""
        groups: dict[str, list[str]] = {}
        for site, name in formats.items():
            groups.setdefault(name, []).append(site)
        groups.pop("fp32", None)
        return cls(
            tuple(Rule(name, tuple(sites)) for name, sites in sorted(groups.items())), "fp32", about
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as TOML (JSON when the name ends in .json), whole or not at all."""
        data = {
            "schema": SCHEMA,
            "default": self.default,
            "about": dict(self.about),
            "rule": [{"format": r.format, "sites": list(r.sites)} for r in self.rules],
        }
        with atomic_path(path) as temporary:
            if str(path).endswith(".json"):
                text = json.dumps(data, indent=1, allow_nan=False) + "\n"
            else:
                text = _toml(data)
            temporary.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan. Raises ``PlanError`` naming what is wrong and where."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except (
            OSError,
            UnicodeDecodeError,
            tomllib.TOMLDecodeError,
            json.JSONDecodeError,
        ) as error:
            raise PlanError(
                f"not a readable plan: {error}",
                where=str(path),
                expected="a TOML or JSON file written by roundoff plan",
            ) from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise PlanError(
                "not a plan of this version",
                where=str(path),
                expected=f"schema = {SCHEMA}",
                got=f"schema = {data.get('schema')!r}"
                if isinstance(data, dict)
                else type(data).__name__,
            )
        try:
            rules = tuple(
                Rule(str(r["format"]), _patterns(r["sites"])) for r in data.get("rule", [])
            )
        except (KeyError, TypeError) as error:
            raise PlanError(
                f"a rule is incomplete: {error}",
                where=str(path),
                expected="format = NAME and sites = [PATTERN, ...]",
            ) from error
        return cls(rules, str(data.get("default", "fp32")), data.get("about", {}))


def _patterns(sites: Any) -> tuple[str, ...]:
    if not isinstance(sites, list):  # the characters of one pattern would be patterns too
        raise TypeError(f"sites is {sites!r}, no list")
    return tuple(str(site) for site in sites)


def _toml(data: Mapping[str, Any]) -> str:
    about = {k: v for k, v in data["about"].items() if v is not None}
    lines = ["# Which site runs in which format: the first rule that names a site decides.",
             f"schema = {data['schema']}", f"default = {json.dumps(data['default'])}", "", "[about]"]  # fmt: skip
    lines += [f"{_quoted(k)} = {_toml_value(v)}" for k, v in about.items()]
    for rule in data["rule"]:
        lines += ["", "[[rule]]", f"format = {json.dumps(rule['format'])}", "sites = ["]
        lines += [f"  {_quoted(site)}," for site in rule["sites"]]
        lines += ["]"]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    """A TOML value: JSON writes strings, numbers, booleans and lists the same way; tables are inline."""
    if isinstance(value, Mapping):
        return (
            "{ "
            + ", ".join(f"{_quoted(str(k))} = {_toml_value(v)}" for k, v in value.items())
            + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    return _quoted(value)


def _quoted(value: Any) -> str:
    """As JSON writes it; TOML allows no bare delete character, and no surrogates."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
