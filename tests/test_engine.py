"""The same results wherever tasks run. With ray installed, on clusters of this machine that really run."""

from __future__ import annotations

import importlib
import importlib.util
import math
import operator
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from roundoff.engine import run_tasks
from roundoff.errors import InfeasibleError, RoundoffError, RunError

RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not RAY, reason="ray is not installed")
# ray's processes and sockets end after the test that started them
quiet = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

SOURCE = """
import os
import threading
import time

from roundoff.errors import InfeasibleError, RunError

class Odd(Exception):
    def __init__(self, left, right):
        super().__init__(left)
        self.lock = threading.Lock()  # cannot be pickled

def damaged(path):
    raise RunError("damaged", where=path, expected="a run", got="nothing", do="record it again")

def infeasible():
    raise InfeasibleError("no plan", best_db=71.5, pinned=["head/linear"])

def odd():
    raise Odd(1, 2)

def die():
    os._exit(3)

def process():
    return os.getpid()

def note(folder, name, fails):
    open(os.path.join(folder, name), "w").close()
    if fails:
        raise ValueError(name)
    time.sleep(0.001)  # longer than it takes to hand out a task: all are waiting at the error
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A module of functions that other processes can import, as those of an installed package."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "roundoff_test_work.py").write_text(SOURCE)
    source = Path(__file__).parents[1] / "src"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{source}")
        # Ray lets no other process into a cluster without its token, and makes one up where none is given.
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield importlib.import_module("roundoff_test_work")
        del sys.modules["roundoff_test_work"]


@pytest.fixture(scope="module")
def cluster(work):
    """A Ray cluster of two workers that this process is connected to."""
    import ray

    ray.init(
        "local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="critical",
    )
    yield ray
    ray.shutdown()


@pytest.mark.parametrize("workers", [None, 1, 2, 50])
def test_local_results_are_in_the_order_of_tasks(workers):
    tasks = [(n, k) for n in range(12) for k in range(n)]
    seen = []
    found = run_tasks(
        math.comb, iter(tasks), workers=workers, progress=lambda *at: seen.append(at)
    )
    assert found == [math.comb(n, k) for n, k in tasks]
    assert seen == [(i + 1, len(tasks)) for i in range(len(tasks))]


def test_local_runs_in_this_thread_unless_workers_are_asked_for():
    assert run_tasks(threading.get_ident, [()] * 3) == [threading.get_ident()] * 3
    assert threading.get_ident() not in run_tasks(
        threading.get_ident, [()] * 3, workers=2
    )


@pytest.mark.parametrize("engine", ["local", "ray", "ray://127.0.0.1:1"])
def test_no_tasks_no_cluster(engine):
    assert run_tasks(operator.add, [], engine=engine) == []


@pytest.mark.parametrize("workers", [None, 2])
def test_the_first_error_ends_it(work, tmp_path, workers):
    tasks = [(str(tmp_path), f"{i:03d}", i == 1) for i in range(300)]
    with pytest.raises(ValueError, match="^001$"):
        run_tasks(work.note, tasks, workers=workers)
    # with two threads a few more tasks have begun by the time the error is seen; most never do
    assert sorted(os.listdir(tmp_path))[:2] == ["000", "001"]
    assert len(os.listdir(tmp_path)) == 2 or (
        workers == 2 and len(os.listdir(tmp_path)) < 300
    )


@pytest.mark.parametrize("engine", ["", "spark", "rayon", "ray:", "ray://", "RAY"])
def test_an_unknown_engine(engine):
    with pytest.raises(RunError, match="engine: unknown engine") as error:
        run_tasks(operator.add, [(1, 2)], engine=engine)
    assert error.value.expected == "local, ray, ray://host:port or ray:host:port"


@pytest.mark.parametrize("workers", [0, -1])
def test_no_workers(workers):
    with pytest.raises(RunError, match="workers: no workers"):
        run_tasks(operator.add, [(1, 2)], workers=workers)


@pytest.mark.skipif(RAY, reason="ray is installed")
def test_without_ray_the_error_names_the_extra():
    with pytest.raises(
        RunError,
        match=r"the library ray is not installed(.|\n)*pip install 'roundoff\[ray\]'",
    ):
        run_tasks(operator.add, [(1, 2)], engine="ray")


@needs_ray
@pytest.mark.parametrize("engine", ["ray://127.0.0.1:{}", "ray:127.0.0.1:{}", "ray"])
def test_nobody_at_the_address(engine, monkeypatch):
    with socket.socket() as closed:  # bound and not listening: refused
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        begin = time.perf_counter()
        with pytest.raises(
            RunError, match="no Ray cluster can be reached here"
        ) as error:
            run_tasks(operator.add, [(1, 2)], engine=engine.format(port))
    assert time.perf_counter() - begin < 10
    assert "ConnectionRefusedError" in error.value.got
    assert str(port) in error.value.where
    assert "ray start --head" in error.value.do


@needs_ray
def test_somebody_else_at_the_address(monkeypatch):
    monkeypatch.setattr("roundoff.engine.ANSWER", 3.0)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(
            RunError, match="no Ray cluster can be reached here"
        ) as error:
            run_tasks(
                operator.add, [(1, 2)], engine=f"ray:127.0.0.1:{mute.getsockname()[1]}"
            )
    assert error.value.got.startswith("no answer within 3 s")


CLUSTER = """
import ray
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="critical")
print(ray.get_runtime_context().gcs_address, flush=True)
input()
"""


@needs_ray
@quiet
def test_a_cluster_of_another_process(work, monkeypatch):
    import ray

    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    with subprocess.Popen([sys.executable, "-c", CLUSTER], text=True, **pipes) as other:
        address = other.stdout.readline().strip()
        monkeypatch.setenv("RAY_ADDRESS", address)
        for engine in ("ray", f"ray:{address}"):
            assert run_tasks(operator.add, [(1, 2), (3, 4)], engine=engine) == [3, 7]
            assert not ray.is_initialized()
        other.communicate("")


@needs_ray
@quiet
def test_a_cluster_that_is_started_is_ended(work, monkeypatch):
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for _ in range(2):  # after an error too
        with pytest.raises(RunError, match="damaged"):
            run_tasks(work.damaged, [("a",)], engine="ray", workers=2)
        assert not ray.is_initialized()
    assert "RAY_USAGE_STATS_ENABLED" not in os.environ


@needs_ray
@quiet
class TestCluster:
    def test_results_are_those_of_local(self, cluster, work):
        tasks = [(float(i), 3.0) for i in range(100)]
        seen = []
        found = run_tasks(
            math.fmod, tasks, engine="ray", progress=lambda *at: seen.append(at)
        )
        assert found == run_tasks(math.fmod, tasks)
        assert seen[-1] == (100, 100)
        assert os.getpid() not in run_tasks(work.process, [()] * 4, engine="ray")

    def test_a_cluster_of_the_program_stays(self, cluster):
        run_tasks(operator.add, [(1, 2)], engine="ray")
        here = cluster.get_runtime_context().gcs_address
        run_tasks(operator.add, [(1, 2)], engine=f"ray:{here}")
        assert cluster.is_initialized()

    def test_it_is_not_swapped_for_another(self, cluster):
        with pytest.raises(RunError, match="connected to another Ray cluster already"):
            run_tasks(operator.add, [(1, 2)], engine="ray://127.0.0.1:1")

    def test_errors_are_the_same_as_local(self, cluster, work):
        for function, task in (
            (work.damaged, ("a",)),
            (work.infeasible, ()),
            (operator.truediv, (1, 0)),
        ):
            errors = []
            for engine in ("local", "ray"):
                with pytest.raises(Exception) as error:  # noqa: PT011 - compared below
                    run_tasks(function, [task], engine=engine)
                errors.append(error.value)
            local, far = errors
            assert type(far) is type(local)
            assert str(far) == str(local)
            if isinstance(local, RoundoffError):
                assert vars(far) == vars(local)
        assert issubclass(InfeasibleError, RoundoffError)

    def test_the_first_in_order_fails(self, cluster, work, tmp_path):
        tasks = [(str(tmp_path), str(i), i in (3, 7)) for i in range(10)]
        with pytest.raises(ValueError, match="^3$"):
            run_tasks(work.note, tasks, engine="ray")

    def test_an_error_that_cannot_travel(self, cluster, work):
        with pytest.raises(
            RunError, match="the Ray cluster lost a task, or the error it ended with"
        ) as error:
            run_tasks(work.odd, [()], engine="ray")
        assert "Odd" in error.value.got

    def test_a_task_whose_process_dies(self, cluster, work):
        with pytest.raises(RunError, match="the Ray cluster lost a task") as error:
            run_tasks(work.die, [()], engine="ray")
        assert "WorkerCrashedError" in error.value.got
