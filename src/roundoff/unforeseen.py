"""Exceptions that nobody foresaw: what was going on, one message, and a file for a report.

``RoundoffError`` says what the user can do; anything else that comes out of a verb is a
fault of roundoff or of torch. In Python it passes as it is, with its own traceback, and
``__notes__`` that say at which call and in which step it arose: no other type would tell
more. The command line makes one message of it, and of a file that ``quantize`` cannot
write a row with a reason.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, ParamSpec, TypeVar

from roundoff.errors import RoundoffError, warn
from roundoff.packages import installed_version

__all__ = [
    "OurPart",
    "going_on",
    "is_panic",
    "note",
    "panics_raised",
    "save_report",
    "unforeseen_message",
]

#: Libraries whose versions a report has, as far as they are loaded.
_LIBRARIES = ("torch", "numpy", "scipy", "polars", "onnx", "onnxruntime", "onnxscript")
_BEGINS = "roundoff: "
_STANDARD_ERROR = 2
#: Of the thread that holds standard error.
_HOLDS = threading.Lock()
_T = TypeVar("_T")
_P = ParamSpec("_P")


def note(error: BaseException, what: str) -> None:
    """Note on an exception what was going on; the same text once, errors of roundoff not at all."""
    if isinstance(error, RoundoffError) or _BEGINS + what in _all_notes(error):
        return
    error.add_note(_BEGINS + what)


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """Note on any exception that leaves the block what was going on.

    >>> try:
    ...     with going_on("calibrate"):
    ...         1 / 0
    ... except ZeroDivisionError as error:
    ...     error.__notes__
    ['roundoff: calibrate']
    """
    try:
        yield
    except BaseException as error:
        note(error, what)
        raise


def notes_of(error: BaseException) -> list[str]:
    """What was going on when an exception arose, the innermost first."""
    return [
        text.removeprefix(_BEGINS)
        for text in _all_notes(error)
        if text.startswith(_BEGINS)
    ]


def _all_notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def unforeseen_message(error: BaseException, report: Path | None) -> str:
    """One message: what arose, at which call and in which step, and what to attach to a report."""
    lines = [f"an error that roundoff did not foresee: {summary(error)}"]
    going = notes_of(error)
    if going:
        lines.append(f"  where: {', in '.join(going)}")
    lines.append(f"  raised at: {_raised_at(error)}")
    if report is not None:
        lines.append(f"  report: {report} has the traceback and the versions")
        lines.append("  do: attach it to an issue; it has no values, arguments or code")
    return "\n".join(lines)


class OurPart:
    """Our work inside somebody's program: a fault of it ends it with one warning, and never them.

    Args:
        name: what it does, for the warning.
        failed: told of the fault in place of the warning.

    Attributes:
        stopped: why it has ended; None while it goes on.

    >>> import warnings
    >>> ours = OurPart("counting")
    >>> ours(len, "abc")
    3
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     (ours(len, 3), ours(len, "abc"), len(caught))
    (None, None, 1)
    """

    def __init__(
        self, name: str, failed: Callable[[BaseException], None] | None = None
    ) -> None:
        self.name = name
        self.failed = failed or self._warn
        self.stopped: str | None = None

    def __call__(
        self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T | None:
        """Return ``work(*args)``; None where that fails, and from then on."""
        if self.stopped is not None:
            return None
        try:
            return work(*args, **kwargs)
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            self.stopped = summary(error)
            self.failed(error)
            return None

    def _warn(self, error: BaseException) -> None:
        warn(
            f"roundoff: {self.name} has stopped and the program goes on: "
            f"{self.stopped} at {_raised_at(error)}"
        )

    def around(self, work: Callable[_P, _T]) -> Callable[_P, _T | None]:
        """Return ``work`` as a function that is called by others."""

        @functools.wraps(work)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
            return self(work, *args, **kwargs)

        return guarded


def is_panic(error: BaseException) -> bool:
    """Return True for an error of a library written in Rust, such as polars, which no ``except
    Exception`` catches.
    """
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_raised() -> Iterator[None]:
    """Raise a ``ValueError`` where such a library panics: at a damaged file, as a rule.

    The panic itself writes a trace to the standard error of the process, past ``sys.stderr``:
    it is dropped. Anything else that is written there comes out at the end of the block.
    """
    with _standard_error_held() as held:
        try:
            yield
        except BaseException as error:
            if not is_panic(error):
                raise
            held.drop()
            raise ValueError(f"it cannot be read: {str(error)[:200]}") from None


@contextmanager
def _standard_error_held() -> Iterator[_Held]:
    """Keep what is written to standard error meanwhile; it comes out at the end.

    Of two threads at a time the first does it; without a file or a standard error nobody.
    """
    held = _Held()
    if not _HOLDS.acquire(blocking=False):
        yield held
        return
    try:
        held.begin()
        try:
            yield held
        finally:
            held.end()
    finally:
        _HOLDS.release()


class _Held:
    """What goes to standard error, in a file until the end."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._standard_error = -1

    def begin(self) -> None:
        _flush()
        with ExitStack() as opened:
            try:
                file = opened.enter_context(tempfile.TemporaryFile())
                self._standard_error = os.dup(_STANDARD_ERROR)
            except OSError:  # no place for a file, or a process without standard error
                return
            opened.pop_all()
        self._file = file
        os.dup2(file.fileno(), _STANDARD_ERROR)

    def drop(self) -> None:
        if self._file is not None:
            self._file.truncate(0)

    def end(self) -> None:
        if self._file is None:
            return
        _flush()
        os.dup2(self._standard_error, _STANDARD_ERROR)
        os.close(self._standard_error)
        with self._file as file:
            file.seek(0)
            text = file.read()
        if text:
            os.write(_STANDARD_ERROR, text)


def _flush() -> None:
    if sys.stderr is not None:
        sys.stderr.flush()


def summary(error: BaseException) -> str:
    """The type of an exception and the first line of its text."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _raised_at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "-"
    ours = [frame for frame in frames if _is_ours(frame.filename)]
    frame = (ours or frames)[-1]
    return f"{frame.filename}:{frame.lineno}, {frame.name}"


def _is_ours(file: str) -> bool:
    return file.startswith(str(Path(__file__).parent) + os.sep)


def save_report(error: BaseException, arguments: Sequence[str] = ()) -> Path | None:
    """Write traceback and versions into a new file of the temporary folder; None where that fails.

    Frames have file, line and function; of the command line only the verb and the names
    of its options stand there. So nothing of the user's code, data or credentials gets
    into it, but what the exception says itself.
    """
    try:
        handle, name = tempfile.mkstemp(prefix="roundoff-error-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(report_text(error, arguments))
    except OSError:
        return None
    return Path(name)


def report_text(error: BaseException, arguments: Sequence[str] = ()) -> str:
    """The text of such a file."""
    command = " ".join(_without_values(arguments))
    lines = [f"roundoff {installed_version()}", f"command: {command or '-'}"]
    lines += [f"python {platform.python_version()} on {platform.platform()}"]
    lines += _versions()
    lines += [f"going on: {text}" for text in notes_of(error)]
    for each in _chain(error):
        lines += ["", f"{type(each).__name__}: {each}"]
        lines += [
            f"  {frame.filename}:{frame.lineno} in {frame.name}"
            for frame in traceback.extract_tb(each.__traceback__)
        ]
    return "\n".join(lines) + "\n"


def _without_values(arguments: Sequence[str]) -> list[str]:
    """The verb and the names of options, without what they are set to."""
    names = [text.partition("=")[0] for text in arguments if text.startswith("-")]
    return [*arguments[:1], *names]


def _versions() -> list[str]:
    versions = []
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            versions.append(f"{name} {version}")
    return versions


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and what caused it, the first cause last."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain
