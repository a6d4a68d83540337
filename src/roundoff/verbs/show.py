"""``roundoff.show``: what a run recorded, site by site."""

from __future__ import annotations

import os

from roundoff.record import Run, SiteDetails, SiteTable, as_run, describe_sites


def show(
    run: Run | str | os.PathLike[str],
    site: str | None = None,
    *,
    phase: str | None = None,
    sort: str = "order",
    rank: int | None = None,
    step: int | None = None,
    views: bool = False,
) -> SiteTable | SiteDetails:
    """Describe one step of a run: a row for each site, or one site in full.

    Args:
        run: a run, or its folder or URL.
        site: a site, a parameter's name, or a glob over both. What is one site is
            described in full: statistics, histogram, source line, inputs, users.
        phase: ``forward``, ``backward``, ``optimizer`` or ``collective``; all when
            None.
        sort: ``order`` of execution, or largest first: ``nan``, ``inf``, ``max``,
            ``mean``, ``l2``, ``std``, ``zero``, ``subnormal``, ``size``, ``own``.
        rank: by default the first.
        step: by default the last.
        views: list views of tensors too.

    Raises:
        RunError: no run is there, or it has no such rank or step.
        PatternError: an unknown site, phase or sort key.

    Example:
        >>> import tempfile, torch, roundoff
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with roundoff.capture(folder + "/run"):
        ...         result = torch.ones(3).exp()
        ...     table = roundoff.show(folder + "/run")
        >>> [(row.site, row.shape) for row in table.rows]
        [('/ones', [3]), ('/exp', [3])]
    """
    return describe_sites(
        as_run(run).ops,
        site,
        phase=phase,
        rank=rank,
        step=step,
        sort=sort,
        views=views,
    )
