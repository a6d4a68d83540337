"""Run an unmodified training script under ``roundoff.capture``: a step ends with the optimizer's step."""

from __future__ import annotations

import functools
import gc
import math
import os
import runpy
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from roundoff.capture.session import Capture
from roundoff.errors import RunError


class ScriptError(RunError):
    """The script itself raised; its own traceback has been printed."""


class _Recorded(BaseException):
    """Ends the script once the steps are recorded; not an ``Exception``, so that no handler of the script's takes it."""


def capture_script(command: Sequence[str], path: str | os.PathLike[str], *, stop: bool = False, whole: bool = False,
                   of: str | None = None, **options: Any) -> Capture:  # fmt: skip
    """Run ``command`` (a script and its arguments, or ``-m`` and a module) and record its steps into ``path``.

    A step ends when every optimizer that the script has made has stepped, or one of them twice; with a ``GradScaler``,
    when that is updated then, also where it skipped the optimizer. What runs after the last step's end, an evaluation, is
    no step. ``stop`` ends the script after the last chosen step; ``whole`` takes the whole script for one step. ``of`` is
    the id of the run that this one repeats. ``options`` are those of ``Capture``. Raises ``ScriptError`` after a script
    that failed or was interrupted, and ``RunError`` where no step ended or the recording stopped; what was recorded by
    then is kept.
    """
    words = list(command)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    _check(words, command)
    run = Capture(Path(path).absolute(), command=words, **options)  # absolute: the script may change the directory
    run.of = of
    ended: list[int] = []
    with run, _steps_of(run, stop, whole, ended), _as_main(words):
        try:
            if words[0] == "-m":
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        except _Recorded:
            pass
        except KeyboardInterrupt as error:
            raise _failure("the script was interrupted", words, run, None) from error
        except SystemExit as error:
            if error.code not in (None, 0):
                raise _failure("the script failed", words, run, f"exit code {error.code}") from error
        except BaseException as error:
            traceback.print_exception(error.with_traceback(_below(error)))
            raise _failure("the script failed", words, run, type(error).__name__) from error
    # What the script has left is freed while Python runs: a thread of a process group that frees a tensor which Python
    # knows, after Python has ended, aborts the process.
    gc.collect()
    if run.stopped is not None:
        raise RunError("the recording stopped before its end, the script did not", where=str(run.path), got=run.stopped,
                       do=_saved(run))  # fmt: skip
    if not ended and not whole:
        raise RunError("no step ended in this script, so all of it was recorded as one", where=" ".join(words),
                       expected="a torch.optim optimizer that steps",
                       do="give --whole for a script without training")  # fmt: skip
    return run


def _check(words: list[str], command: Sequence[str]) -> None:
    said = " ".join(command)
    name = Path(words[0]).name if words else ""
    module = words[1] if words[:1] == ["-m"] and len(words) > 1 else ""
    if name in ("torchrun", "accelerate", "deepspeed") or module.startswith(("torch.distributed.", "accelerate.commands")):
        raise RunError("a launcher's processes are not recorded from outside", where=said,
                       expected="the launcher around roundoff, so that each process records its own part",
                       do="torchrun --nproc-per-node 2 -m roundoff capture -o runs/a -- train.py --epochs 1")  # fmt: skip
    if not words or (words[0] == "-m" and not module) or (words[0] != "-m" and not Path(words[0]).is_file()):
        raise RunError("no script to run", expected="a Python file and its arguments, or -m and a module, after --",
                       got=said or "nothing", do="roundoff capture -o runs/a -- train.py --epochs 1")  # fmt: skip


def _failure(what: str, words: list[str], run: Capture, got: str | None) -> ScriptError:
    return ScriptError(what, where=" ".join(words), got=got, do=_saved(run))


def _saved(run: Capture) -> str:
    if not run.recorded:
        return "nothing was recorded by then"
    return f"{run.recorded} step{'s' * (run.recorded != 1)} recorded by then can be read: roundoff show {run.path}"


class _Ends:
    """Finds the ends of steps from the optimizers that are made and that step."""

    def __init__(self, end: Callable[..., None]) -> None:
        self.end = end
        self.made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.scaled = False  # a GradScaler is in use: the step is over when it has been updated
        self.twice = False
        self.rate = math.nan

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has stepped, or its scaler has skipped it."""
        self.twice |= optimizer in self.stepped
        self.made.add(optimizer)
        self.stepped.add(optimizer)
        self.rate = float(optimizer.param_groups[0]["lr"])
        if not self.scaled:
            self.look()

    def look(self, **scalars: float) -> None:
        """End the step if it is over."""
        if self.twice:  # the others may never step
            for other in [o for o in self.made if o not in self.stepped]:
                self.made.discard(other)
        if self.stepped and all(o in self.stepped for o in self.made):
            self.stepped.clear()
            self.twice = False
            self.end(lr=self.rate, **scalars)


@contextmanager
def _steps_of(run: Capture, stop: bool, whole: bool, ended: list[int]) -> Iterator[None]:
    """Calls ``run.step()`` where a step ends, and appends the step's number to ``ended``."""
    if whole:
        yield
        return

    def end(**scalars: float) -> None:
        ended.append(run.number)
        run.step(**scalars)
        if stop and run.done:
            raise _Recorded

    ends = _Ends(end)
    init, scaler = torch.optim.Optimizer.__init__, torch.amp.GradScaler
    scale, step, update = scaler.scale, scaler.step, scaler.update

    @functools.wraps(init)
    def after_init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        init(optimizer, *args, **kwargs)
        ends.made.add(optimizer)

    @functools.wraps(scale)
    def before_scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        ends.scaled |= self.is_enabled()
        return scale(self, *args, **kwargs)

    @functools.wraps(step)
    def after_scaled_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, optimizer, *args, **kwargs)
        if self.is_enabled() and optimizer not in ends.stepped:
            ends.step(optimizer)
        return result

    @functools.wraps(update)
    def after_update(self: Any, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        if self.is_enabled():
            ends.look(loss_scale=float(self.get_scale()))

    hook = register_optimizer_step_post_hook(lambda optimizer, *_: ends.step(optimizer))
    patches: tuple[tuple[Any, str, Any, Any], ...] = (
        (torch.optim.Optimizer, "__init__", init, after_init), (scaler, "scale", scale, before_scale),
        (scaler, "step", step, after_scaled_step), (scaler, "update", update, after_update),
    )  # fmt: skip
    try:
        for owner, name, _, ours in patches:
            setattr(owner, name, ours)
        yield
    finally:
        for owner, name, theirs, _ in patches:
            setattr(owner, name, theirs)
        hook.remove()


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
    """The traceback from the script's own first frame on; None for a script that does not parse."""
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__ or "runpy" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    return trace
