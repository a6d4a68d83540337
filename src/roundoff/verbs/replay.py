"""``roundoff.replay``: recorded operators again, from their stored inputs."""

from __future__ import annotations

import os

from roundoff.record import Replay, Run, as_run, replay_run


def replay(
    run: Run | str | os.PathLike[str],
    *,
    site: str | None = None,
    phase: str | None = None,
    device: str = "cpu",
    dtype: str = "fp64",
    rank: int = 0,
    step: int | None = None,
) -> Replay:
    """Run each recorded call once more on its inputs, against the recorded result.

    The rows have ``own_l2`` and ``own_max`` of |recorded - again|, ``sqnr_db``, or the
    ``reason`` why a call could not run again.

    Args:
        run: a run recorded with its tensors, or its folder or URL.
        site: a pattern of site names, ``encoder.*/softmax``; all of them when None.
        phase: ``forward``, ``backward`` or ``optimizer``; all of them when None.
        device: where to run.
        dtype: the format to run in: ``fp64``, ``fp32``, ``bf16``, ...; ``same`` for
            each tensor's own, such as to compare two devices.
        rank: of a run of several processes.
        step: all of them when None.

    Raises:
        RunError: no run is there, nothing is recorded for the rank, step or phase, no
            tensors are kept, or the device or format cannot be run here.
        PatternError: the pattern matches no site.
        FormatError: ``dtype`` is not the name of a format.

    Example:
        >>> import tempfile, torch, roundoff
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with roundoff.capture(folder + "/run", keep="tensors"):
        ...         result = torch.ones(3).exp()
        ...     row = roundoff.replay(folder + "/run").rows[-1]
        >>> row.site, row.reason, 130 < row.sqnr_db < 160
        ('/exp', None, True)
    """
    return replay_run(
        as_run(run),
        site=site,
        phase=phase,
        device=device,
        dtype=dtype,
        rank=rank,
        step=step,
    )
