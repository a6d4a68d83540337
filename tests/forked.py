"""Work in processes of its own: forks of one that has imported torch, which takes seconds each time.

That one uses neither torch nor polars, whose threads a fork lacks.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

IMPORTED_ONCE = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "polars",
    "roundoff.cli.app",
    "roundoff.cli.capture",
]


def side_by_side(
    work: Callable[..., object],
    arguments: Sequence[object],
    environments: Sequence[Mapping[str, str]],
    *,
    folder: str | os.PathLike[str] = ".",
) -> list[tuple[str, str]]:
    """Call a function of a module in one process for each environment, at the same time.

    Returns what each wrote to its standard output and error.
    Raises RuntimeError with both where one of them fails, or takes more than 400 seconds.
    """
    name = f"{work.__module__}:{work.__qualname__}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    with tempfile.TemporaryDirectory() as printed:
        files = [
            (Path(printed, f"{number}.out"), Path(printed, f"{number}.err"))
            for number in range(len(environments))
        ]
        processes = [
            context.Process(
                target=_in_the_fork,
                args=(name, tuple(arguments), dict(environment), str(folder), *both),
            )
            for environment, both in zip(environments, files, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(400)
        texts = [(out.read_text(), err.read_text()) for out, err in files]
    failed = [process for process in processes if process.exitcode != 0]
    for process in failed:
        process.kill()
    if failed:
        raise RuntimeError("\n".join("".join(text) for text in texts))
    return texts


def command(words: Sequence[str]) -> None:
    """Do what ``roundoff`` does with these words, and end the process with its code."""
    from roundoff.cli.app import main

    sys.exit(main([*words]))


def _in_the_fork(
    name: str,
    arguments: Sequence[object],
    environment: Mapping[str, str],
    folder: str,
    out: Path,
    err: Path,
) -> None:
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.update(environment)
    os.chdir(folder)
    # packages of tests are known by their names below this folder too
    sys.path.insert(0, str(Path(__file__).parent))
    pkgutil.resolve_name(name)(*arguments)
