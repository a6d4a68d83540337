"""Several runs of a model kept in step: each stops at a decision until it is made.

A run is a thread, of which one at a time is awake: this is no parallel work, but a way to
stop a forward pass in the middle of whatever code the user's model is made of. All draw
the same random numbers, as they would one after the other from the same state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from roundoff.preserve import random_states, set_random_states


@dataclass
class Request:
    """What one run waits for.

    Attributes:
        run: number of the run.
        key: what has to be decided.
        rank: where in the model; the lowest is decided first.
        subject: what it is decided from.
        answer: set by the decision.
    """

    run: int
    key: str
    rank: int
    subject: Any
    answer: Any = None


class Stopped(BaseException):
    """Raised inside a run whose fellows have failed."""


@dataclass
class _Run:
    number: int
    body: Callable[[], None]
    random: tuple[Tensor, ...]
    awake: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    request: Request | None = None
    error: BaseException | None = None
    ended: bool = False


class Lockstep:
    """Runs bodies side by side, and decides what they wait for.

    ``decide`` gets all requests that wait for the earliest decision, and sets their
    answers. Runs that skip a decision do not hold up the others: what is earliest (lowest
    ``rank``) among all that wait is decided with the runs that wait for it.

    Example:
        >>> def decide(requests):
        ...     for request in requests:
        ...         request.answer = sum(r.subject for r in requests)
        >>> totals, steps = [], Lockstep(decide)
        >>> steps.run([lambda i=i: totals.append(steps.ask("total", 0, i)) for i in range(4)])
        >>> totals
        [6, 6, 6, 6]
    """

    def __init__(self, decide: Callable[[list[Request]], None]) -> None:
        self.decide = decide
        self._main = threading.Semaphore(0)
        self._local = threading.local()
        self._stopping = False

    def ask(self, key: str, rank: int, subject: Any) -> Any:
        """Wait, in a run, until this has been decided, and return the answer."""
        run: _Run = self._local.run
        request = Request(run.number, key, rank, subject)
        run.request = request
        self._main.release()
        run.awake.acquire()
        if self._stopping:
            raise Stopped
        run.request = None
        return request.answer

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Run them all to their ends.

        What a body, or ``decide``, raises is raised here, when all others have stopped.
        """
        random = random_states()
        runs = [_Run(i, body, random) for i, body in enumerate(bodies)]
        threads = [
            threading.Thread(target=self._run_body, args=(run,), daemon=True)
            for run in runs
        ]
        for thread in threads:
            thread.start()
        try:
            for run in runs:
                self._wake(run)
            self._decide_all(runs)
        finally:
            self._stop(runs)
            for thread in threads:
                thread.join()

    def _decide_all(self, runs: Sequence[_Run]) -> None:
        """Make decisions, earliest first, until no run waits."""
        while True:
            waiting = [run.request for run in runs if run.request is not None]
            if not waiting:
                return
            first = min(waiting, key=lambda request: request.rank)
            chosen = [request for request in waiting if request.key == first.key]
            self.decide(chosen)
            for request in chosen:
                self._wake(runs[request.run])

    def _stop(self, runs: Sequence[_Run]) -> None:
        """Let every run end that has not."""
        self._stopping = True
        for run in runs:
            while not run.ended:
                run.awake.release()
                self._main.acquire()

    def _wake(self, run: _Run) -> None:
        """Let a run go on until it waits again or ends; raise what it raised."""
        set_random_states(run.random)
        run.awake.release()
        self._main.acquire()
        run.random = random_states()
        if run.error is not None:
            raise run.error

    def _run_body(self, run: _Run) -> None:
        self._local.run = run
        run.awake.acquire()
        try:
            if not self._stopping:
                run.body()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
            run.error = error
        finally:
            run.ended = True
            run.request = None
            self._main.release()
