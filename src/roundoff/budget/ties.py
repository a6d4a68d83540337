"""Which sites must share a format: by what they read and write, and by their operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from roundoff.errors import PlanError, did_you_mean, nearest
from roundoff.ops import operator_names, translate
from roundoff.plan import Plan, Rule

if TYPE_CHECKING:
    from roundoff.budget.facts import MeasuredSite

#: Each site for itself, unless it shares a parameter.
SITE = "site"
#: All calls of one operator.
OPERATOR = "operator"
#: What may be tied: sites alone, operators here, or the operator types of another tool,
#: where several operators here may be one.
TIES = (SITE, OPERATOR, "ascend", "paddle", "tensorflow")


def check_tie(tie: str) -> None:
    """Raise ``PlanError`` for what cannot be tied."""
    if tie not in TIES:
        raise PlanError(
            "no such tie",
            where="tie",
            expected=", ".join(TIES),
            got=repr(tie),
            do=did_you_mean(nearest(tie, TIES, at_most=1)),
        )


def groups_of(sites: Sequence[MeasuredSite], tie: str = SITE) -> dict[str, list[str]]:
    """Group sites that share a parameter, write into one tensor, or are tied by type.

    Each group goes by the name of its first site. A site without a path to the target
    is tied to none by type: it would keep all others in the reference format.
    """
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for site in sites:
        # no site has a name that starts with a NUL
        shared = ["\0parameter " + parameter for parameter in site.params]
        types: list[str] = []
        if site.no_path is None:
            types = ["\0type " + name for name in types_of(site.operator, tie)]
        for other in (*shared, *types, *site.tied):
            parent[root(other)] = root(site.site)
    groups: dict[str, list[str]] = {}
    for site in sites:
        groups.setdefault(root(site.site), []).append(site.site)
    return {group[0]: group for group in groups.values()}


def types_of(operator: str, tie: str) -> tuple[str, ...]:
    """Return the names by which an operator is tied to others; none for ``site``.

    An operator without a name in the tool is a type of its own.

    >>> types_of("softmax", "site"), types_of("softmax", "operator")
    ((), ('softmax',))
    >>> types_of("conv1d", "ascend"), types_of("embedding_bag", "tensorflow")
    (('Conv2D', 'Conv2DV2'), ('embedding_bag',))
    """
    if tie == SITE:
        return ()
    if tie == OPERATOR or operator not in operator_names("torch"):
        return (operator,)
    return translate(operator, "torch", tie) or (operator,)


def plan_by_operator(
    sites: Iterable[MeasuredSite],
    chosen: Mapping[str, str],
    about: Mapping[str, object],
) -> Plan:
    """Return the plan whose rules name every operator, those in fp32 too.

    The sites that no path leads from run as their operator does; ``about`` lists them
    under ``unmeasured`` where that is not fp32.
    """
    sites = list(sites)
    formats: dict[str, str] = {}
    for site in sites:
        if site.no_path is None:
            formats[site.operator] = chosen.get(site.site, "fp32")
    rules: dict[str, list[str]] = {}
    for operator in dict.fromkeys(site.operator for site in sites):
        name = formats.get(operator, "fp32")
        rules.setdefault(name, []).append(f"op:{operator}")
    unmeasured = {
        site.site: site.no_path
        for site in sites
        if site.no_path is not None and formats.get(site.operator, "fp32") != "fp32"
    }
    return Plan(
        tuple(Rule(name, tuple(patterns)) for name, patterns in sorted(rules.items())),
        "fp32",
        {**about, **({"unmeasured": unmeasured} if unmeasured else {})},
    )
