"""``python -m tests.scripts.odd_server``: runs odd scripts plain, captured and watched, each in a forked process.

A process of its own, since it forks: one that has used polars cannot.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.scripts.odd import PRELUDE, SCRIPTS

PLAIN = "plain"
WAYS = {
    "captured": ["capture", "-o", "run", "--keep", "tensors", "--steps", "all", "--"],
    "watched": ["watch", "--"],
}
ARGUMENTS = ["script.py", "--a", "1"]


def main() -> None:
    """Read ``[name, folder]`` in lines, and answer ``{way: [exit code, output, errors]}``."""
    import_once()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        name, folder = json.loads(line)
        endings = {way: ended(name, way, Path(folder, way)) for way in (PLAIN, *WAYS)}
        answers.write(json.dumps(endings) + "\n")
        answers.flush()


def import_once() -> None:
    """Import what the scripts and verbs need, so that no fork has to; polars is not among it."""
    import torch
    import torch._dynamo  # as any optimizer does

    import roundoff.cli.app
    import roundoff.record
    import roundoff.verbs.watch  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # what is imported is no garbage of any script


def ended(name: str, way: str, folder: Path) -> tuple[int, str, str]:
    """Run a script in one way, in a folder of its own."""
    from roundoff.cli.app import main as roundoff

    folder.mkdir(parents=True)
    (folder / "script.py").write_text(PRELUDE + SCRIPTS[name])
    if way == PLAIN:
        return _forked(_plain, folder)
    return _forked(lambda: roundoff([*WAYS[way], *ARGUMENTS]), folder)


def _plain() -> int:
    sys.argv = list(ARGUMENTS)
    sys.path.insert(0, "")
    runpy.run_path("script.py", run_name="__main__")
    return 0


def _forked(work: Callable[[], int], folder: Path) -> tuple[int, str, str]:
    """Return the exit code, and what was printed, of work in a forked process."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _in_child(work, folder, {1: out.fileno(), 2: err.fileno()})
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return os.waitstatus_to_exitcode(status), texts[0], texts[1]


def _in_child(work: Callable[[], int], folder: Path, outputs: dict[int, int]) -> None:
    """Run work and end; never returns."""
    code = 99
    try:
        os.chdir(folder)
        for number, descriptor in outputs.items():
            os.dup2(descriptor, number)
        sys.stdin = open(os.devnull)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - as Python itself
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
