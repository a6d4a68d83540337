"""``roundoff.overflow``: where NaN and Inf were born, how near values are to overflow."""

from __future__ import annotations

import os
from collections.abc import Sequence

from roundoff.compare import Overflow, trace_overflow
from roundoff.record import Run, as_run, select_steps


def overflow(
    run: Run | str | os.PathLike[str],
    *,
    within: float = 3.0,
    formats: Sequence[str] = ("fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2"),
    allow: Sequence[str] = (),
    loss_format: str = "fp16",
    margin: float = 1.0,
    rank: int | None = None,
    step: int | None = None,
) -> Overflow:
    """Follow every NaN and Inf of a run, and measure how near its values are to the
    ends of formats.

    Args:
        run: a run, or its folder or URL.
        within: list sites within this many powers of two of overflow.
        formats: what each of these formats would lose.
        allow: patterns of sites whose NaN and Inf are meant.
        loss_format: format of the gradients, for the loss scale.
        margin: powers of two that the loss scale leaves free.
        rank: only this rank.
        step: only this step.

    Raises:
        RunError: no run is there, or it has no such rank or step.
        FormatError: a format is unknown, or only used with a scale.

    Example:
        >>> import tempfile, torch, roundoff
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with roundoff.capture(folder + "/run"):
        ...         result = torch.tensor([1.0, 100.0]).exp()
        ...     answer = roundoff.overflow(folder + "/run")
        >>> answer.first.site, answer.first.posinf
        ('/exp', 1)
    """
    recorded = as_run(run)
    return trace_overflow(
        select_steps(recorded.ops, rank, step),
        recorded.scalars,
        within=within,
        formats=formats,
        allow=allow,
        loss_format=loss_format,
        margin=margin,
    )
