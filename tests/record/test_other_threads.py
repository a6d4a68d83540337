"""Operators of threads that the program starts: recorded where the others wait for them, and counted where they do not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundoff

Done = Callable[[], None]
X = torch.linspace(-1, 1, 24).reshape(4, 6)


def plain(model: nn.Module, head: nn.Module, done: Done) -> None:
    for _ in range(2):
        head(model(X)).square().sum().backward()
        done()


def in_a_thread(model: nn.Module, head: nn.Module, done: Done) -> None:
    thread = threading.Thread(target=plain, args=(model, head, done))
    thread.start()
    thread.join()


class Training(threading.Thread):
    """A thread with a ``run`` of its own."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = parts

    def run(self) -> None:
        plain(*self.parts)


def in_a_subclass(model: nn.Module, head: nn.Module, done: Done) -> None:
    thread = Training(model, head, done)
    thread.start()
    thread.join()


def forward_in_a_pool(model: nn.Module, head: nn.Module, done: Done) -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            y = pool.submit(model, X).result()
            head(y).square().sum().backward()
            done()


def forward_and_backward_in_a_pool(
    model: nn.Module, head: nn.Module, done: Done
) -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            loss = pool.submit(lambda: head(model(X)).square().sum()).result()
            pool.submit(loss.backward).result()
            done()


def recorded(folder: Path, run_with: Callable[..., None], level: str = "op") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    head = nn.Linear(5, 2)
    whole = nn.ModuleList([model, head])
    with roundoff.capture(folder, whole, level=level) as run:
        run_with(model, head, run.step)
    return roundoff.load(folder)


def rows(run: Any) -> list[tuple[Any, ...]]:
    columns = (
        "step",
        "phase",
        "module",
        "operator",
        "index",
        "inputs",
        "l2",
        "hash",
        "name",
    )
    return run.ops.select(columns).collect().rows()


@pytest.mark.parametrize("level", ["op", "module"])
@pytest.mark.parametrize(
    "run_with",
    [
        in_a_thread,
        in_a_subclass,
        forward_in_a_pool,
        forward_and_backward_in_a_pool,
    ],
)
def test_one_thread_while_the_others_wait_is_recorded_as_without_it(
    run_with: Callable[..., None], level: str, tmp_path: Path
) -> None:
    expected = recorded(tmp_path / "plain", plain, level)
    run = recorded(tmp_path / "run", run_with, level)
    assert rows(run) == rows(expected)
    assert not run.about.coverage.other_threads


def test_threads_that_are_joined_together_are_recorded(tmp_path: Path) -> None:
    """Each module once, in whatever order; the main thread waits for all."""
    parts = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))
    results: list[Any] = [None] * 3

    def work(i: int) -> None:
        results[i] = parts[i](X)

    with roundoff.capture(tmp_path / "run", parts) as run:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sum(results).sum().backward()
        run.step()
    loaded = roundoff.load(tmp_path / "run")
    found = loaded.ops.collect().to_dicts()
    products = [(r["phase"], r["module"], r["operator"]) for r in found]
    for i in range(3):
        assert ("forward", str(i), "addmm") in products
    names = {row["name"] for row in found}
    assert {f"{i}.weight.grad" for i in range(3)} <= names
    assert not loaded.about.coverage.other_threads


def test_a_loader_is_counted(tmp_path: Path) -> None:
    """It runs ahead of the training: where its calls fall differs from run to run."""
    batches: Any = queue.Queue(2)

    def load() -> None:
        for i in range(4):
            batches.put((X * i).sin())
        batches.put(None)

    model = nn.Linear(6, 3)
    with roundoff.capture(tmp_path / "run", model) as run:
        thread = threading.Thread(target=load, name="loader-7")
        thread.start()
        while (batch := batches.get()) is not None:
            model(batch).sum().backward()
            run.step()
        thread.join()
    loaded = roundoff.load(tmp_path / "run")
    assert "sin" not in set(loaded.ops.collect()["operator"])
    assert loaded.about.coverage.other_threads == {"loader-*": 8}


def test_what_a_thread_that_is_not_recorded_writes_is_looked_at_again(
    tmp_path: Path,
) -> None:
    value = torch.ones(3)
    told: Any = queue.Queue()
    written: Any = queue.Queue()

    def work() -> None:
        told.get()
        value.mul_(5.0)
        written.put(None)

    with roundoff.capture(tmp_path / "run") as run:
        thread = threading.Thread(target=work)
        thread.start()
        value.exp()
        told.put(None)
        written.get()  # takes from a queue: a loader would be running ahead
        value.neg()
        run.step()
        thread.join()
    loaded = roundoff.load(tmp_path / "run")
    inputs = loaded.ops.collect().filter(operator="input")
    assert inputs["l2"].to_list() == pytest.approx([3**0.5, 5 * 3**0.5])
    assert loaded.about.coverage.other_threads == {"Thread-* (work)": 1}


def test_threads_are_as_before_afterwards(tmp_path: Path) -> None:
    start = threading.Thread.start
    thread = threading.Thread(target=lambda: None)
    with roundoff.capture(tmp_path / "run") as run:
        thread.start()
        thread.join()
        X.sin()
        run.step()
    assert threading.Thread.start is start
    assert "run" not in vars(thread)
