"""Run commands on hostile files, each in a forked process with limits, and judge how it ends.

Importing torch for each would take hours; the process that forks has done it. It uses
polars for nothing: the threads of polars do not live on in a fork.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import select
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.hostile.attacks import attack, replace_nature
from tests.hostile.honest import COMMANDS, layer, make

import roundoff
from roundoff import export
from roundoff.advise import read_tuning
from roundoff.cli.app import main
from roundoff.errors import RoundoffError
from roundoff.foreign import visible
from roundoff.ops import other_process
from roundoff.quantize import Record

#: Seconds of processor time of a command, and of a clock while nothing else runs.
MOST_SECONDS = 10
MEMORY = 8 * 2**30
#: Share of cases in which something that is no file, or has no end, stands for a file.
OF_OTHER_NATURE = 0.08
#: Output that a terminal would obey.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
#: The largest exit code that a verb has.
UNDECIDED = 4
_NAMED = re.compile(r"\{([^}]+)\}")


@dataclass(frozen=True)
class Case:
    """A command on files of which one or two were changed; a seed below 0 changes none."""

    command: str
    seed: int

    @property
    def kinds(self) -> list[str]:
        return _NAMED.findall(self.command)


@dataclass(frozen=True)
class Ending:
    """How a command ended; ``complaint`` is None where it harmed nothing."""

    case: Case
    complaint: str | None
    output: str
    seconds: float


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """So many cases, all commands in turn."""
    for number in range(count):
        yield Case(COMMANDS[number % len(COMMANDS)], seed + number)


class Range:
    """A folder of honest files, and a place where a command runs on changed ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.honest = folder / "honest"
        if not self.honest.exists():
            _forked_wait(lambda: make(self.honest))

    def end_of(self, case: Case) -> Ending:
        """Run a case, and look at what it did."""
        work = self.folder / "above" / "deeper" / "work"
        shutil.rmtree(self.folder / "above", ignore_errors=True)
        work.mkdir(parents=True)
        chance = random.Random(case.seed)
        before = _listing(self.folder, work)
        status, output, seconds = _run(
            lambda: self._changed_files(case, work, chance), work
        )
        after = _listing(self.folder, work)
        complaint = _complaint(status, output, seconds)
        if complaint is None and after != before:
            complaint = f"files outside: {sorted(after ^ before)[:3]}"
        return Ending(case, complaint, output, seconds)

    def _changed_files(
        self, case: Case, work: Path, chance: random.Random
    ) -> list[str]:
        shutil.copy(self.honest / "net.py", work)
        for kind in dict.fromkeys(case.kinds):
            source = self.honest / kind
            if source.is_dir():
                shutil.copytree(source, work / kind)
                # as somebody else's
                for mark in (work / kind).rglob("mark.txt"):
                    mark.unlink()
            else:
                shutil.copy(source, work / kind)
        if case.seed < 0:
            return _words(case)
        # of its own chance: the seeds of what has harmed before mean what they did
        other = random.Random(f"nature {case.seed}")
        if other.random() < OF_OTHER_NATURE:
            replace_nature(other.choice(_files(work / other.choice(case.kinds))), other)
            return _words(case)
        changed = chance.sample(
            case.kinds, 1 if chance.random() < 0.8 else len(case.kinds)
        )
        for kind in changed:
            files = _files(work / kind)
            for _ in range(chance.choice((1, 1, 2))):
                attack(chance.choice(files), chance)
        return _words(case)


def _words(case: Case) -> list[str]:
    """The words of a command; behind a # are files that it reads without being told."""
    return shlex.split(_NAMED.sub(r"\1", case.command), comments=True)


def _files(place: Path) -> list[Path]:
    """A file, or all files of a folder."""
    if place.is_dir():
        return sorted(file for file in place.rglob("*") if file.is_file())
    return [place]


def _listing(folder: Path, work: Path) -> set[str]:
    """Files that a command must not make or change: all but those of its own folder."""
    here = {
        f"{file} {file.stat().st_size}"
        for file in folder.rglob("*")
        if file.is_file() and work not in file.parents
    }
    return here | {str(file) for file in Path("/").glob("outside*")}


def _forked_wait(work: Callable[[], object]) -> None:
    """Do some work in a process of its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise ChildProcessError(f"exit status {status}")


def _run(words: Callable[[], list[str]], work: Path) -> tuple[int, str, float]:
    """Return the wait status, what was printed, and seconds of processor time.

    ``words`` prepares the files, in the process of the command.
    """
    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if child == 0:
            _in_child(words, work, printed.fileno())  # never returns
        status, used = _wait(child)
        printed.seek(0)
        output = printed.read().decode("utf-8", "backslashreplace")
    return status, output, used


def _wait(child: int) -> tuple[int, float]:
    """Wait for a child; it is killed after three times its processor time of clock."""
    until = time.monotonic() + 3 * MOST_SECONDS
    descriptor = os.pidfd_open(child)
    with contextlib.suppress(ProcessLookupError):
        ready = select.select([descriptor], [], [], until - time.monotonic())[0]
        if not ready:
            os.kill(child, signal.SIGKILL)
    os.close(descriptor)
    _, status, usage = os.wait4(child, 0)
    return status, usage.ru_utime + usage.ru_stime


def _in_child(words: Callable[[], list[str]], work: Path, printed: int) -> None:
    """Run a command; never returns."""
    code = 70
    try:
        os.chdir(work)
        command = words()
        os.setsid()
        for descriptor in (1, 2):
            os.dup2(printed, descriptor)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        tempfile.tempdir = str(work)
        resource.setrlimit(resource.RLIMIT_CPU, (2 * MOST_SECONDS,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        other_process.OtherProcess._started = _forked  # type: ignore[method-assign]
        other_process.MEMORY = 2**30
        code = _read(*command) if command[0] in _READERS else main(command)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - whatever leaves the boundary is what is looked for
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _read(reader: str, path: str) -> int:
    """What a script calls, for which there is no verb."""
    try:
        answer = repr(_READERS[reader](path))
    except RoundoffError as error:
        sys.stdout.write(visible(str(error)))
        return 2
    sys.stdout.write(visible(answer))
    return 0


def _load_checkpoint(path: str) -> object:
    return export.load_checkpoint_(layer(), path)


def _autocast(path: str) -> object:
    model = layer()
    with roundoff.autocast(path, model):
        return model(torch.ones(2, 8))


_READERS: dict[str, Callable[[str], object]] = {
    "read_tuning": read_tuning,
    "read_config": export.read_config,
    "read_record": export.read_record,
    "load_checkpoint": _load_checkpoint,
    "read_quantized": Record.load,
    "autocast": _autocast,
}


class _Forked:
    """What ``OtherProcess`` needs of a process, of one that was forked, not started."""

    def __init__(self) -> None:
        ask, self_in = os.pipe()
        self_out, answer = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                os.dup2(ask, 0)
                os.dup2(answer, 1)
                for descriptor in (self_in, self_out):
                    os.close(descriptor)
                sys.stdin = open(0, closefd=False)  # noqa: SIM115
                other_process.serve()
            os._exit(1)
        os.close(ask)
        os.close(answer)
        self.stdin: Any = open(self_in, "wb", buffering=0)  # noqa: SIM115
        self.stdout: Any = open(self_out, "rb", buffering=0)  # noqa: SIM115

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            until = time.monotonic() + (timeout or 10.0)
            while time.monotonic() < until:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    break
                time.sleep(0.01)
        return self.returncode or 0


def _forked(self: Any, call: Any) -> Any:
    if self._process is None:
        self._process = _Forked()
        other_process._send(self._process.stdin, {"memory": other_process.MEMORY}, [])
        other_process._receive(self._process.stdout, 60.0)
    return self._process


def _complaint(status: int, output: str, seconds: float) -> str | None:
    """Say what is wrong with an ending; None for a good one."""
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)} after {seconds:.1f} s"
    if seconds > MOST_SECONDS:
        return f"{seconds:.1f} s"
    if "Traceback (most recent call last)" in output or "panicked at" in output:
        return "a traceback"
    if "did not foresee" in output:
        return "an error that was not foreseen"
    obeyed = _OBEYED.search(output)
    if obeyed is not None:
        return f"an escape: {obeyed[0]!r} in {output[max(0, obeyed.start() - 40) : obeyed.end()]!r}"
    return (
        None
        if os.WEXITSTATUS(status) <= UNDECIDED
        else f"exit code {os.WEXITSTATUS(status)}"
    )
