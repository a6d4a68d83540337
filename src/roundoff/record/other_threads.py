"""Operators that other threads of the program call: recorded while those that were followed
before wait for them, counted where several run at once, in an order that no other run repeats.
"""

from __future__ import annotations

import concurrent.futures.thread as pools
import queue
import re
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from roundoff.record.step_boundaries import patched
from roundoff.unforeseen import OurPart

#: Seconds that a thread's first operator waits: for the thread of the recording to wait for it,
_FOR_HOME = 0.05
#: and for another one that was started together with it to end.
_FOR_ANOTHER = 1.0
_A_MOMENT = 0.0005
_OURS = "roundoff."


class Turn:
    """Which thread is recorded now.

    Attributes:
        home: the thread that the recording began in.
        holder: the one whose operators are recorded.
    """

    def __init__(self) -> None:
        self.home = threading.get_ident()
        self.holder = self.home

    def take(self, thread: int) -> bool:
        """Give a thread the turn; False where the one that has it, or home, goes on."""
        if self.holder == thread:
            return True
        if not (waits(self.holder) and waits(self.home)):
            return False
        self.holder = thread
        return True

    def wait_for(self, thread: int) -> bool:
        """Give a thread its first turn, as soon as those before it wait; False where
        they go on for long."""
        began = time.monotonic()
        while not self.take(thread):
            limit = _FOR_ANOTHER if waits(self.home) else _FOR_HOME
            if time.monotonic() - began > limit:
                return False
            time.sleep(_A_MOMENT)
        return True


class ThreadPart:
    """Whether one other thread is recorded: once it ran beside another, never again.

    Attributes:
        is_alone: no other one ran at the same time; None before its first operator.
    """

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.thread = threading.get_ident()
        self.is_alone: bool | None = None

    def is_recorded(self) -> bool:
        """Return True if the next operator of this thread can be recorded."""
        if self.is_alone is None:
            self.is_alone = self.turn.wait_for(self.thread)
        elif self.is_alone:
            self.is_alone = self.turn.take(self.thread)
        return self.is_alone


def waits(thread: int) -> bool:
    """Return True if a thread waits for others in the standard library, or has ended.

    Not where it takes from a queue, which others fill ahead of it, and not while it
    starts a thread.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    if frame is None:
        return True
    if frame.f_code.co_filename != threading.__file__:
        return _is_idle(frame)
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        if frame.f_code.co_name == "start":
            return False
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename != queue.__file__


def _is_idle(frame: FrameType) -> bool:
    """Return True for a worker without work, and an event loop without events."""
    file = frame.f_code.co_filename
    name = frame.f_code.co_name
    if file == selectors.__file__:
        return name == "select"
    return file == pools.__file__ and name == "_worker"


def kind_of(name: str) -> str:
    """Return the name of a thread without its numbers, which differ from run to run.

    >>> kind_of("ThreadPoolExecutor-0_1")
    'ThreadPoolExecutor-*_*'
    """
    return re.sub(r"\d+", "*", name)


@contextmanager
def followed(mode_of: Callable[[str], Any], ours: OurPart) -> Iterator[None]:
    """Put a mode around whatever threads run that are started while this is open.

    ``mode_of`` makes it from a thread's name, in that thread; ``ours`` keeps faults of
    this from the program.
    """

    def start(original: Any, thread: Any, *args: Any, **kwargs: Any) -> Any:
        ours(_replace_run, thread, mode_of, ours)
        return original(thread, *args, **kwargs)

    with patched((threading.Thread, "start", start)):
        yield


def _is_ours(thread: Any) -> bool:
    module = getattr(getattr(thread, "_target", None), "__module__", None)
    return isinstance(module, str) and module.startswith(_OURS)


def _replace_run(thread: Any, mode_of: Callable[[str], Any], ours: OurPart) -> None:
    if _is_ours(thread):
        return
    before = vars(thread).get("run")
    run = thread.run

    def run_in_mode() -> Any:
        if before is None:
            del thread.run
        else:
            thread.run = before
        with ours(mode_of, thread.name) or nullcontext():
            return run()

    thread.run = run_in_mode
