"""Find the rule of a plan that decides a site, its place in the file, and autocast's own answer."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from roundoff.errors import PatternError, PlanError, did_you_mean, examples, nearest
from roundoff.foreign import read_text
from roundoff.formats import parse_format
from roundoff.ops import autocast_class
from roundoff.plan.rules import FOLLOW, Plan, Rule
from roundoff.site import matches

if TYPE_CHECKING:
    from torch import nn

#: The devices whose built-in lists are shown.
DEVICES = ("cpu", "cuda")
_PROMOTED = "the widest format of its inputs"
_FOLLOWED = "the format of its inputs"


@dataclass(frozen=True)
class SiteDecision:
    """What a plan says about one site.

    ``rule`` counts from 1; None where no rule names the site. ``place`` is the line of
    the file that the rule's pattern stands in, as far as known. ``listed``: what
    torch.autocast's own lists say on each device (lower, fp32, promote, follow), for
    plans over them.
    """

    site: str
    format: str
    rule: int | None
    pattern: str
    place: str
    listed: Mapping[str, str]

    @property
    def why(self) -> str:
        """The reason in words.

        >>> SiteDecision("a/softmax", "fp32", 2, "op:softmax", "plan.toml, line 9", {}).why
        'rule 2, op:softmax (plan.toml, line 9)'
        """
        if self.rule is not None:
            place = f" ({self.place})" if self.place else ""
            return f"rule {self.rule}, {self.pattern}{place}"
        if self.listed:
            return "no rule: autocast's own lists"
        return "no rule: the plan's default"


def explain(
    plan: Plan,
    sites: Iterable[str],
    *,
    model: nn.Module | None = None,
    called: Iterable[str] | None = None,
    device: str = "cpu",
    file: str | Path | None = None,
) -> list[SiteDecision]:
    """Say what decides the format of each site (``module/operator``, or ``op:NAME`` anywhere).

    ``model`` is needed for plans with ``class:`` patterns, and then a module that it
    does not have is an error. ``called`` are the sites that it calls, where they are
    known: then an operator that it does not call is an error too. ``device`` is the one
    whose lists decide where no rule does. ``file`` is the plan's, for the lines. Raises
    ``PatternError`` for a module, parameter or operator that the model lacks,
    ``PlanError`` for a ``class:`` pattern without a model and for a device without
    autocast.

    >>> plan = Plan((Rule("fp32", ("op:softmax",)),), autocast="bf16")
    >>> [(d.format, d.why) for d in explain(plan, ["a/softmax", "a/linear"])]
    [('fp32', 'rule 1, op:softmax'), ('bf16', "no rule: autocast's own lists")]
    """
    # a device without autocast is an error, whatever decides
    autocast_class("linear", device)
    patterns = [pattern for rule in plan.rules for pattern in rule.sites]
    if model is None and any(pattern.startswith("class:") for pattern in patterns):
        raise PlanError(
            "the plan names classes, and which module is of which is not known",
            where="plan",
            expected="the model",
            do="give it: --workload WORKLOAD.py",
        )
    explained = _Explained(plan, model, device, file)
    wanted = list(sites)
    decisions = [explained.decision(site) for site in wanted]
    if called is not None:
        _check_called(wanted, set(called))
    return decisions


def lines(file: str | Path) -> dict[tuple[int, str], int]:
    """(rule number, pattern) → the line of a plan's file that the pattern stands in;
    empty for other files.
    """
    text = read_text(Path(file))
    json_file = str(file).endswith(".json")
    start_of_rule = r'"format"\s*:' if json_file else r"(?m)^\s*\[\[rule\]\]"
    starts = [match.start() for match in re.finditer(start_of_rule, text)]
    places: dict[tuple[int, str], int] = {}
    number = 0
    line = 1
    counted = 0
    for match in _STRING.finditer(text):
        while number < len(starts) and starts[number] <= match.start():
            number += 1
        line += text.count("\n", counted, match.start())
        counted = match.start()
        pattern = _unquoted(match[0])
        if number and pattern is not None:
            places.setdefault((number, pattern), line)
    return places


#: A string of TOML or JSON; one that no quote ends goes to the end of its line, so that
#: the time is in proportion to the text.
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|\'[^\'\n]*+\'?')


def _unquoted(string: str) -> str | None:
    """The text of a string; None for one with escapes that JSON lacks, or without an end."""
    if string[0] == "'":
        return string[1:-1] if string.endswith("'") else None
    try:
        return str(json.loads(string))
    except json.JSONDecodeError:
        return None


class _Explained:
    """A plan as its file has it, and written out for one model and device."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module | None,
        device: str,
        file: str | Path | None,
    ) -> None:
        self.in_file = plan
        self.plan = plan if model is None else plan.for_model(model)
        self.model = model
        self.device = device
        self.file = file
        self.lines = lines(file) if file is not None else {}

    def decision(self, site: str) -> SiteDecision:
        """What decides the format of a site."""
        plan = self.plan
        name = site
        if site.startswith("op:"):
            name = f"/{site[3:]}"
            plan = _anywhere(plan)
        elif self.model is not None:
            _check(site, self.model)
        operator = _operator(name)
        lists = {}
        if plan.autocast and operator:
            lists = {device: autocast_class(operator, device) for device in DEVICES}
        for number, rule in enumerate(plan.rules, 1):
            pattern = next((p for p in rule.sites if matches(p, name)), None)
            if pattern is not None:
                shown = self._as_in_file(pattern, number)
                place = self._place(number, shown)
                form = _format_of_rule(rule)
                return SiteDecision(site, form, number, shown, place, lists)
        form = _format_without_rule(plan, operator, self.device)
        return SiteDecision(site, form, None, "", "", lists)

    def _as_in_file(self, pattern: str, number: int) -> str:
        """The pattern as the file has it: classes and module paths were written out."""
        rule = self.in_file.rules[number - 1]
        if pattern in rule.sites or self.model is None:
            return pattern
        for short in rule.sites:
            if "/" in short.partition(":")[0]:
                continue
            written_out = Plan((Rule("fp32", (short,)),)).for_model(self.model)
            if pattern in written_out.rules[0].sites:
                return short
        return pattern

    def _place(self, number: int, pattern: str) -> str:
        line = self.lines.get((number, pattern))
        parts = [f"{self.file}, line {line}"] if line else []
        about = self.in_file.about
        origin = dict(about.get("origin", {})).get(pattern)
        if origin:
            parts.append(f"from {origin} of {about.get('file', '')}")
        return ", ".join(parts)


def _operator(name: str) -> str:
    """The operator of a site's name; empty for a parameter."""
    _, slash, call = name.rpartition("/")
    return call.partition("#")[0] if slash else ""


def _anywhere(plan: Plan) -> Plan:
    """The plan for an operator of no module: rules over modules do not apply."""
    rules = [
        Rule(
            rule.format,
            tuple(p for p in rule.sites if p.startswith("op:") or p in ("*", "*/*")),
        )
        for rule in plan.rules
    ]
    return replace(plan, rules=tuple(rules))


def _format_of_rule(rule: Rule) -> str:
    return _PROMOTED if rule.format == FOLLOW else parse_format(rule.format).name


def _format_without_rule(plan: Plan, operator: str, device: str) -> str:
    if not plan.autocast:
        return parse_format(plan.default).name
    behaviour = autocast_class(operator, device) if operator else "follow"
    formats = {"lower": plan.autocast, "fp32": "fp32", "promote": _PROMOTED}
    return formats.get(behaviour, _FOLLOWED)


def _check_called(sites: Iterable[str], called: Collection[str]) -> None:
    """Raise ``PatternError`` where a module of the model calls no such operator."""
    for site in sites:
        if site in called or site.startswith("op:") or not _operator(site):
            continue
        raise PatternError(
            f"the model does not call {site!r}",
            where=site,
            expected=f"one of its calls, such as {examples(site, called)}",
            do=did_you_mean(nearest(site, called)),
        )


def _check(site: str, model: nn.Module) -> None:
    """Raise ``PatternError`` where the model has no such module, or, for a name without
    a slash, no such parameter.
    """
    module, slash, _ = site.rpartition("/")
    if slash:
        kind = "module"
        wanted = module
        names = [name for name, _ in model.named_modules()]
    else:
        kind = "parameter"
        wanted = site
        names = [name for name, _ in model.named_parameters()]
    if wanted in names:
        return
    raise PatternError(
        f"the model has no {kind} {wanted!r}",
        where=site,
        expected=f"module/operator of one of its modules, such as {examples(wanted, names)}",
    )
