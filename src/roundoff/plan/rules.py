"""Plan: ordered rules, site pattern to format, that verify, training, quantization and
export obey.
"""

from __future__ import annotations

import glob
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundoff.errors import FormatError, PlanError, examples
from roundoff.files import as_path, atomic_path, toml_string, toml_value
from roundoff.foreign import parse_json, parse_toml, read_text
from roundoff.formats import parse_format
from roundoff.notebook import decibels
from roundoff.notebook import table as html_table
from roundoff.plan.figures import PlanFigures
from roundoff.site import first_match, matches

if TYPE_CHECKING:
    from torch import nn

SCHEMA = 1
#: What a rule of a plan with ``autocast`` may ask for beside a format: run in the
#: widest format of the inputs.
FOLLOW = "follow"


@dataclass(frozen=True)
class Rule:
    """The sites that these patterns name run in ``format``.

    A pattern is a glob over site names: ``encoder.*`` everything below a module,
    ``encoder.0/matmul#1`` one call. The path of a module, ``encoder.0``, stands for its
    own sites and those below it (see ``Plan.for_model``), ``op:softmax`` for every call
    of an operator, ``class:LayerNorm`` for the sites of every module of that class and
    below it, ``class:Attention/softmax`` for every call of one operator there.
    """

    format: str
    sites: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Which site runs in which format: the first rule that names a site decides, else ``default``.

    ``about`` says where the plan comes from: target and predicted SQNR in dB, cost,
    constraints. With ``autocast`` (a format, bf16 or fp16) the sites that no rule names
    run as the device's own autocast lists for it say, not in ``default``; then a rule's
    format may also be ``follow``: neither list, the widest format of the inputs.

    >>> plan = Plan((Rule("fp32", ("*/softmax",)), Rule("bf16", ("encoder.*",))))
    >>> plan.format_of("encoder.0/softmax"), plan.format_of("encoder.0/linear"), plan.format_of("head/linear")
    ('fp32', 'bf16', 'fp32')
    """

    rules: tuple[Rule, ...]
    default: str = "fp32"
    about: Mapping[str, Any] = field(default_factory=dict)
    autocast: str = ""

    def __post_init__(self) -> None:
        if self.autocast and self.autocast not in ("bf16", "fp16"):
            raise PlanError(
                "no autocast in this format",
                where="plan",
                expected="bf16 or fp16",
                got=repr(self.autocast),
            )
        for name in (self.default, *(rule.format for rule in self.rules)):
            if name == FOLLOW and self.autocast:
                continue
            try:
                parse_format(name)
            except FormatError as error:
                raise PlanError(
                    f"a rule asks for an unknown format: {error}", where="plan"
                ) from error

    def __repr__(self) -> str:
        counts = Counter(rule.format for rule in self.rules for _ in rule.sites)
        named = ", ".join(f"{count} in {name}" for name, count in counts.items())
        return f"<Plan: {named or 'nothing'}; others {self.autocast or self.default}>"

    def _repr_html_(self) -> str:
        rows = [(site, rule.format) for rule in self.rules for site in rule.sites]
        base = self.autocast and f"autocast's lists for {self.autocast}"
        return html_table(
            "Plan",
            [
                f"{decibels(self.figures.predicted_db)} predicted.",
                f"Sites without a rule run in {base or self.default}.",
            ],
            ("sites", "format"),
            rows,
        )

    @property
    def figures(self) -> PlanFigures:
        """Target, prediction and cost, as ``about`` says them.

        Raises ``PlanError`` for one that is no number.
        """
        return PlanFigures.from_dict(self.about)

    def format_of(self, site: str) -> str:
        """The format of one site.

        Raises ``PlanError`` for a plan over autocast's lists, which know operators, not
        sites.
        """
        if self.autocast:
            raise PlanError(
                f"this plan changes autocast's lists for {self.autocast}, which know operators, no sites",
                where="plan",
                expected="a plan that names the format of every site",
                do="train with roundoff.autocast(plan), or make a plan from a budget",
            )
        flat = [(pattern, rule.format) for rule in self.rules for pattern in rule.sites]
        return parse_format(first_match(flat, site) or self.default).name

    def formats(self, sites: Iterable[str]) -> dict[str, str]:
        """The format of each of ``sites``; those that stay in fp32 are left out.

        Raises ``PlanError`` listing the rules that name none of them: the plan belongs
        to another model.
        """
        sites = list(sites)
        if self.autocast:
            self.format_of("")
        names = frozenset(sites)
        patterns = [pattern for rule in self.rules for pattern in rule.sites]
        globs = [pattern for pattern in patterns if pattern not in names]
        _check_all_match(globs, sites, len(patterns))
        if globs:
            formats = {site: self.format_of(site) for site in sites}
        else:
            formats = self._exact_formats(sites)
        return {site: name for site, name in formats.items() if name != "fp32"}

    def _exact_formats(self, sites: Iterable[str]) -> dict[str, str]:
        """The format of each site where all patterns are names: one look-up a site."""
        named = dict.fromkeys(sites, self.default)
        for rule in reversed(self.rules):
            named.update(dict.fromkeys(rule.sites, rule.format))
        return {site: parse_format(name).name for site, name in named.items()}

    def for_model(self, model: nn.Module) -> Plan:
        """The same plan with every module path and ``class:`` pattern written out as
        patterns of site names.

        Raises ``PlanError`` naming the nearest classes where the model has none of that
        name.
        """
        paths: dict[str, list[str]] = {}
        for path, module in model.named_modules():
            for kind in type(module).__mro__:
                paths.setdefault(kind.__name__, []).append(path)
        rules = []
        for rule in self.rules:
            patterns = [_written_out(pattern, paths, model) for pattern in rule.sites]
            rules.append(Rule(rule.format, tuple(itertools.chain(*patterns))))
        return replace(self, rules=tuple(rules))

    @classmethod
    def from_formats(cls, formats: Mapping[str, str], about: Mapping[str, Any]) -> Plan:
        """One rule a format, naming its sites; fp32 is the default and has none."""
        groups: dict[str, list[str]] = {}
        for site, name in formats.items():
            groups.setdefault(name, []).append(site)
        groups.pop("fp32", None)
        return cls(
            tuple(Rule(name, tuple(sites)) for name, sites in sorted(groups.items())),
            "fp32",
            about,
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as TOML (JSON when the name ends in .json), whole or not at all."""
        data = {
            "schema": SCHEMA,
            "default": self.default,
            **({"autocast": self.autocast} if self.autocast else {}),
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
        path = as_path(path, "path", "the file of a plan")
        try:
            text = read_text(path)
            data = parse_json(text) if path.suffix == ".json" else parse_toml(text)
        except (OSError, ValueError) as error:
            raise PlanError(
                f"not a readable plan: {error}",
                where=str(path),
                expected="a TOML or JSON file written by roundoff plan",
            ) from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            got = type(data).__name__
            if isinstance(data, dict):
                got = f"schema = {data.get('schema')!r}"
            raise PlanError(
                "not a plan of this version",
                where=str(path),
                expected=f"schema = {SCHEMA}",
                got=got,
            )
        if "kind" in data:  # records of quantization are TOML of this schema too
            raise PlanError(
                "not a plan",
                where=str(path),
                expected="a file written by roundoff plan",
                got=f"a {data['kind']}",
                do="give the plan.toml that lies beside it",
            )
        try:
            rules = tuple(
                Rule(str(r["format"]), _patterns(r["sites"]))
                for r in data.get("rule", [])
            )
        except (KeyError, TypeError) as error:
            raise PlanError(
                f"a rule is incomplete: {error}",
                where=str(path),
                expected="format = NAME and sites = [PATTERN, ...]",
            ) from error
        about = data.get("about", {})
        if not isinstance(about, dict):
            raise PlanError(
                "about is not a table",
                where=str(path),
                expected="[about] and lines NAME = VALUE below it",
                got=repr(about)[:60],
            )
        return cls(
            rules,
            str(data.get("default", "fp32")),
            about,
            str(data.get("autocast", "")),
        )


def _check_all_match(globs: Sequence[str], sites: Sequence[str], patterns: int) -> None:
    """Raise ``PlanError`` where one of the globs, of ``patterns`` patterns, matches no site."""
    lost = [g for g in globs if not any(matches(g, site) for site in sites)]
    if not lost:
        return
    shown = lost[:10]
    if len(lost) > 10:
        shown.append(f"and {len(lost) - 10} more")
    listing = "\n    ".join(shown)
    raise PlanError(
        f"{len(lost)} of the plan's {patterns} patterns match no site of this model:\n    {listing}",
        where="plan",
        expected=f"sites of this model, such as {', '.join(sites[:3])}",
        got="a plan made for another model, or for another version of it",
        do="make the plan from a budget of this workload: roundoff budget, then roundoff plan",
    )


def _written_out(
    pattern: str, paths: Mapping[str, list[str]], model: nn.Module
) -> list[str]:
    if pattern and "/" not in pattern and pattern in paths["Module"]:
        return [f"{pattern}/*", f"{glob.escape(pattern)}.*"]
    if not pattern.startswith("class:"):
        return [pattern]
    name, slash, operator = pattern.removeprefix("class:").partition("/")
    if name not in paths:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise PlanError(
            f"a rule names a class that no module of this model has: {pattern}",
            where="plan",
            expected=f"a class of its modules, such as {examples(name, classes)}",
            got=name,
        )
    calls = [operator, f"{operator}#*"] if slash else ["*"]
    inside: list[str] = []
    for path in map(glob.escape, paths[name]):
        inside += [path, f"{path}.*" if path else "*"]
    return [f"{place}/{call}" for place, call in itertools.product(inside, calls)]


def _patterns(sites: Any) -> tuple[str, ...]:
    # the characters of one pattern would be patterns too
    if not isinstance(sites, list):
        raise TypeError(f"sites is {sites!r}, no list")
    return tuple(str(site) for site in sites)


def _toml(data: Mapping[str, Any]) -> str:
    about = {k: v for k, v in data["about"].items() if v is not None}
    lines = [
        "# Which site runs in which format: the first rule that names a site decides.",
        f"schema = {data['schema']}",
        f"default = {json.dumps(data['default'])}",
    ]
    if "autocast" in data:
        lines.append(f"autocast = {json.dumps(data['autocast'])}")
    lines += ["", "[about]"]
    lines += [f"{toml_string(k)} = {toml_value(v)}" for k, v in about.items()]
    for rule in data["rule"]:
        lines += ["", "[[rule]]", f"format = {json.dumps(rule['format'])}", "sites = ["]
        lines += [f"  {toml_string(site)}," for site in rule["sites"]]
        lines += ["]"]
    return "\n".join(lines) + "\n"
