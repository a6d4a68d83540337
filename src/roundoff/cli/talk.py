"""How much the command line says: -q, -v and --debug, before a verb or behind it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from roundoff.cli.loading import be_still
from roundoff.errors import RoundoffError


@dataclass(frozen=True)
class Talk:
    """How much is said.

    Attributes:
        quiet: errors alone, and the object of ``--json``.
        verbose: also what is being done, on standard error, a line at a time.
        debug: tracebacks of errors.
    """

    quiet: bool = False
    verbose: bool = False
    debug: bool = False


_TALK: ContextVar[Talk] = ContextVar("talk", default=Talk())  # noqa: B039 - frozen


def talk() -> Talk:
    """Return how much this command says."""
    return _TALK.get()


def begin() -> None:
    """Forget what an earlier command of this process was asked."""
    _TALK.set(Talk())


def _set(name: str) -> Callable[[bool], bool]:
    def callback(value: bool) -> bool:
        if value:
            _TALK.set(replace(_TALK.get(), **{name: True}))
            if name == "quiet":
                be_still()
        return value

    return callback


Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Print errors alone; the exit code and the files say the rest.",
        callback=_set("quiet"),
        is_eager=True,
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Also say on standard error what is being done.",
        callback=_set("verbose"),
        is_eager=True,
    ),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show the traceback of an error.",
        callback=_set("debug"),
        is_eager=True,
    ),
]
#: Name of the parameter of each.
OPTIONS = {"quiet": Quiet, "verbose": Verbose, "debug": Debug}


def command(function: Callable[..., int]) -> Callable[..., int]:
    """Return the command of a verb with these options behind its own."""

    @functools.wraps(function)
    def run(**arguments: Any) -> int:
        _check_working_folder()
        return function(**{k: v for k, v in arguments.items() if k not in OPTIONS})

    signature = inspect.signature(function, eval_str=True)
    more = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=option
        )
        for name, option in OPTIONS.items()
    ]
    parameters = [*signature.parameters.values(), *more]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _check_working_folder() -> None:
    """Raise ``RoundoffError`` where there is no working folder any more.

    Libraries need one: oneMKL ends the process without it.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise RoundoffError(
            "the working folder does not exist any more",
            do="change to a folder that exists",
        ) from None
