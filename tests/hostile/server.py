"""``python -m tests.hostile.server FOLDER``: reads cases as lines of JSON, answers how each ended.

A process of its own, since it forks: one that has used polars cannot.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Serve until the input ends."""
    import torch
    from tests.hostile.commands import Case, Range

    torch.set_num_threads(1)
    place = Range(Path(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        command, seed = json.loads(line)
        ending = place.end_of(Case(command, seed))
        answer = [ending.complaint, ending.output[-4000:], ending.seconds]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Server:
    """Asks the process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def end_of(self, command: str, seed: int) -> tuple[str | None, str, float]:
        """Return the complaint (None: it harmed nothing), what was printed, and seconds."""
        process: Any = self._process
        process.stdin.write(json.dumps([command, seed]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        complaint, output, seconds = json.loads(line)
        return complaint, output, seconds


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """The process, with a folder of its own."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.hostile.server", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"XDG_STATE_HOME": str(folder / "state")},
    ) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


if __name__ == "__main__":
    main()
