"""``roundoff.check``: are these two runs comparable?"""

from __future__ import annotations

import os
from collections.abc import Sequence

from roundoff.check import Check, check_runs
from roundoff.compare import recorded_beside
from roundoff.record import Run, as_run

Place = Run | str | os.PathLike[str]


def check(
    reference: Place, candidate: Place, *, repeats: Sequence[Place] = ()
) -> Check:
    """Say how two recorded programs were set up otherwise, the likeliest cause first.

    The checklist that engineers go through by hand: seeds, data, initial weights,
    hyper-parameters, training flow, mixed precision, environment, and whether the
    losses differ by more than repeats do. Recordings of every level and mode do.

    Args:
        reference: the run to trust, or its folder or URL.
        candidate: the other one.
        repeats: recordings of the reference's program, unchanged; those that
            ``capture --repeats`` left beside it are found.

    Raises ``RunError`` where a run cannot be read, and where the two have no rank in
    common.

    Example:
        >>> import roundoff, tempfile, torch
        >>> folder = tempfile.TemporaryDirectory()
        >>> for name, rate in (("a", 0.1), ("b", 0.2)):
        ...     _ = torch.manual_seed(0)
        ...     model = torch.nn.Linear(2, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        ...     with roundoff.capture(f"{folder.name}/{name}", model) as run:
        ...         model(torch.ones(4, 2)).mean().backward()
        ...         optimizer.step()
        ...         run.step()
        >>> found = roundoff.check(f"{folder.name}/a", f"{folder.name}/b")
        >>> found.differences[0].text
        'the learning rate is 0.2 in b, 0.1 in a'
        >>> folder.cleanup()
    """
    ours = as_run(reference)
    again = [as_run(each) for each in repeats] or recorded_beside(ours).repeat
    return check_runs(ours, as_run(candidate), repeats=again)
