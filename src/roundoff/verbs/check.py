"""``roundoff.check``: are these two runs comparable?"""

from __future__ import annotations

import os
from collections.abc import Sequence

from roundoff.check import (
    Check,
    CheckpointCheck,
    check_checkpoints,
    check_runs,
    is_checkpoint,
)
from roundoff.compare import recorded_beside
from roundoff.errors import RunError
from roundoff.files import as_path, is_url
from roundoff.record import Run, as_run

Place = Run | str | os.PathLike[str]


def check(
    reference: Place, candidate: Place, *, repeats: Sequence[Place] = ()
) -> Check | CheckpointCheck:
    """Say how two recorded programs were set up otherwise, the likeliest cause first;
    or which tensors of two checkpoints differ.

    The checklist that engineers go through by hand: seeds, data, initial weights,
    hyper-parameters, training flow, mixed precision, environment, and whether the
    losses differ by more than repeats do. Recordings of every level and mode do.

    A checkpoint is a file of safetensors or torch (tensors alone are read), a folder of
    them as Hugging Face writes it, or a folder of Megatron's.

    Args:
        reference: the run to trust, or its folder or URL; or a checkpoint.
        candidate: the other one.
        repeats: recordings of the reference's program, unchanged; those that
            ``capture --repeats`` left beside it are found.

    Raises ``RunError`` where a run or checkpoint cannot be read, where the two have no
    rank in common, and where only one is a checkpoint.

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
    kinds = [_is_checkpoint(place) for place in (reference, candidate)]
    if kinds[0] != kinds[1]:
        raise RunError(
            "a run and a checkpoint cannot be checked against each other",
            where=f"{reference} and {candidate}",
            expected="two runs, or two checkpoints",
        )
    if kinds[0]:
        return check_checkpoints(os.fspath(reference), os.fspath(candidate))  # type: ignore[arg-type]
    ours = as_run(reference)
    again = [as_run(each) for each in repeats] or recorded_beside(ours).repeat
    return check_runs(ours, as_run(candidate), repeats=again)


def _is_checkpoint(place: Place) -> bool:
    if isinstance(place, Run) or is_url(place):
        return False
    return is_checkpoint(as_path(place, "run", "a run, or the folder of one"))
