"""Which rule of a plan decides a site, where it stands, and what autocast's own lists say beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from roundoff.errors import PatternError, PlanError, examples
from roundoff.formats import parse_format
from roundoff.ops import listed
from roundoff.plan.rules import FOLLOW, Plan, Rule
from roundoff.site import matches

if TYPE_CHECKING:
    from torch import nn

#: The devices whose built-in lists are shown.
DEVICES = ("cpu", "cuda")
_PROMOTED = "the widest format of its inputs"
_FOLLOWED = "the format of its inputs"


@dataclass(frozen=True)
class Decision:
    """What a plan says about one site.

    ``rule`` counts from 1; None where no rule names the site. ``place`` is the line of the file that the rule's pattern
    stands in, as far as known. ``listed``: what torch.autocast's own lists say on each device (lower, fp32, promote,
    follow), for plans over them.
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

        >>> Decision("a/softmax", "fp32", 2, "op:softmax", "plan.toml, line 9", {}).why
        'rule 2, op:softmax (plan.toml, line 9)'
        """
        if self.rule is not None:
            return f"rule {self.rule}, {self.pattern}" + (
                f" ({self.place})" if self.place else ""
            )
        return (
            "no rule: autocast's own lists"
            if self.listed
            else "no rule: the plan's default"
        )


def explain(
    plan: Plan,
    sites: Iterable[str],
    *,
    model: nn.Module | None = None,
    device: str = "cpu",
    file: str | Path | None = None,
) -> list[Decision]:
    """For each site (``module/operator``, or ``op:NAME`` for an operator anywhere) what decides its format.

    ``model`` is needed for plans with ``class:`` patterns, and then a module that it does not have is an error. ``device``
    is the one whose lists decide where no rule does. ``file`` is the plan's, for the lines. Raises ``PatternError`` for
    a module that the model lacks, ``PlanError`` for a ``class:`` pattern without a model and for a device without autocast.

    >>> plan = Plan((Rule("fp32", ("op:softmax",)),), autocast="bf16")
    >>> [(d.format, d.why) for d in explain(plan, ["a/softmax", "a/linear"])]
    [('fp32', 'rule 1, op:softmax'), ('bf16', "no rule: autocast's own lists")]
    """
    written = plan
    listed("linear", device)  # a device without autocast is an error, whatever decides
    if model is not None:
        plan = plan.for_model(model)
    elif any(
        pattern.startswith("class:") for rule in plan.rules for pattern in rule.sites
    ):
        raise PlanError(
            "the plan names classes, and which module is of which is not known",
            where="plan",
            expected="the model",
            do="give it: --workload WORKLOAD.py",
        )
    places = lines(file) if file is not None else {}
    return [
        _decision(site, plan, written, model, device, places, file) for site in sites
    ]


def lines(file: str | Path) -> dict[tuple[int, str], int]:
    """(rule number, pattern) → the line of a plan's file that the pattern stands in; empty for other files."""
    text = Path(file).read_text(encoding="utf-8")
    json_file = str(file).endswith(".json")
    starts = [
        m.start()
        for m in re.finditer(
            r'"format"\s*:' if json_file else r"(?m)^\s*\[\[rule\]\]", text
        )
    ]
    found: dict[tuple[int, str], int] = {}
    for number, start in enumerate(starts, 1):
        end = starts[number] if number < len(starts) else len(text)
        for match in re.finditer(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', text[start:end]):
            try:
                pattern = json.loads(match[0]) if match[0][0] == '"' else match[0][1:-1]
            except json.JSONDecodeError:  # TOML has escapes that JSON lacks
                continue
            found.setdefault(
                (number, pattern), text.count("\n", 0, start + match.start()) + 1
            )
    return found


def _decision(
    site: str,
    plan: Plan,
    written: Plan,
    model: nn.Module | None,
    device: str,
    places: Mapping[tuple[int, str], int],
    file: str | Path | None,
) -> Decision:
    name = site
    if site.startswith("op:"):  # of no module: rules over modules do not apply
        name = f"/{site[3:]}"
    elif model is not None:
        _check(site, model)
    operator = name.rpartition("/")[2].partition("#")[0] if "/" in name else ""
    if site.startswith("op:"):
        anywhere = [
            tuple(p for p in r.sites if p.startswith("op:") or p in ("*", "*/*"))
            for r in plan.rules
        ]
        plan = replace(
            plan,
            rules=tuple(
                Rule(r.format, p) for r, p in zip(plan.rules, anywhere, strict=True)
            ),
        )
    said = (
        {d: listed(operator, d) for d in DEVICES} if plan.autocast and operator else {}
    )
    for number, rule in enumerate(plan.rules, 1):
        pattern = next((p for p in rule.sites if matches(p, name)), None)
        if pattern is None:
            continue
        shown = _pattern(pattern, written.rules[number - 1], model)
        place = _place(number, shown, written, places, file)
        format = _FOLLOWED if rule.format == FOLLOW else parse_format(rule.format).name
        return Decision(
            site,
            _PROMOTED if rule.format == FOLLOW else format,
            number,
            shown,
            place,
            said,
        )
    if not plan.autocast:
        return Decision(site, parse_format(plan.default).name, None, "", "", said)
    own = listed(operator, device) if operator else "follow"
    format = {"lower": plan.autocast, "fp32": "fp32", "promote": _PROMOTED}.get(
        own, _FOLLOWED
    )
    return Decision(site, format, None, "", "", said)


def _pattern(pattern: str, rule: Rule, model: nn.Module | None) -> str:
    """The pattern as the file has it: classes and module paths were written out."""
    if pattern in rule.sites or model is None:
        return pattern
    for own in rule.sites:
        if (
            "/" not in own.partition(":")[0]
            and pattern in Plan((Rule("fp32", (own,)),)).for_model(model).rules[0].sites
        ):
            return own
    return pattern


def _place(
    number: int,
    pattern: str,
    plan: Plan,
    places: Mapping[tuple[int, str], int],
    file: str | Path | None,
) -> str:
    line = places.get((number, pattern))
    at = f"{file}, line {line}" if line else ""
    origin = dict(plan.about.get("origin", {})).get(pattern)
    if origin:
        at = ", ".join(
            part
            for part in (at, f"from {origin} of {plan.about.get('file', '')}")
            if part
        )
    return at


def _check(site: str, model: nn.Module) -> None:
    """Raise ``PatternError`` where the model has no such module, or, for a name without a slash, no such parameter."""
    module, slash, _ = site.rpartition("/")
    names = (
        [n for n, _ in model.named_modules()]
        if slash
        else [n for n, _ in model.named_parameters()]
    )
    wanted = module if slash else site
    if wanted in names:
        return
    raise PatternError(
        f"the model has no {'module' if slash else 'parameter'} {wanted!r}",
        where=site,
        expected=f"module/operator of one of its modules, such as {examples(wanted, names)}",
    )
