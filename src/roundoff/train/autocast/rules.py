"""Which rule of a plan decides at a site, and what has to be done there for it: the
plan on one model and device.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from roundoff.errors import PlanError, examples
from roundoff.formats import parse_format
from roundoff.ops import AutocastClass, autocast_class, autocast_differences
from roundoff.plan import FOLLOW, Plan, Rule
from roundoff.site import matches

#: What is done at a call: nothing, its inputs cast to a dtype (autocast switched off for
#: it), to the widest of its activations ("follow") or of all its inputs ("promote"), or a
#: simulated format by name.
Action = torch.dtype | str | None

#: Formats that run with real casts; all others are simulated.
NATIVE = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
PROMOTE = "promote"
HALF = ("bf16", "fp16")
#: Prefix of a pattern that names a whole operator.
OPERATOR = "op:"
WILDCARDS = "*?["

_KEYS = itertools.count(1)


class FormatRuling(NamedTuple):
    """The format of a site, and the rule that gave it.

    Attributes:
        format: "follow" and "promote" too; None as autocast's lists say.
        rule: its number, from 1; None where no rule names the site.
        pattern: its pattern; None where no rule names the site.
        whole: the rule is about an operator, at whichever site.
    """

    format: str | None
    rule: int | None
    pattern: str | None
    whole: bool = False


@dataclass(frozen=True)
class _Line:
    """One pattern of a rule.

    ``source`` is the pattern as the plan has it, ``pattern`` the same after classes were
    written out; ``rule`` is None for a line that stands for autocast's lists.
    """

    rule: int | None
    format: str
    pattern: str
    source: str

    @property
    def operator(self) -> str:
        """The operator that the pattern names, where it names one."""
        return self.pattern.removeprefix(OPERATOR)

    @property
    def names_operator(self) -> bool:
        """True for a pattern about an operator at whichever site."""
        return self.pattern.startswith(OPERATOR)


class Rules:
    """A plan resolved for a model on a device.

    Raises ``PlanError`` where a pattern names a module or class that the model does not
    have.

    Attributes:
        plan: the plan.
        device: type of the device.
        lists: type of the device whose built-in lists apply.
        forwards: forward passes of the whole model that belong to one batch; calls are
            counted over them.
        key: a number of its own, which compiled code guards on.
        lines: the patterns, in order of precedence.
        default: the format of sites that no rule names; None as autocast's lists say.
        dtype: of the ``torch.autocast`` region below; None: none.
        operators: what the dispatcher does for whole operators.
        sites: single sites have to be told apart; without it, no module is hooked.
        simulated: names of the formats that the device does not have.
        told: it was said which patterns named no site.
    """

    def __init__(
        self, plan: Plan, model: nn.Module | None, device: str, lists: str | None = None
    ) -> None:
        self.plan = plan
        self.device = device
        self.lists = lists or device
        self.forwards = plan.figures.forwards
        self.key = next(_KEYS)
        self.lines = list(_lines(plan, model))
        self.default = None if plan.autocast else parse_format(plan.default).name
        self.dtype = _base(plan, self.lines)
        _check_sites(self.lines, model)
        if plan.autocast and self.lists != device:
            self.lines += _list_lines(device, self.lists, plan.autocast)
        self.operators = self._operators() if plan.autocast else {}
        self.sites = self._names_sites()
        self.simulated = self._simulated()
        self.told = False
        self._decided: dict[str, FormatRuling] = {}

    def decide(self, site: str) -> FormatRuling:
        """Return the format of a site, and the rule that names it first."""
        decision = self._decided.get(site)
        if decision is None:
            decision = self._decided[site] = self._decide(site)
        return decision

    def _decide(self, site: str) -> FormatRuling:
        for line in self.lines:
            if matches(line.pattern, site):
                return FormatRuling(
                    line.format, line.rule, line.source, line.names_operator
                )
        return FormatRuling(self.default, None, None)

    def action(self, site: str, operator: str) -> Action:
        """Return what has to be done at a call beside what autocast and the dispatcher do."""
        decision = self.decide(site)
        if decision.format is None or (decision.whole and operator in self.operators):
            return None
        return self._action(operator, decision.format)

    @property
    def seen(self) -> bool:
        """True if any site was asked for yet."""
        return bool(self._decided)

    def unused(self) -> list[str]:
        """Return the patterns that named no site so far."""
        deciding = {decision.pattern for decision in self._decided.values()}
        candidates = [
            line
            for line in self.lines
            if line.rule is not None
            and line.source not in deciding
            and line.operator not in self.operators
        ]
        used = {line.source for line in candidates if self._names_any(line)}
        return sorted({line.source for line in candidates} - used)

    def _names_any(self, line: _Line) -> bool:
        """Return True if a line names a site that another one decides."""
        return any(matches(line.pattern, site) for site in self._decided)

    def _action(self, operator: str, fmt: str) -> Action:
        listing: AutocastClass = "follow"
        if self.dtype is not None:
            listing = autocast_class(operator, self.device)
        if fmt in (FOLLOW, PROMOTE):
            return None if listing == fmt else fmt
        dtype = NATIVE.get(fmt)
        if dtype is None:
            return fmt
        is_lowered = listing == "lower" and dtype == self.dtype
        is_kept = listing == "fp32" and fmt == "fp32"
        if self.dtype is not None and (is_lowered or is_kept):
            return None  # what autocast does anyway
        return dtype

    def _operators(self) -> dict[str, Action]:
        """Return the actions of the first line about each operator that torch has."""
        if not hasattr(torch.library, "get_kernel"):
            return {}
        actions: dict[str, Action] = {}
        for line in self.lines:
            is_known = line.names_operator and hasattr(torch.ops.aten, line.operator)
            if is_known and line.operator not in actions:
                actions[line.operator] = self._action(line.operator, line.format)
        return {name: action for name, action in actions.items() if action is not None}

    def _names_sites(self) -> bool:
        if self.dtype is None or self.default not in (None, "fp32"):
            return True
        return any(line.operator not in self.operators for line in self.lines)

    def _simulated(self) -> list[str]:
        formats = {line.format for line in self.lines} | {self.default or "fp32"}
        real = {*NATIVE, FOLLOW, PROMOTE}
        if self.device == "cuda":
            real.add("tf32")
        return sorted(formats - real)


def _lines(plan: Plan, model: nn.Module | None) -> Iterator[_Line]:
    for number, rule in enumerate(plan.rules, 1):
        fmt = rule.format if rule.format == FOLLOW else parse_format(rule.format).name
        for source in rule.sites:
            for pattern in _patterns(plan, rule, source, model):
                yield _Line(number, fmt, pattern, source)


def _patterns(
    plan: Plan, rule: Rule, source: str, model: nn.Module | None
) -> Sequence[str]:
    """Write out a pattern that names classes or whole modules of the model."""
    is_whole = source.startswith("class:") or "/" not in source
    if model is None or not is_whole:
        return (source,)
    alone = Plan((Rule(rule.format, (source,)),), autocast=plan.autocast)
    return alone.for_model(model).rules[0].sites


def _list_lines(device: str, lists: str, lower: str) -> list[_Line]:
    """Return a line for each operator whose place in the lists differs between two devices."""
    formats = {"fp32": "fp32", PROMOTE: PROMOTE, "follow": FOLLOW}
    source = f"the lists of {lists}"
    return [
        _Line(None, formats.get(listing, lower), f"{OPERATOR}{name}", source)
        for name, (_, listing) in autocast_differences(device, lists).items()
    ]


def _base(plan: Plan, lines: Sequence[_Line]) -> torch.dtype | None:
    """Return the dtype in which autocast casts and caches weights: the plan's own, else
    that of most of its patterns.
    """
    if plan.autocast:
        return NATIVE[plan.autocast]
    counts = Counter(line.format for line in lines if line.format in HALF)
    default = parse_format(plan.default).name
    if default in HALF:
        counts[default] += len(lines) + 1
    if not counts:
        return None
    ((most, _),) = counts.most_common(1)
    return NATIVE[most]


def _check_sites(lines: Sequence[_Line], model: nn.Module | None) -> None:
    """Check that patterns about sites have a model, and that exact names are paths of
    its modules.
    """
    local = [line for line in lines if not line.source.startswith((OPERATOR, "*"))]
    if model is None:
        if local:
            raise PlanError(
                f"rule {local[0].rule} of the plan names modules or calls, which need the model: {local[0].pattern}",
                where="plan",
                do="give the model too: roundoff.autocast(plan, model)",
            )
        return
    paths = {path for path, _ in model.named_modules()}
    for line in local:
        if line.source == line.pattern:
            _check_path(line, paths)


def _check_path(line: _Line, paths: set[str]) -> None:
    path, slash, _ = line.pattern.rpartition("/")
    name = path if slash else line.pattern
    if slash and path in paths:
        return
    if not _matches_a_path(name, bool(slash), paths):
        raise PlanError(
            f"rule {line.rule} of the plan names a site that this model has not: {line.pattern}",
            where="plan",
            expected=f"a module of the model, such as {examples(path or line.pattern, sorted(paths))}",
            got=path or line.pattern,
            do="make the plan from this model: roundoff tune WORKLOAD.py",
        )


def _matches_a_path(pattern: str, whole: bool, paths: set[str]) -> bool:
    """Return True if a glob can name a site of some module.

    ``pattern`` is the part before the slash (``whole``), or the beginning of a pattern.
    """
    if not any(character in pattern for character in WILDCARDS):
        return False
    shapes = ("{}",) if whole else ("{}", "{}/x", "{}.x", "{}.x/x")
    names = [shape.format(path) for path in paths for shape in shapes]
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)
