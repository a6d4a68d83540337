"""A script recorded again, each time in a new process: what honest runs of it differ
by."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from roundoff.cli.talk import talk
from roundoff.errors import OutputError, RoundoffError, RunError
from roundoff.foreign import visible

#: The process finds roundoff where this one does, and what the script imports too.
_CHILD = """
import json, sys
sys.path[:], arguments = json.loads(sys.argv[1])
from roundoff.cli.repeats import record_in_child
sys.exit(record_in_child(**arguments))
"""


#: Polars lets the system resume what SIGINT interrupts: a wait without a limit would
#: not hear of it before the child has ended; one with a limit looks every 50 ms.
_WITH_A_LIMIT = threading.TIMEOUT_MAX
#: Seconds in which a process ends by itself that the terminal has interrupted too.
_BY_ITSELF = 1.0
#: Seconds in which it closes its recording after it was interrupted.
_CLOSING = 10.0


class Repeat(NamedTuple):
    """One further recording; ``kind`` is noise or repeat, ``noise`` its seed."""

    path: Path
    kind: str
    noise: int | None


class Repeats:
    """The further recordings of a script.

    Made before its first, so that the environment is that of its start. Raises before
    anything runs: ``OutputError`` where one of the folders holds a run, ``RunError``
    under a launcher of several processes and for noise at module level.
    """

    def __init__(
        self, output: Path, noise: int, repeats: int, *, overwrite: bool, level: str
    ) -> None:
        from roundoff.record import check_noise

        self.all = _planned(output, noise, repeats)
        if noise:
            check_noise(noise, level)
        if self.all:
            _check_one_process()
        if not overwrite:
            for repeat in self.all:
                _check_free(repeat.path)
        self._environment = dict(os.environ)
        self._folder = os.getcwd()
        self._path = [str(entry) for entry in sys.path]

    def record(
        self, script: Sequence[str], identity: str, options: dict[str, Any]
    ) -> None:
        """Record them one after the other.

        ``identity`` is the id of the first recording. What the script prints is not
        shown. Raises ``RunError`` for the first that fails; those before it stay.
        """
        for number, repeat in enumerate(self.all, 1):
            unchanged = repeat.noise is None
            manner = "again" if unchanged else f"with noise, seed {repeat.noise},"
            if not talk().quiet:
                print(
                    f"roundoff: recording {manner} in {repeat.path} "
                    f"({number} of {len(self.all)})",
                    file=sys.stderr,
                    flush=True,
                )
            arguments = {
                "script": list(script),
                "path": str(repeat.path),
                "identity": identity,
                "options": {**options, "noise": repeat.noise},
            }
            try:
                exit_code = self._run_child(arguments)
            except KeyboardInterrupt as interrupt:
                raise RunError(
                    "interrupted",
                    where=str(repeat.path),
                    do="the recordings before it are whole; to begin anew: --overwrite",
                ) from interrupt
            if exit_code:
                raise RunError(
                    "the script could not be recorded again",
                    where=str(repeat.path),
                    got=f"exit code {exit_code}",
                    do="what it said stands above; the runs before this one are whole",
                )

    def paths(self, kind: str) -> list[str]:
        """The folders of one kind."""
        return [str(repeat.path) for repeat in self.all if repeat.kind == kind]

    def _run_child(self, arguments: dict[str, Any]) -> int:
        text = json.dumps([self._path, arguments])
        with subprocess.Popen(
            [sys.executable, "-c", _CHILD, text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=self._environment,
            cwd=self._folder,
        ) as child:
            try:
                return child.wait(_WITH_A_LIMIT)
            finally:
                _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child that still runs: interrupted, so that its recording says it failed.

    A terminal interrupts it as well, what sends the signal to this process does not.
    """
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_BY_ITSELF)
            return
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_CLOSING)
    finally:
        if child.poll() is None:
            child.kill()


def record_in_child(
    script: Sequence[str], path: str, identity: str, options: dict[str, Any]
) -> int:
    """Record a repeat in this process; return its exit code."""
    from roundoff.record import capture_script

    try:
        capture_script(script, path, of=identity, **options)
    except RoundoffError as error:
        print(visible(f"roundoff: {error}"), file=sys.stderr)
        return 2
    return 0


def _planned(output: Path, noise: int, repeats: int) -> list[Repeat]:
    from roundoff.record import sibling

    noisy = [
        Repeat(sibling(output, "noise", seed), "noise", seed)
        for seed in range(1, noise + 1)
    ]
    unchanged = [
        Repeat(sibling(output, "repeat", number), "repeat", None)
        for number in range(1, repeats + 1)
    ]
    return noisy + unchanged


def _check_one_process() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RunError(
            "one of several processes cannot start the others again",
            where="--noise and --repeats",
            expected="a script in one process",
            do="start the launcher once more for each, with "
            "roundoff.capture(..., noise=1) in the script",
        )


def _check_free(path: Path) -> None:
    from roundoff.record import ABOUT, has_failed

    if (path / ABOUT).exists() and not has_failed(path):
        raise OutputError(
            "there is a run here already",
            where=str(path),
            expected="a folder that is free",
            do="choose another place with -o, or say that it may be deleted: "
            "--overwrite",
        )
