"""Run an unmodified training script under ``roundoff.capture``: a step ends with the
optimizer's step.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from roundoff.errors import RunError
from roundoff.record.program import ScriptError as ScriptError
from roundoff.record.program import StopScript, run_program, words_of
from roundoff.record.session import Capture
from roundoff.record.step_boundaries import StepBoundaries, watch_steps


def capture_script(
    command: Sequence[str],
    path: str | os.PathLike[str],
    *,
    stop: bool = False,
    whole: bool = False,
    of: str | None = None,
    **options: Any,
) -> Capture:
    """Run ``command`` and record its steps into ``path``.

    A step ends when every optimizer that the script has made has stepped, or one of
    them twice; with a ``GradScaler``, when that is updated then, also where it skipped
    the optimizer. What runs after the last step's end, an evaluation, is no step.

    Args:
        command: a script and its arguments, or ``-m`` and a module.
        path: the folder of the run.
        stop: end the script after the last chosen step.
        whole: take the whole script for one step.
        of: the id of the run that this one repeats.
        options: those of ``Capture``.

    Raises ``ScriptError`` after a script that failed or was interrupted, and
    ``RunError`` where no step ended or the recording stopped; what was recorded by then
    is kept.
    """
    words = words_of(command, "capture -o runs/a")
    # absolute: the script may change the directory
    run = Capture(Path(path).absolute(), command=words, **options)
    run.of = of
    ended: list[int] = []

    def end_step(**scalars: float) -> None:
        ended.append(run.number)
        run.step(**scalars)
        if stop and run.done:
            raise StopScript

    ends = StepBoundaries(end_step, run.ours)
    boundaries = nullcontext() if whole else watch_steps(ends)
    with run, boundaries:
        run_program(words, lambda: _saved(run))
    # What the script has left is freed while Python runs: a thread of a process group
    # that frees a tensor which Python knows, after Python has ended, aborts the process.
    gc.collect()
    if run.stopped is not None:
        raise RunError(
            "the recording stopped before its end, the script did not",
            where=str(run.path),
            got=run.stopped,
            do=_saved(run),
        )
    if not ended and not whole:
        run.writer.fail()
        raise RunError(
            "no step ended in this script, so all of it was recorded as one",
            where=" ".join(words),
            expected="a torch.optim optimizer that steps",
            do="give --whole for a script without training",
        )
    return run


def _saved(run: Capture) -> str:
    if not run.recorded:
        return "nothing was recorded by then"
    steps = "1 step" if run.recorded == 1 else f"{run.recorded} steps"
    return f"{steps} recorded by then can be read: roundoff show {run.path}"
