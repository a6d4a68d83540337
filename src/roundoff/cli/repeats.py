"""A script recorded again, each time in a new process: what honest runs of it differ
by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
            exit_code = self._run_child(arguments)
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
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, text],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=self._environment,
            cwd=self._folder,
        )
        return done.returncode


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
