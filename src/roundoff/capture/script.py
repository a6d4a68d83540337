"""Run an unmodified training script under ``roundoff.capture``: a step ends with the optimizer's step."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from roundoff.capture.session import Capture
from roundoff.errors import RoundoffError, RunError


class ScriptError(RunError):
    """The script itself raised; its own traceback has been printed."""


class _Recorded(BaseException):
    """Ends the script once the steps are recorded; not an ``Exception``, so that no handler of the script's takes it."""


def capture_script(command: Sequence[str], path: str | os.PathLike[str], *, stop: bool = False, whole: bool = False,
                   **options: Any) -> Capture:  # fmt: skip
    """Run ``command`` (a script and its arguments, or ``-m`` and a module) and record its steps into ``path``.

    A step ends when the first optimizer that steps has stepped, or when a ``GradScaler`` has been updated, which it is
    also where it skipped the optimizer. ``stop`` ends the script after the last chosen step; ``whole`` takes the whole
    script for one step. ``options`` are those of ``Capture``. Raises ``ScriptError`` after a script that failed, and
    ``RunError`` where no step ended; what was recorded by then is kept.
    """
    words = list(command)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    if not words or (words[0] != "-m" and not Path(words[0]).is_file()) or words == ["-m"]:
        raise RunError("no script to run", expected="a Python file and its arguments, or -m and a module, after --",
                       got=" ".join(command) or "nothing", do="roundoff capture -o runs/a -- train.py --epochs 1")  # fmt: skip
    run = Capture(path, command=words, **options)
    failed: BaseException | None = None
    with run, _steps_of(run, stop, whole) as ended, _as_main(words):
        try:
            if words[0] == "-m":
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        except _Recorded:
            pass
        except (KeyboardInterrupt, RoundoffError):
            raise
        except SystemExit as error:
            failed = error if error.code not in (None, 0) else None
        except BaseException as error:  # whatever it was, it is the script's, and is shown as Python would
            traceback.print_exception(error.with_traceback(_below(error)))
            failed = error
    if failed is not None:
        code = failed.code if isinstance(failed, SystemExit) else type(failed).__name__
        raise ScriptError("the script failed", where=" ".join(words), got=str(code),
                          do=f"{run.recorded} steps were recorded before, in {run.path}") from failed  # fmt: skip
    if not ended and not whole and run.stopped is None:
        raise RunError("no step ended in this script, so all of it was recorded as one", where=" ".join(words),
                       expected="a torch.optim optimizer that steps", do="give --whole for a script without training")  # fmt: skip
    return run


@contextmanager
def _steps_of(run: Capture, stop: bool, whole: bool) -> Iterator[list[int]]:
    """Calls ``run.step()`` where a step ends."""
    ended: list[int] = []
    first: list[int] = []
    scaled: list[bool] = []
    update = torch.amp.GradScaler.update

    def end(**scalars: float) -> None:
        ended.append(run.number)
        run.step(**scalars)
        if stop and run.done:
            raise _Recorded

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        first[:] = first or [id(optimizer)]
        if not scaled and id(optimizer) == first[0]:
            end(lr=float(optimizer.param_groups[0]["lr"]))

    def after_update(scaler: Any, *args: Any, **kwargs: Any) -> None:
        update(scaler, *args, **kwargs)
        if scaler.is_enabled():
            if not scaled and ended:  # the first step has been ended by its optimizer already
                scaled.append(True)
                return
            scaled[:] = [True]
            end(loss_scale=float(scaler.get_scale()))

    handle = None
    if not whole:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        handle = register_optimizer_step_post_hook(after_step)
        torch.amp.GradScaler.update = after_update  # type: ignore[method-assign]
    try:
        yield ended
    finally:
        torch.amp.GradScaler.update = update  # type: ignore[method-assign]
        if handle is not None:
            handle.remove()


@contextmanager
def _as_main(words: list[str]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as ``python words...`` would set them."""
    argv, path = sys.argv, list(sys.path)
    main = sys.modules.get("__main__")
    sys.argv = words[1:] if words[0] == "-m" else words
    sys.path.insert(0, os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        if main is not None:
            sys.modules["__main__"] = main


def _below(error: BaseException) -> Any:
    """The traceback from the script's own first frame on."""
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__ or "runpy" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    return trace or error.__traceback__
