"""The command line: each verb is the function of the same name with a parser in front.

Exit codes: 0 done (and the target is met), 1 the target is missed, 2 wrong usage or bad
input, 3 an error that nobody foresaw, 4 nothing fails and not everything could be
decided, 130 interrupted. No two outcomes share one.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from typing import Annotated, Any

import typer

from roundoff.cli import (
    advise,
    bench,
    budget,
    capture,
    check,
    compare,
    diagnose,
    diff,
    lint,
    migrate,
    overflow,
    plan_group,
    quantize,
    replay,
    show,
    talk,
    tune,
    verify,
    watch,
)
from roundoff.cli.loading import loading_said
from roundoff.cli.plain_output import plainer_output
from roundoff.errors import InfeasibleError, RoundoffError
from roundoff.foreign import visible
from roundoff.packages import installed_version
from roundoff.unforeseen import is_panic, save_report, unforeseen_message

MISSED = 1
BAD_INPUT = 2
CRASHED = 3
#: what a shell makes of a program that SIGINT ended
INTERRUPTED = 130
#: likewise where nobody reads what it prints any more
UNREAD = 141

#: where nothing more can be written: a full disk, a quota, a limit of the process
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: the base of all usage errors; typer brings a click of its own from 0.26 on
_CLICK_ERROR: Any = next(
    c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"
)

app = typer.Typer(
    name="roundoff",
    help="An error budget for neural networks: what each operator's rounding costs, and the cheapest plan that holds.",
    epilog="Exit codes: 0 done, 1 target missed or values fail, 2 bad input, 3 an error nobody foresaw, 4 undecided, "
    "130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _verb in {
    "diagnose": diagnose,
    "budget": budget,
    "plan": plan_group,
    "verify": verify,
    "tune": tune,
    "quantize": quantize,
    "capture": capture,
    "show": show,
    "overflow": overflow,
    "check": check,
    "compare": compare,
    "diff": diff,
    "replay": replay,
    "watch": watch,
    "lint": lint,
    "migrate": migrate,
    "bench": bench,
    "advise": advise,
}.items():
    if _verb is plan_group:
        app.add_typer(plan_group.app, name=_name)
    else:
        app.command(_name)(talk.command(_verb.command))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"roundoff {installed_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
    quiet: talk.Quiet = False,
    verbose: talk.Verbose = False,
    debug: talk.Debug = False,
) -> None:
    """An error budget for neural networks: what each operator's rounding costs, and the
    cheapest plan that holds.
    """


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    Errors are one message on standard error; of one that nobody foresaw, the traceback
    goes into a file that the message names. With ``--debug`` it stands above the
    message.
    """
    talk.begin()
    try:
        with plainer_output(), loading_said():
            command = _command()
            result = command(
                args=arguments, prog_name="roundoff", standalone_mode=False
            )
            sys.stdout.flush()
    except typer.Exit as done:
        result = done.exit_code
    except _CLICK_ERROR as error:
        _show_traceback()
        error.show()
        return BAD_INPUT
    except RoundoffError as error:
        _show_traceback()
        print(visible(f"roundoff: {error}"), file=sys.stderr)
        return _code_of(error)
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except BrokenPipeError:
        _close_output()
        return UNREAD
    except BaseException as error:
        if _is_unread(error):
            _close_output()
            return UNREAD
        if isinstance(error, OSError) and error.errno in _FULL:
            _show_traceback()
            print(visible(f"roundoff: cannot write: {error}"), file=sys.stderr)
            _close_output()
            return BAD_INPUT
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        _show_traceback()
        report = save_report(error, sys.argv[1:] if arguments is None else arguments)
        message = unforeseen_message(error, report)
        print(visible(f"roundoff: {message}"), file=sys.stderr)
        return CRASHED
    if result == INTERRUPTED:
        print(
            "roundoff: interrupted; files are written whole or not at all, and the model is as it was",
            file=sys.stderr,
        )
    return int(result or 0)


@functools.cache
def _command() -> Any:
    """Return the parser of all verbs. To build it takes longer than to use it."""
    return typer.main.get_command(app)


def _show_traceback() -> None:
    """Print the traceback of the exception at hand where the user asked for it."""
    if talk.talk().debug:
        traceback.print_exc()


def _code_of(error: RoundoffError) -> int:
    if isinstance(error.__cause__, KeyboardInterrupt):
        return INTERRUPTED
    return MISSED if isinstance(error, InfeasibleError) else BAD_INPUT


def _is_unread(error: BaseException) -> bool:
    """Return True for the exit that click makes of output that nobody reads."""
    return isinstance(error, SystemExit) and _is_broken_pipe(error.__context__)


def _is_broken_pipe(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EPIPE


def _close_output() -> None:
    """Let nothing be written where nobody reads, as Python does at its end."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
    except (OSError, ValueError):
        return
