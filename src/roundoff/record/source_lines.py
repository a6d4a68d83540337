"""The user's source line that a call comes from, or that a compiler has written it."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_OURS = str(Path(__file__).parents[1])
#: What stands between a program and its operators while it is recorded.
_RECORDING = (
    str(Path(__file__).parent),
    str(Path(_OURS, "unforeseen.py")),
    str(Path(_OURS, "train", "watch", "script_calls.py")),
)
_TORCH = str(Path(torch.__file__).parent)
#: Python's own library, as ``copy`` and ``functools``, but for what is installed in it.
_LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = ("site-packages", "dist-packages")
_skipped: dict[Any, bool] = {}
#: Where a call stands that the compiler's code makes: what that code writes between such
#: calls is not seen.
COMPILED = "compiled"
#: Between the lines of a call's callers.
CALLED_FROM = " < "
#: Where more called a line than this, none is noted: stacks are compared from their outer
#: end.
MOST_CALLERS = 100
_lines: dict[tuple[Any, int], str] = {}
_places: dict[tuple[str, ...], tuple[str | None, str | None]] = {}


#: The function in which autograd's engine runs, called by the user's ``backward()``.
_ENGINE = "_engine_run_backward"


def _frame(depth: int) -> FrameType | None:
    """Return the frame ``depth`` above the caller; None where there is none.

    Autograd's engine calls kernels of a GPU on a thread of its own, whose stack begins
    with what records them.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and depth:
        frame = frame.f_back
        depth -= 1
    return frame


def user_line(depth: int = 2, *, in_engine: bool = False) -> str | None:
    """File and line of the innermost frame that is neither torch's, Python's nor ours.

    A file below the working directory by its path from there, one of an installed
    package by its path in it. ``COMPILED`` where the compiler's code comes first; None
    where the model was called by roundoff itself, and with ``in_engine`` where autograd's
    engine has called no code of the user's (a backward kernel, a hook). Frames below
    ``depth`` are not looked at.
    """
    return next(_user_lines(_frame(depth), in_engine), None)


def user_place(
    depth: int = 2, *, in_engine: bool = False
) -> tuple[str | None, str | None]:
    """The line as ``user_line`` gives it, and those that it was called from.

    These are joined by ``CALLED_FROM``, the innermost first; None where there is none,
    or more than ``MOST_CALLERS``.
    """
    lines = tuple(islice(_user_lines(_frame(depth), in_engine), 2 + MOST_CALLERS))
    place = _places.get(lines)
    if place is None:
        line = lines[0] if lines else None
        callers = lines[1:] if len(lines) <= 1 + MOST_CALLERS else ()
        place = _places[lines] = line, CALLED_FROM.join(callers) or None
    return place


def _is_of_library(file: str) -> bool:
    """Return True for a file of Python's own library: ``copy.deepcopy`` is no user's line."""
    if "/importlib/" in file:
        return True
    rest = file.removeprefix(_LIBRARY)
    return rest != file and not rest.startswith(_INSTALLED)


def _user_lines(frame: FrameType | None, in_engine: bool) -> Iterator[str]:
    """Yield the lines of the user's frames, the innermost first."""
    while frame is not None:
        code = frame.f_code
        if in_engine and code.co_name == _ENGINE:
            return
        skip = _skipped.get(code)
        if skip is None:
            name = code.co_filename
            if in_compiled(name):
                yield COMPILED
                return
            if name.startswith(_OURS) and not name.startswith(_RECORDING):
                return  # who called roundoff has not written the call
            is_ours = name.startswith((_OURS, _TORCH, "<"))
            skip = _skipped[code] = is_ours or _is_of_library(name)
        if not skip:
            key = (code, frame.f_lineno)
            line = _lines.get(key)
            if line is None:
                line = _lines[key] = f"{_short(code.co_filename)}:{frame.f_lineno}"
            yield line
        frame = frame.f_back


#: torch's functions between the backward pass and the optimizer's step, by file.
_GRADIENT_FUNCTIONS = {
    str(Path(_TORCH, "nn/utils/clip_grad.py")): None,
    str(Path(_TORCH, "amp/grad_scaler.py")): ("unscale_", "_unscale_grads_"),
}


def prepares_gradients(depth: int = 2) -> bool:
    """Return True where torch clips or unscales gradients for an optimizer's step.

    However the script has imported the function; frames below ``depth`` are not
    looked at, nor those above the user's.
    """
    frame = _frame(depth)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_OURS, _TORCH, "<")):
            return False
        if code.co_filename in _GRADIENT_FUNCTIONS:
            names = _GRADIENT_FUNCTIONS[code.co_filename]
            return names is None or code.co_name in names
        frame = frame.f_back
    return False


def defined_at(function: Any) -> str | None:
    """File and line where a function of the user's is defined; None for torch's and ours."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename.startswith((_OURS, _TORCH, "<")):
        return None
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        lines = []
        first = code.co_firstlineno
    decorators = itertools.takewhile(lambda line: "def " not in line, lines)
    number = first + (sum(1 for _ in decorators) if lines else 0)
    return f"{_short(code.co_filename)}:{number}"


def in_compiled(name: str | None = None) -> bool:
    """Return True if Inductor has written the file ``name``; without a name, if such
    code runs now."""
    if name is not None:
        folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        return "/torchinductor_" in name or bool(folder and name.startswith(folder))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not in_compiled(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None


def _short(name: str) -> str:
    path = Path(name)
    for marker in ("site-packages", "dist-packages"):
        if marker in path.parts:
            return "/".join(path.parts[path.parts.index(marker) + 1 :])
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path.name
