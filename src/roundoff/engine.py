"""Where tasks run: in this process, or on a Ray cluster. The results are the same, and in the order of the tasks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from roundoff.errors import RunError

_T = TypeVar("_T")

#: Seconds until an address is given up: to open a connection, and for the cluster behind it to answer.
CONNECT, ANSWER = 5.0, 15.0
_ENGINES = "local, ray, ray://host:port or ray:host:port"
# A process of its own finds out whether a cluster answers: ray.init waits for minutes where none does, cannot be
# interrupted, and ends its process on some faults.
_PROBE = "import sys, ray; ray.init(sys.argv[1], include_dashboard=False, log_to_driver=False, logging_level='critical')"


def run_tasks(
    function: Callable[..., _T],
    tasks: Iterable[Sequence[Any]],
    *,
    engine: str = "local",
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[_T]:
    """``[function(*task) for task in tasks]``, also on many machines.

    Args:
        function: for ``ray`` one that pickle finds by its name, at the top of an importable module.
        tasks: the positional arguments of each call. Empty: the result is empty, and no cluster is asked for.
        engine: ``local``: this process. ``ray``: the cluster this process is connected to, that of the environment
            variable ``RAY_ADDRESS``, or one started on this machine and ended with the work. ``ray://host:port``: a
            cluster through its client server. ``ray:host:port``: one that this machine is part of.
        workers: threads of ``local`` (None: the tasks run one after another in this thread), CPUs of a cluster
            that is started here (None: all). At least 1. A running cluster has its own.
        progress: called with (tasks done, tasks) after each.

    The error raised is that of the first task, in their order, that fails; tasks not begun by then never run. It has
    the class and the message it had where it was raised. Raises ``RunError`` for an unknown engine, where ray is missing,
    for a cluster that doesn't answer (within 20 s), and for one that loses a task, as when its process is killed.

    >>> run_tasks(divmod, [(7, 2), (9, 4)])
    [(3, 1), (2, 1)]
    """
    address = None if engine == "local" else _address(engine)
    if workers is not None and workers < 1:
        raise RunError(
            "no workers, no work",
            where="workers",
            expected="1 or more",
            got=str(workers),
        )
    calls = [tuple(task) for task in tasks]
    results: list[_T] = []
    for result in _results(function, calls, engine, address, workers) if calls else ():
        results.append(result)
        if progress is not None:
            progress(len(results), len(calls))
    return results


def _results(
    function: Callable[..., _T],
    calls: list[tuple[Any, ...]],
    engine: str,
    address: str | None,
    workers: int | None,
) -> Iterator[_T]:
    if engine != "local":
        with _cluster(address, workers) as ray:
            yield from _on_ray(ray, function, calls)
    elif workers is None or workers == 1:
        yield from (function(*call) for call in calls)
    else:
        pool = ThreadPoolExecutor(min(workers, len(calls)))
        try:
            yield from pool.map(_call, [function] * len(calls), calls)
        finally:
            pool.shutdown(cancel_futures=True)


def _call(function: Callable[..., _T], arguments: tuple[Any, ...]) -> _T:
    return function(*arguments)


def _address(engine: str) -> str | None:
    """What ``ray.init`` takes: the address in ``engine`` or ``RAY_ADDRESS``, None where neither gives one."""
    if engine == "ray":
        return os.environ.get("RAY_ADDRESS") or None
    rest = engine.removeprefix("ray:")
    if rest == engine or not rest.removeprefix("//"):
        raise RunError("unknown engine", where="engine", expected=_ENGINES, got=engine)
    return engine if rest.startswith("//") else rest


def _on_ray(
    ray: Any, function: Callable[..., _T], calls: list[tuple[Any, ...]]
) -> Iterator[_T]:
    there = ray.put(function)  # once, not with each call
    waiting = [ray.remote(_call).remote(there, call) for call in calls]
    try:
        while waiting:
            yield ray.get(waiting[0])
            del waiting[0]  # the cluster may forget the result
    except ray.exceptions.RayTaskError as error:
        if isinstance(
            error.cause, ray.exceptions.RayError
        ):  # of its own: the task's could not be pickled
            raise _lost(error.cause) from error
        raise error.cause from error
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise _lost(error) from error
    finally:
        for task in waiting:
            with suppress(ray.exceptions.RayError, ConnectionError):
                ray.cancel(task)


def _lost(error: Exception) -> RunError:
    return RunError(
        "the Ray cluster lost a task, or the error it ended with",
        where="engine",
        got=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:500]}",
        do="install the same roundoff on all its machines and see its logs; engine='local' runs the same here",
    )


@contextmanager
def _cluster(address: str | None, workers: int | None) -> Iterator[Any]:
    """The module ``ray``, connected. What is connected or started here is ended again."""
    try:
        import ray
    except ImportError as error:
        raise RunError(
            "the library ray is not installed",
            where="engine",
            got=str(error),
            do="pip install 'roundoff[ray]', or take engine='local'",
        ) from error
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here, os.environ.get("RAY_ADDRESS")):
            raise RunError(
                "this process is connected to another Ray cluster already",
                where="engine",
                expected=here,
                got=address,
                do="engine='ray' takes the one it is connected to",
            )
        yield ray
        return
    quiet: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "critical",
    }
    if address is not None:
        _check(address)
        ray.init(address, log_to_driver=False, logging_level="critical")
    else:
        with _no_reports():
            ray.init("local", num_cpus=workers, **quiet)
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _no_reports() -> Iterator[None]:
    """A cluster that is started meanwhile doesn't report its use to Ray's makers, unless the user has said that it may."""
    name = "RAY_USAGE_STATS_ENABLED"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]


def _check(address: str) -> None:
    """``RunError`` unless a cluster that this ray can speak to answers at the address."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), CONNECT).close()
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, address],
            capture_output=True,
            text=True,
            timeout=ANSWER,
            check=False,
        )
        fault = (
            None
            if done.returncode == 0
            else _last_line(done.stderr) or f"exit code {done.returncode}"
        )
    except subprocess.TimeoutExpired as error:
        said = (
            error.stderr.decode(errors="replace")
            if isinstance(error.stderr, bytes)
            else error.stderr
        )
        fault = f"no answer within {ANSWER:.0f} s. {_last_line(said or '')}".rstrip(
            ". "
        )
    except (
        OSError,
        OverflowError,
    ) as error:  # refused, no such host; a port above 65535
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        raise RunError(
            "no Ray cluster can be reached here",
            where=f"engine {address}",
            expected=_ENGINES,
            got=fault,
            do="start one there (ray start --head), or take engine='ray', which starts one on this machine",
        )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:500]
