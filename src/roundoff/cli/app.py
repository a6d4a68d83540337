"""The command line: each verb is the function of the same name with a parser in front.

Exit codes: 0 done (and the target is met), 1 the target is missed, 2 wrong usage or bad
input, interrupted, or an error that nobody foresaw.
"""

from __future__ import annotations

import sys
from typing import Any

import typer

from roundoff.cli import (
    bench,
    budget,
    capture,
    compare,
    diagnose,
    diff,
    overflow,
    plan_group,
    quantize,
    replay,
    show,
    tune,
    verify,
    watch,
)
from roundoff.errors import InfeasibleError, RoundoffError
from roundoff.foreign import visible
from roundoff.unforeseen import is_panic, save_report, unforeseen_message

MISSED = 1
BAD_INPUT = 2
#: what typer makes of Ctrl-C
INTERRUPTED = 130

#: the base of all usage errors; typer brings a click of its own from 0.26 on
_CLICK_ERROR: Any = next(
    c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"
)

app = typer.Typer(
    name="roundoff",
    help="An error budget for neural networks: what each operator's rounding costs, and the cheapest plan that holds.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("diagnose")(diagnose.command)
app.command("budget")(budget.command)
app.add_typer(plan_group.app, name="plan")
app.command("verify")(verify.command)
app.command("tune")(tune.command)
app.command("quantize")(quantize.command)
app.command("capture")(capture.command)
app.command("show")(show.command)
app.command("overflow")(overflow.command)
app.command("compare")(compare.command)
app.command("diff")(diff.command)
app.command("replay")(replay.command)
app.command("watch")(watch.command)
app.command("bench")(bench.command)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    Errors are one message on standard error; of one that nobody foresaw, the traceback
    goes into a file that the message names.
    """
    try:
        result = app(args=arguments, prog_name="roundoff", standalone_mode=False)
    except typer.Exit as done:
        result = done.exit_code
    except _CLICK_ERROR as error:
        error.show()
        return BAD_INPUT
    except RoundoffError as error:
        print(visible(f"roundoff: {error}"), file=sys.stderr)
        return MISSED if isinstance(error, InfeasibleError) else BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        report = save_report(error, sys.argv[1:] if arguments is None else arguments)
        message = unforeseen_message(error, report)
        print(visible(f"roundoff: {message}"), file=sys.stderr)
        return BAD_INPUT
    if result == INTERRUPTED:
        print(
            "roundoff: interrupted; files are written whole or not at all, and the model is as it was",
            file=sys.stderr,
        )
        return BAD_INPUT
    return int(result or 0)
