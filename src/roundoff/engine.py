"""Run tasks in this process or on a Ray cluster: the same results, in the order of the tasks."""

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

#: Seconds until an address is given up: to open a connection.
CONNECT = 5.0
#: Seconds until an address is given up: for the cluster behind it to answer.
ANSWER = 15.0
_ENGINES = "local, ray, ray://host:port or ray:host:port"
# A process of its own asks if a cluster answers: ray.init waits for minutes where none
# does, cannot be interrupted, and ends its process on some faults.
_PROBE = (
    "import sys, ray; ray.init(sys.argv[1], include_dashboard=False, "
    "log_to_driver=False, logging_level='critical')"
)


def run_tasks(
    function: Callable[..., _T],
    tasks: Iterable[Sequence[Any]],
    *,
    engine: str = "local",
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[_T]:
    """Return ``[function(*task) for task in tasks]``, computed here or on many machines.

    Args:
        function: for ``ray`` one that pickle finds by its name, at the top of an
            importable module.
        tasks: the positional arguments of each call. Empty: the result is empty, and no
            cluster is asked for.
        engine: ``local``: this process. ``ray``: the cluster this process is connected
            to, that of the environment variable ``RAY_ADDRESS``, or one started on this
            machine and ended with the work. ``ray://host:port``: a cluster through its
            client server. ``ray:host:port``: one that this machine is part of.
        workers: threads of ``local`` (None: the tasks run one after another in this
            thread), CPUs of a cluster that is started here (None: all). At least 1. A
            running cluster has its own.
        progress: called with (tasks done, tasks) after each.

    The error raised is that of the first task, in their order, that fails; tasks not
    begun by then never run. It has the class and the message it had where it was
    raised. Raises ``RunError`` for an unknown engine, where ray is missing, for a
    cluster that doesn't answer (within 20 s), and for one that loses a task, as when
    its process is killed.

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


def check_engine(engine: str) -> None:
    """Raise ``RunError`` for what is no place where tasks can run; nothing is started."""
    if engine != "local":
        _address(engine)


def _address(engine: str) -> str | None:
    """The address in ``engine`` or ``RAY_ADDRESS``, as ``ray.init`` takes it; None without one."""
    if engine == "ray":
        return os.environ.get("RAY_ADDRESS") or None
    address = engine.removeprefix("ray:")
    if address == engine or not address.removeprefix("//"):
        raise RunError("unknown engine", where="engine", expected=_ENGINES, got=engine)
    return engine if address.startswith("//") else address


def _on_ray(
    ray: Any, function: Callable[..., _T], calls: list[tuple[Any, ...]]
) -> Iterator[_T]:
    shared = ray.put(function)  # once, not with each call
    waiting = [ray.remote(_call).remote(shared, call) for call in calls]
    try:
        while waiting:
            yield ray.get(waiting[0])
            del waiting[0]  # the cluster may forget the result
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ray.exceptions.RayError):
            # ray's own: the task's could not be pickled
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
        connected = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", connected, os.environ.get("RAY_ADDRESS")):
            raise RunError(
                "this process is connected to another Ray cluster already",
                where="engine",
                expected=connected,
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
    """Keep a cluster that is started meanwhile from reporting its use, unless the user
    allows it.
    """
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
    """Raise ``RunError`` unless a cluster that this ray can speak to answers at the address."""
    fault = _fault_of(address)
    if fault is not None:
        raise RunError(
            "no Ray cluster can be reached here",
            where=f"engine {address}",
            expected=_ENGINES,
            got=fault,
            do="start one there (ray start --head), or take engine='ray', which starts one on this machine",
        )


def _fault_of(address: str) -> str | None:
    """What keeps the cluster at an address from answering; None where it answers."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), CONNECT).close()
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE, address],
            capture_output=True,
            text=True,
            timeout=ANSWER,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        line = _last_line(_text(error.stderr))
        return f"no answer within {ANSWER:.0f} s. {line}".rstrip(". ")
    except (OSError, OverflowError) as error:
        # refused, no such host; a port above 65535
        return f"{type(error).__name__}: {error}"
    if probe.returncode == 0:
        return None
    return _last_line(probe.stderr) or f"exit code {probe.returncode}"


def _text(output: str | bytes | None) -> str:
    return (
        output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:500]
