"""One thread, and the list of slow tests.

The tensors of these tests are tiny, so that threads cost more time than they save.
``torch`` is imported where it is used: the process that hands the tests to others needs none.
"""

import contextlib
import functools
import gc
import itertools
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# a machine that is busy draws slowly: what is measured there is not the strategy
settings.register_profile("untimed", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

os.environ["OMP_NUM_THREADS"] = "1"
# the key by which recordings are known as one's own: of the tests, not of who runs them
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir(), "roundoff-tests"))

#: The functions that `make fast` leaves out, measured by `make times`.
SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")
#: Seconds of processor time of a test function, over all its parameters, with the
#: processes that it starts.
SLOW = 0.15


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Draw the weights that a file makes while it is imported alike, whatever came before."""
    if isinstance(collector, pytest.Module):
        import torch

        torch.manual_seed(1234)  # 0 is what tests begin with


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Give torch back the number of threads that a test has changed: pages show it."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else None
    yield
    if torch is not None and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def inference_session() -> Callable[..., Any]:
    """Open an ONNX file in ONNX Runtime, with kernels that are exact on every CPU."""
    onnxruntime = pytest.importorskip("onnxruntime")

    def opened(path: str | Path, **entries: str) -> Any:
        options = onnxruntime.SessionOptions()
        # without VNNI the usual kernels clip sums of two products to 16 bits
        options.add_session_config_entry("session.x64quantprecision", "1")
        for name, value in entries.items():
            options.add_session_config_entry(f"session.{name}", value)
        return onnxruntime.InferenceSession(path, options)

    return opened


@functools.cache
def _runs_bf16_lstm() -> bool:
    """Ask torch: oneDNN has an LSTM in bf16 only where the CPU has AVX512."""
    import torch
    from torch import nn

    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return False
    return True


@pytest.fixture
def bf16_lstm() -> None:
    """Skip the test where this CPU has no LSTM in bf16."""
    if not _runs_bf16_lstm():
        pytest.skip("this CPU has no LSTM kernel in bf16")


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Any]:
    """``recorded(work, model)`` records ``work(model)`` as one step and loads the run.

    With tensors unless ``keep`` says otherwise.
    """
    import torch

    import roundoff

    number = itertools.count()

    def record(
        work: Callable[..., object],
        model: Any = None,
        *,
        path: str | None = None,
        steps: int = 1,
        keep: str = "tensors",
        **options: Any,
    ) -> Any:
        torch.manual_seed(0)
        folder = tmp_path / (path or f"run{next(number)}")
        with roundoff.capture(folder, model, keep=keep, **options) as run:
            for _ in range(steps):
                work(model) if model is not None else work()
                run.step()
        return roundoff.load(folder)

    return record


@pytest.fixture(scope="session", name="TwoHeads")
def _two_heads() -> Any:
    """A model of two named outputs: scores of ten classes, and a price of about 5500."""
    import torch
    from torch import nn

    class TwoHeads(nn.Module):
        def __init__(self, function: Callable[..., Any] = torch.relu) -> None:
            super().__init__()
            self.function = function
            self.body = nn.Linear(16, 32)
            self.cls = nn.Linear(32, 10)
            self.price = nn.Linear(32, 1)
            nn.init.constant_(self.price.bias, 5500.0)

        def forward(self, x: Any) -> Any:
            h = self.function(self.body(x))
            return {"cls": self.cls(h), "price": self.price(h)}

    return TwoHeads


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times", action="store_true", help="measure the tests and list the slow ones"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("times"):
        config.pluginmanager.register(_Times(), "times")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples in helpers, not in the docstrings of tests."""
    collectors = yield
    if not file_path.name.startswith("test_"):
        return collectors
    return [c for c in collectors if type(c) is pytest.Module]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = _listed()
    for item in items:
        if _function(item) in slow:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Take what is imported out of the collector's sight: it is no garbage of any test."""
    gc.collect()
    gc.freeze()
    # what a test makes holds few cycles: looking for them costs a tenth of some tests
    gc.set_threshold(20_000, 20, 20)


def _listed() -> set[str]:
    return set(SLOW_TESTS.read_text(encoding="utf-8").splitlines())


def _function(item: pytest.Item) -> str:
    """The name of a test without its parameters."""
    return item.nodeid.partition("[")[0]


def _file(function: str) -> str:
    return function.partition("::")[0]


def _processor_seconds() -> float:
    mine = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime + children.ru_utime + children.ru_stime


class _Times:
    """Write the list of slow tests after a run in one process.

    A fixture that several tests share counts in full for each of them: the first pays for
    all, and where it is left out the next one does.
    A run of some tests changes the places of these alone.
    """

    def __init__(self) -> None:
        self.collected: set[str] = set()
        #: Of each function that ran: alone, without fixtures that are shared.
        self.seconds: dict[str, float] = {}
        #: By the place where a shared fixture is defined, and its name.
        self.shared: dict[tuple[str, str], float] = {}
        self.uses: dict[str, set[tuple[str, str]]] = {}
        self._inside = 0.0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.collected = {_function(item) for item in items}

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Callable[[], float]]:
        """Measure a block, without the blocks inside that are measured too."""
        outside = self._inside
        self._inside = 0.0
        start = _processor_seconds()
        seconds = 0.0
        yield lambda: seconds
        whole = _processor_seconds() - start
        seconds = whole - self._inside
        self._inside = outside + whole

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with self._alone() as seconds:
            result = yield
        name = _function(item)
        self.seconds[name] = seconds() + self.seconds.get(name, 0.0)
        names = set(getattr(item, "fixturenames", ()))
        self.uses.setdefault(name, set()).update(
            (place, fixture)
            for place, fixture in self.shared
            if fixture in names and item.nodeid.startswith(place)
        )
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        with self._alone() as seconds:
            result = yield
        key = (fixturedef.baseid, fixturedef.argname)
        self.shared[key] = max(seconds(), self.shared.get(key, 0.0))
        return result

    def pytest_sessionfinish(self) -> None:
        slow = {name for name in self.seconds if self._total(name) > SLOW}
        slow |= {name for name in _listed() if self._stays(name)}
        lines = "".join(f"{name}\n" for name in sorted(slow))
        SLOW_TESTS.write_text(lines, encoding="utf-8")

    def _total(self, name: str) -> float:
        shared = sum(self.shared[fixture] for fixture in self.uses[name])
        return self.seconds[name] + shared

    def _stays(self, name: str) -> bool:
        """True for a test that was not run and that is still there."""
        if name in self.seconds:
            return False
        files = {_file(function) for function in self.collected}
        elsewhere = _file(name) not in files and Path(_file(name)).exists()
        return name in self.collected or elsewhere
