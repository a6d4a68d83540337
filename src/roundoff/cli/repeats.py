"""A script recorded again, in processes of their own: what honest runs of it differ by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from roundoff.errors import OutputError, RoundoffError, RunError

#: The process finds roundoff where this one does, and what the script imports too.
_CHILD = """
import json, sys
sys.path[:], given = json.loads(sys.argv[1])
from roundoff.cli.repeats import child
sys.exit(child(**given))
"""


class Repeat(NamedTuple):
    """One further recording."""

    path: Path
    kind: str  # "noise" or "repeat"
    noise: int | None


class Repeats:
    """The further recordings of a script; made before its first, so that the environment is that of its start.

    Raises before anything runs: ``OutputError`` where one of the folders holds a run, ``RunError`` under a launcher of
    several processes and for noise at module level.
    """

    def __init__(
        self, output: Path, noise: int, repeats: int, *, overwrite: bool, level: str
    ) -> None:
        from roundoff.record import ABOUT, check_noise, sibling

        self.all = [
            Repeat(sibling(output, "noise", i), "noise", i) for i in range(1, noise + 1)
        ]
        self.all += [
            Repeat(sibling(output, "repeat", i), "repeat", None)
            for i in range(1, repeats + 1)
        ]
        if noise:
            check_noise(noise, level)
        if self.all and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RunError(
                "one of several processes cannot start the others again",
                where="--noise and --repeats",
                expected="a script in one process",
                do="start the launcher once more for each, with roundoff.capture(..., noise=1) in the script",
            )
        for path, _, _ in self.all if not overwrite else ():
            if (path / ABOUT).exists():
                raise OutputError(
                    "there is a run here already",
                    where=str(path),
                    expected="a folder that is free",
                    do="choose another place with -o, or say that it may be deleted: --overwrite",
                )
        self._environment, self._folder = dict(os.environ), os.getcwd()
        self._path = [str(entry) for entry in sys.path]

    def record(self, script: Sequence[str], of: str, options: dict[str, Any]) -> None:
        """Record them one after the other; ``of`` is the id of the first recording. What the script prints is not shown.

        Raises ``RunError`` for the first that fails; those before it stay.
        """
        for number, (path, _, noise) in enumerate(self.all, 1):
            what = "again" if noise is None else f"with noise, seed {noise},"
            print(
                f"roundoff: recording {what} in {path} ({number} of {len(self.all)})",
                file=sys.stderr,
                flush=True,
            )
            given = {
                "script": list(script),
                "path": str(path),
                "of": of,
                "options": {**options, "noise": noise},
            }
            done = subprocess.run(
                [sys.executable, "-c", _CHILD, json.dumps([self._path, given])],
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=self._environment,
                cwd=self._folder,
            )
            if done.returncode:
                raise RunError(
                    "the script could not be recorded again",
                    where=str(path),
                    got=f"exit code {done.returncode}",
                    do="what it said stands above; the runs before this one are whole",
                )

    def paths(self, kind: str) -> list[str]:
        """The folders of one kind."""
        return [str(repeat.path) for repeat in self.all if repeat.kind == kind]


def child(script: Sequence[str], path: str, of: str, options: dict[str, Any]) -> int:
    """What the process does; its exit code."""
    from roundoff.record import capture_script

    try:
        capture_script(script, path, of=of, **options)
    except RoundoffError as error:
        print(f"roundoff: {error}", file=sys.stderr)
        return 2
    return 0
