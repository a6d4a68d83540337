"""Several runs of a model kept in step: each stops where something has to be decided, and goes on when it has been.

A run is a thread, of which one at a time is awake: this is no parallel work, but a way to stop a forward pass in the middle
of whatever code the user's model is made of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Request:
    """What one run waits for: ``key`` says what has to be decided, ``rank`` where in the model, ``given`` with what."""

    run: int
    key: str
    rank: int
    given: Any
    answer: Any = None


class Stopped(BaseException):
    """Raised inside a run whose fellows have failed."""


@dataclass
class _Run:
    number: int
    body: Callable[[], None]
    awake: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    request: Request | None = None
    error: BaseException | None = None
    ended: bool = False


class Lockstep:
    """Runs bodies side by side; ``decide`` gets all requests that wait for the earliest decision, and sets their answers.

    Runs that skip a decision do not hold up the others: what is earliest (lowest ``rank``) among all that wait is decided
    with the runs that wait for it.

    Example:
        >>> def decide(requests):
        ...     for request in requests:
        ...         request.answer = sum(r.given for r in requests)
        >>> found, steps = [], Lockstep(decide)
        >>> steps.run([lambda i=i: found.append(steps.ask("total", 0, i)) for i in range(4)])
        >>> found
        [6, 6, 6, 6]
    """

    def __init__(self, decide: Callable[[list[Request]], None]) -> None:
        self.decide = decide
        self._main = threading.Semaphore(0)
        self._own = threading.local()
        self._stopping = False

    def ask(self, key: str, rank: int, given: Any) -> Any:
        """Called in a run: wait until this has been decided, and return the answer."""
        run: _Run = self._own.run
        run.request = Request(run.number, key, rank, given)
        self._main.release()
        run.awake.acquire()
        if self._stopping:
            raise Stopped
        request, run.request = run.request, None
        return request.answer

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Run them all to their ends. What a body, or ``decide``, raises is raised here, when all others have stopped."""
        runs = [_Run(i, body) for i, body in enumerate(bodies)]
        threads = [
            threading.Thread(target=self._body, args=(run,), daemon=True)
            for run in runs
        ]
        for thread in threads:
            thread.start()
        try:
            for run in runs:
                self._wake(run)
            while waiting := [run.request for run in runs if run.request is not None]:
                first = min(waiting, key=lambda r: r.rank)
                chosen = [r for r in waiting if r.key == first.key]
                self.decide(chosen)
                for request in chosen:
                    self._wake(runs[request.run])
        finally:
            self._stopping = True
            for run in runs:
                while not run.ended:
                    run.awake.release()
                    self._main.acquire()
            for thread in threads:
                thread.join()

    def _wake(self, run: _Run) -> None:
        run.awake.release()
        self._main.acquire()
        if run.error is not None:
            raise run.error

    def _body(self, run: _Run) -> None:
        self._own.run = run
        run.awake.acquire()
        try:
            if not self._stopping:
                run.body()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
            run.error = error
        finally:
            run.ended, run.request = True, None
            self._main.release()
