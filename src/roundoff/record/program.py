"""Run a script in this process as ``python`` would run it, for the verbs that look at
an unmodified one."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roundoff.errors import RunError, wrong_type


class ScriptError(RunError):
    """The script itself raised; its own traceback has been printed."""


class StopScript(BaseException):
    """Ends the script before its end; not an ``Exception``, so that no handler of the
    script's takes it."""


def words_of(command: Sequence[str], verb: str) -> list[str]:
    """Return ``command`` without a leading ``python``.

    ``verb`` is what an error shows behind ``roundoff``. Raises ``RunError`` where it is
    no script, or a launcher of several processes.
    """
    if isinstance(command, str) or not isinstance(command, Sequence):
        raise wrong_type(
            "command", command, 'a script and its arguments: ["train.py", "--lr", "3"]'
        )
    words = list(command)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    text = " ".join(command)
    if _is_launcher(words):
        raise RunError(
            "a launcher's processes are not seen from outside",
            where=text,
            expected="the launcher around roundoff, so that each process looks at its "
            "own part",
            do=f"torchrun --nproc-per-node 2 -m roundoff {verb} -- train.py --epochs 1",
        )
    if not _is_program(words):
        raise RunError(
            "no script to run",
            expected="a Python file and its arguments, or -m and a module, after --",
            got=text or "nothing",
            do=f"roundoff {verb} -- train.py --epochs 1",
        )
    return words


def _module(words: Sequence[str]) -> str:
    """Return the module behind a leading ``-m``, "" where there is none."""
    return words[1] if words[:1] == ["-m"] and len(words) > 1 else ""


def _is_launcher(words: list[str]) -> bool:
    name = Path(words[0]).name if words else ""
    if name in ("torchrun", "accelerate", "deepspeed"):
        return True
    return _module(words).startswith(("torch.distributed.", "accelerate.commands"))


def _is_program(words: list[str]) -> bool:
    if not words:
        return False
    if words[0] == "-m":
        return bool(_module(words))
    return Path(words[0]).is_file()


def run_program(words: list[str], saved: Callable[[], str]) -> None:
    """Run it as ``__main__``, to its end or until something raises ``StopScript``.

    Raises ``ScriptError`` after a script that failed or was interrupted, caused by what
    it raised; ``saved`` then says what there is nevertheless.
    """

    def failure(problem: str, got: str | None) -> ScriptError:
        return ScriptError(problem, where=" ".join(words), got=got, do=saved())

    with _as_main(words):
        try:
            if words[0] == "-m":
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
        except StopScript:
            pass
        except KeyboardInterrupt as error:
            raise failure("the script was interrupted", None) from error
        except SystemExit as error:
            if error.code not in (None, 0):
                raise failure("the script failed", f"exit code {error.code}") from error
        except BaseException as error:
            _show(error.with_traceback(_below(error)))
            raise failure("the script failed", type(error).__name__) from error


def _show(error: BaseException) -> None:
    """Print what a script raised, or give it to the hook that the script has set for that."""
    if sys.excepthook is sys.__excepthook__:
        traceback.print_exception(error)
        return
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:  # noqa: BLE001 - a hook is the script's own; Python prints both then too
        traceback.print_exc()


@contextmanager
def _as_main(words: list[str]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as ``python words...`` would set them."""
    argv = sys.argv
    path = list(sys.path)
    main = sys.modules.get("__main__")
    if words[0] == "-m":
        sys.argv = words[1:]
        folder = os.getcwd()
    else:
        sys.argv = words
        folder = str(Path(words[0]).resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path
        if main is not None:
            sys.modules["__main__"] = main


def _below(error: BaseException) -> Any:
    """Return the traceback from the script's first frame on; None for a script that
    does not parse.
    """
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__
        or "runpy" in trace.tb_frame.f_code.co_filename
    ):
        trace = trace.tb_next
    return trace
