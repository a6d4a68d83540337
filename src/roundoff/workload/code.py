"""Calling the user's code: check its parameters first, and blame its own line when it raises."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from roundoff.errors import RoundoffError, WorkloadError, nearest

__all__ = [
    "METRIC_ARGUMENTS",
    "arguments_of",
    "check_call",
    "metric_arguments",
    "name_of",
    "user_code",
]

METRIC_ARGUMENTS = ("outputs", "batches", "reference")
_LIBRARIES = tuple(
    str(folder) + os.sep
    for folder in (Path(__file__).parents[1], Path(str(torch.__file__)).parent)
)


@contextmanager
def user_code(
    what: str | Callable[[], str],
    where: str,
    *,
    path: Path | None = None,
    do: str | None = None,
) -> Iterator[None]:
    """Turn an exception of the block into a ``WorkloadError`` that shows the user's file and line.

    Args:
        what: what was being done, for "... raised ValueError"; a callable is asked only
            when something raised.
        where: the place to name when no line of the user's is found.
        path: the workload's file; its innermost line is shown, and ``sys.argv`` is its
            name alone. Without it, the innermost line outside torch.
        do: what the user can do about it.

    Raises:
        WorkloadError: from the exception, which stays as the cause. A
            ``RoundoffError``, ``KeyboardInterrupt`` or ``GeneratorExit`` passes
            unchanged; ``SystemExit`` does not (a script that parses arguments exits
            so). So does what roundoff itself raises at a call of the user's code, which
            is not the user's fault.
    """
    try:
        with nullcontext() if path is None else arguments_of(path):
            yield
    except RoundoffError:
        raise
    # The one broad handler in the package: user code may raise anything, and all of it
    # is reported, with its cause.
    except (Exception, SystemExit) as error:
        if _is_ours(error):
            raise
        place, got = _blame(error, path)
        raise WorkloadError(
            f"{what if isinstance(what, str) else what()} raised {type(error).__name__}",
            where=place or where,
            got=got,
            do=_advice(error) or do,
        ) from error


@contextmanager
def arguments_of(name: str | Path) -> Iterator[None]:
    """``sys.argv`` as Python would set it for a file that is run without arguments.

    A file that parses arguments would take those of roundoff, or of the program that
    called it, for its own.
    """
    arguments = sys.argv
    sys.argv = [str(name)]
    try:
        yield
    finally:
        sys.argv = arguments


#: Where calls of the user's code come to roundoff, and are run as they are.
_CALLS = f"{os.sep}ops{os.sep}calls.py"


def _is_ours(error: BaseException) -> bool:
    """Return True where a call of the user's code came to roundoff, and roundoff failed at it.

    That is where the last frame of the user's or ours is ours, behind the place where
    such calls arrive; what torch raises when the call is run as it is, is the user's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    arrived = [f.filename.endswith(_CALLS) for f in frames]
    if not any(arrived):
        return False
    since = frames[len(frames) - arrived[::-1].index(True) :]
    ours = [f.filename.startswith(_LIBRARIES[0]) for f in since]
    return any(ours) and not any(map(_is_users, since[ours.index(True) :]))


def _is_users(frame: traceback.FrameSummary) -> bool:
    installed = f"{os.sep}site-packages{os.sep}"
    libraries = (_LIBRARIES[0], "<frozen")
    return installed not in frame.filename and not frame.filename.startswith(libraries)


def _blame(error: BaseException, path: Path | None) -> tuple[str | None, str]:
    """Return the user's file and line, if any frame is theirs, and the exception with that line."""
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
        return place, f"{error.msg}, at `{(error.text or '').strip()}`"
    text = "".join(traceback.format_exception_only(error)).strip()
    message = text.replace("\n", "\n    ")
    frames = traceback.extract_tb(error.__traceback__)
    raised_at = f"raised at {frames[-1].filename}:{frames[-1].lineno}"
    frame = _users_frame(frames, path)
    if frame is None:
        return None, f"{message}, {raised_at}"
    got = f"{message}, at `{frame.line}`"
    if frame is not frames[-1]:
        got = f"{got}, {raised_at}"
    return f"{frame.filename}:{frame.lineno}", got


def _users_frame(
    frames: Sequence[traceback.FrameSummary], path: Path | None
) -> traceback.FrameSummary | None:
    """The innermost frame of the workload's file, else of the user's code, else outside torch."""
    users = [f for f in frames if not f.filename.startswith((*_LIBRARIES, "<frozen"))]
    in_file = [f for f in users if f.filename == str(path)]
    installed = f"{os.sep}site-packages{os.sep}"
    written = [f for f in users if installed not in f.filename]
    return next(reversed(in_file or written or users), None)


def _advice(error: BaseException) -> str | None:
    if isinstance(error, ModuleNotFoundError):
        package = repr(error.name)
        return f"install the package that provides {package}, or correct the import"
    if isinstance(error, SystemExit):
        return 'put code that is meant for the command line under `if __name__ == "__main__":`'
    return None


def name_of(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def check_call(
    function: object, label: str, parameters: Sequence[str], where: str
) -> None:
    """Raise ``WorkloadError`` unless ``function`` can be called with these positional arguments."""
    expected = f"{label}({', '.join(parameters)})"
    if not callable(function):
        raise WorkloadError(
            f"{label} is not callable",
            where=where,
            expected=expected,
            got=type(function).__name__,
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some builtins have none; the call itself will tell
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise WorkloadError(
            f"{label} cannot be called: {error}",
            where=where,
            expected=expected,
            got=f"{label}{signature}",
        ) from error


def metric_arguments(metric: object, where: str) -> list[str]:
    """Return which of outputs, batches and reference the metric takes.

    Raises ``WorkloadError`` where it cannot be called with them alone.
    """
    expected = f"parameters among {', '.join(METRIC_ARGUMENTS)}"
    if not callable(metric):
        raise WorkloadError(
            "metric is not callable",
            where=where,
            expected=expected,
            got=type(metric).__name__,
        )
    try:
        parameters = inspect.signature(metric).parameters.values()
    except (TypeError, ValueError) as error:
        raise WorkloadError(
            "the parameters of the metric cannot be read",
            where=where,
            expected=expected,
            got=name_of(metric),
            do="wrap it in a function",
        ) from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return list(METRIC_ARGUMENTS)
    for parameter in parameters:
        if not _is_offered(parameter) and not _is_optional(parameter):
            near = nearest(parameter.name, METRIC_ARGUMENTS, at_most=1)
            do = "take the targets from `batches`"
            if near:
                do = f"rename {parameter.name!r} to {near[0]!r}"
            raise WorkloadError(
                f"the metric {name_of(metric)} has an unknown parameter",
                where=where,
                expected=expected,
                got=f"{name_of(metric)}{inspect.signature(metric)}",
                do=do,
            )
    return [p.name for p in parameters if p.name in METRIC_ARGUMENTS]


def _is_offered(parameter: inspect.Parameter) -> bool:
    by_name = parameter.kind is not parameter.POSITIONAL_ONLY
    return by_name and parameter.name in METRIC_ARGUMENTS


def _is_optional(parameter: inspect.Parameter) -> bool:
    has_default = parameter.default is not parameter.empty
    return has_default or parameter.kind is parameter.VAR_POSITIONAL
