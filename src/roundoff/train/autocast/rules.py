"""Which rule of a plan decides at a site, and what has to be done there for it: the plan on one model and device."""

from __future__ import annotations

import fnmatch
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from roundoff.errors import PlanError, examples
from roundoff.formats import parse_format
from roundoff.ops import Listed, differences, listed
from roundoff.plan import FOLLOW, Plan, Rule
from roundoff.site import matches

#: What is done at a call: nothing, its inputs cast to a dtype (autocast switched off for it), to the widest of its
#: activations ("follow") or of all its inputs ("promote"), or a simulated format by name.
Action = torch.dtype | str | None

#: Formats that run with real casts; all others are simulated.
NATIVE = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

_KEYS = itertools.count(1)


class Decision(NamedTuple):
    """The format of a site (``follow`` and ``promote`` too, None as autocast's lists say) and the rule that gave it:
    its number, from 1, and pattern, None where no rule names the site; ``whole`` for a rule about an operator."""

    format: str | None
    rule: int | None
    pattern: str | None
    whole: bool = False


@dataclass(frozen=True)
class _Line:
    rule: int | None
    format: str
    pattern: str
    source: str  #: the pattern as the plan has it, before classes were written out


class Rules:
    """A plan resolved for a model on a device.

    ``dtype`` is the dtype of the ``torch.autocast`` region below (None: none), ``lists`` the device whose built-in lists
    apply, ``operators`` what the dispatcher does for whole operators, ``key`` a number of its own, which compiled code
    guards on. Raises ``PlanError`` where a pattern names a module or class that the model has not.
    """

    def __init__(
        self, plan: Plan, model: nn.Module | None, device: str, lists: str | None = None
    ) -> None:
        self.plan = plan
        self.device, self.lists = device, lists or device
        #: forward passes of the whole model that belong to one batch: calls are counted over them
        self.forwards = int(plan.about.get("forwards", 1))
        self.key = next(_KEYS)
        self.lines = list(_lines(plan, model))
        self.default = None if plan.autocast else parse_format(plan.default).name
        self.dtype = _base(plan, self.lines)
        self._check(model)
        if plan.autocast and self.lists != device:
            self.lines += [
                _Line(
                    None,
                    _FORMAT.get(theirs) or plan.autocast,
                    f"op:{name}",
                    f"the lists of {self.lists}",
                )
                for name, (_, theirs) in differences(device, self.lists).items()
            ]
        self.operators: dict[str, Action] = {}
        if plan.autocast and hasattr(torch.library, "get_kernel"):
            for line in self.lines:
                name = line.pattern.removeprefix("op:")
                if (
                    line.pattern.startswith("op:")
                    and name not in self.operators
                    and hasattr(torch.ops.aten, name)
                ):
                    self.operators[name] = self._action(name, line.format)
        self.operators = {
            name: action
            for name, action in self.operators.items()
            if action is not None
        }
        named = [
            line
            for line in self.lines
            if line.pattern.removeprefix("op:") not in self.operators
        ]
        #: whether single sites have to be told apart: without it, no module is hooked
        self.sites = (
            self.default is not None
            and self.default != "fp32"
            or bool(named)
            or self.dtype is None
        )
        real = {*NATIVE, FOLLOW, "promote", *(("tf32",) if device == "cuda" else ())}
        self.simulated = sorted(
            ({x.format for x in self.lines} | {self.default or "fp32"}) - real
        )
        self._decided: dict[str, Decision] = {}
        self.told = False  # which patterns named no site

    def decide(self, site: str) -> Decision:
        """Which rule names a site first, and the format it gets."""
        found = self._decided.get(site)
        if found is None:
            line = next((x for x in self.lines if matches(x.pattern, site)), None)
            if line is None:
                found = Decision(self.default, None, None)
            else:
                found = Decision(
                    line.format, line.rule, line.source, line.pattern.startswith("op:")
                )
            self._decided[site] = found
        return found

    def action(self, site: str, operator: str) -> Action:
        """What has to be done at a call beside what autocast and the dispatcher do."""
        decision = self.decide(site)
        if decision.format is None or (decision.whole and operator in self.operators):
            return None
        return self._action(operator, decision.format)

    @property
    def seen(self) -> bool:
        """Whether any site was asked for yet."""
        return bool(self._decided)

    def unused(self) -> list[str]:
        """The patterns that named no site so far."""
        used = {d.pattern for d in self._decided.values()}
        left = [
            x
            for x in self.lines
            if x.rule is not None
            and x.source not in used
            and x.pattern[3:] not in self.operators
        ]
        used |= {
            x.source
            for x in left
            if any(matches(x.pattern, site) for site in self._decided)
        }
        return sorted({x.source for x in left} - used)

    def _action(self, operator: str, name: str) -> Action:
        here: Listed = (
            listed(operator, self.device) if self.dtype is not None else "follow"
        )
        if name in (FOLLOW, "promote"):
            return None if here == name else name
        dtype = NATIVE.get(name)
        if dtype is None:
            return name
        if self.dtype is not None and (
            (here == "lower" and dtype == self.dtype)
            or (here == "fp32" and name == "fp32")
        ):
            return None  # what autocast does anyway
        return dtype

    def _check(self, model: nn.Module | None) -> None:
        """Patterns need the model, and exact names have to be paths of its modules."""
        local = [x for x in self.lines if not x.source.startswith(("op:", "*"))]
        if model is None:
            if local:
                raise PlanError(
                    f"rule {local[0].rule} of the plan names modules or calls, which need the model: {local[0].pattern}",
                    where="plan",
                    do="give the model too: roundoff.autocast(plan, model)",
                )
            return
        paths = {path for path, _ in model.named_modules()}
        for line in (x for x in local if x.source == x.pattern):
            path, slash, _ = line.pattern.rpartition("/")
            known = (slash and path in paths) or _matches_a_path(
                path if slash else line.pattern, bool(slash), paths
            )
            if not known:
                near = examples(path or line.pattern, sorted(paths))
                raise PlanError(
                    f"rule {line.rule} of the plan names a site that this model has not: {line.pattern}",
                    where="plan",
                    expected=f"a module of the model, such as {near}",
                    got=path or line.pattern,
                    do="make the plan from this model: roundoff tune WORKLOAD.py",
                )


_FORMAT: dict[str, str] = {"fp32": "fp32", "promote": "promote", "follow": FOLLOW}


def _named(name: str) -> str:
    return name if name == FOLLOW else parse_format(name).name


def _lines(plan: Plan, model: nn.Module | None) -> Iterator[_Line]:
    for number, rule in enumerate(plan.rules, 1):
        for source in rule.sites:
            patterns: tuple[str, ...] = (source,)
            if model is not None and (source.startswith("class:") or "/" not in source):
                patterns = (
                    Plan((Rule(rule.format, (source,)),), autocast=plan.autocast)
                    .for_model(model)
                    .rules[0]
                    .sites
                )
            yield from (
                _Line(number, _named(rule.format), pattern, source)
                for pattern in patterns
            )


def _base(plan: Plan, lines: list[_Line]) -> torch.dtype | None:
    """The dtype in which autocast casts and caches weights: the plan's own, else that of most of its patterns."""
    if plan.autocast:
        return NATIVE[plan.autocast]
    counts = Counter(x.format for x in lines if x.format in ("bf16", "fp16"))
    default = parse_format(plan.default).name
    if default in ("bf16", "fp16"):
        counts[default] += len(lines) + 1
    return NATIVE[counts.most_common(1)[0][0]] if counts else None


def _matches_a_path(pattern: str, whole: bool, paths: set[str]) -> bool:
    """Whether a glob can name a site of some module: its part before the slash, or the beginning of a whole pattern."""
    if not any(c in pattern for c in "*?["):
        return False
    if whole:
        return any(fnmatch.fnmatchcase(path, pattern) for path in paths)
    shapes = ("{}", "{}/x", "{}.x", "{}.x/x")
    return any(
        fnmatch.fnmatchcase(shape.format(path), pattern)
        for path in paths
        for shape in shapes
    )
