"""One thread: the tensors of these tests are tiny, so that threads cost more time than they save."""

import functools
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

torch.set_num_threads(1)

#: The functions that `make fast` leaves out, measured by `make times`.
SLOW_TESTS = Path(__file__).with_name("slow_tests.txt")
#: Seconds of processor time of a test function, over all its parameters, with the
#: processes that it starts.
SLOW = 0.08


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times", action="store_true", help="measure the tests and list the slow ones"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("times"):
        config.pluginmanager.register(_Times(), "times")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = set(SLOW_TESTS.read_text(encoding="utf-8").splitlines())
    for item in items:
        if _function(item) in slow:
            item.add_marker(pytest.mark.slow)


def _function(item: pytest.Item) -> str:
    """The name of a test without its parameters."""
    return item.nodeid.partition("[")[0]


def _processor_seconds() -> float:
    mine = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime + children.ru_utime + children.ru_stime


class _Times:
    """Write the list of slow tests after a run of all, in one process."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start = _processor_seconds()
        result = yield
        seconds = _processor_seconds() - start
        name = _function(item)
        self.seconds[name] = seconds + self.seconds.get(name, 0.0)
        return result

    def pytest_sessionfinish(self) -> None:
        slow = sorted(name for name, s in self.seconds.items() if s > SLOW)
        SLOW_TESTS.write_text("".join(f"{name}\n" for name in slow), encoding="utf-8")
