"""Which sites of a plan its noise comes from, measured around the plan itself.

A site that stays unrounded while the rest of the plan runs takes its share of the noise
away. Where errors change a decision, that says more than any derivative, and more than
rounding the site alone: the decision changes by all errors together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: Groups of sites at the start.
GROUPS = 4
#: Runs of a plan at most.
PASSES = 24
#: A smaller share of the noise is nobody's.
LEAST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Blame:
    """Sites of a plan, and the noise power that goes when they are not rounded."""

    sites: tuple[str, ...]
    noise: float


def blamed(
    formats: Mapping[str, str],
    noise: float,
    noise_of: Callable[[dict[str, str]], float],
) -> list[Blame]:
    """Return the sites that the noise of a plan comes from.

    Groups are left unrounded in turn, and halved where the noise falls by a tenth or
    more. The shares of sites that do something together only may add up to more than
    the whole. What is left after 24 runs stays a group.

    Args:
        formats: the plan, site to format.
        noise: what it costs.
        noise_of: runs a choice of formats, and returns its noise.
    """
    sites = list(formats)
    waiting = _divided(sites, GROUPS)
    passes = PASSES
    blames: list[Blame] = []
    while waiting and passes > 0:
        group = waiting.pop(0)
        passes -= 1
        others = {site: fmt for site, fmt in formats.items() if site not in group}
        share = noise - noise_of(others)
        if not share > LEAST_SHARE * noise:
            continue
        if len(group) == 1 or passes < len(waiting) + 2:
            blames.append(Blame(tuple(group), share))
        else:
            waiting += _divided(group, 2)
    return blames


def _divided(sites: Sequence[str], parts: int) -> list[Sequence[str]]:
    """Return neighbours in groups of like size, none empty."""
    size = max(1, -(-len(sites) // parts))
    return [sites[start : start + size] for start in range(0, len(sites), size)]
