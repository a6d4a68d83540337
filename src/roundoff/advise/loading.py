"""What the batches cost: how long a step waits for them, which files they read, and what
their loader does."""

from __future__ import annotations

import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from roundoff.workload import Workload

#: Batches that are loaded for the measurement.
LOADED = 6
#: Functions of a loader with these words in their names prepare images.
RESIZING = ("resize", "interpolate", "thumbnail", "rescale")
DECODING = ("decode", "imread", "read_image", "_open_image")


@dataclass(frozen=True)
class Loading:
    """What the batches of a workload cost.

    Attributes:
        batches: that were loaded.
        load_seconds: of a batch, by the wall clock.
        step_seconds: of a step between two of them, as it would be with the changes
            that are kept.
        files: opened for reading while loading, with their bytes.
        resize_share: part of the loading in functions that resize, 0 to 1.
        decode_share: likewise in those that decode.
        is_repeatable: a second pass gives the same first batch.
        loader: the ``DataLoader``, where the batches come from one.
    """

    batches: int
    load_seconds: float
    step_seconds: float
    files: tuple[tuple[Path, int], ...]
    resize_share: float
    decode_share: float
    is_repeatable: bool
    loader: DataLoader[Any] | None

    @property
    def wait_share(self) -> float:
        """The part of a step and its loading that is loading, 0 to 1."""
        whole = self.load_seconds + self.step_seconds
        return self.load_seconds / whole if whole else 0.0


def can_load_again(workload: Workload) -> bool:
    """Return True where batches are loaded at all: not for a list in memory, nor an
    iterator that has ended."""
    source: Any = workload.source
    return not isinstance(source, list | tuple | Iterator)


def _is_remade(workload: Workload) -> bool:
    source: Any = workload.source
    return callable(source) and not isinstance(source, Iterable)


def measure_loading(workload: Workload, step: Callable[[Any], object]) -> Loading:
    """Go through the batches with a step after each, as training does.

    Args:
        workload: whose batches are gone through anew, twice, the second time profiled.
        step: what is done with a batch.
    """
    opened: dict[Path, int] = {}
    waited = 0.0
    worked = 0.0
    number = 0
    first: Any = None
    loader: DataLoader[Any] | None = None
    with _opened_files_into(opened):
        start = time.perf_counter()
        source = batches_anew(workload)
        if isinstance(source, DataLoader):
            loader = source
        for batch in islice(source, LOADED):
            waited += time.perf_counter() - start
            if number == 0:
                first = batch
            number += 1
            start = time.perf_counter()
            step(batch)
            worked += time.perf_counter() - start
            start = time.perf_counter()
        number = _all_of_list(source, number)
    shares, second = _profiled(workload)
    return Loading(
        batches=number,
        load_seconds=waited / max(number, 1),
        step_seconds=worked / max(min(number, LOADED), 1),
        files=tuple(opened.items()),
        resize_share=shares[0],
        decode_share=shares[1],
        is_repeatable=_are_equal(first, second),
        loader=loader,
    )


def batches_anew(workload: Workload) -> Iterable[Any]:
    """Return the batches as the workload gives them, loaded again."""
    source: Any = workload.source
    batches: Iterable[Any] = source() if _is_remade(workload) else source
    return batches


def _all_of_list(source: Any, number: int) -> int:
    """Return how many batches were loaded: all of a list, though a few were run."""
    return len(source) if isinstance(source, list | tuple) else number


def _profiled(workload: Workload) -> tuple[tuple[float, float], Any]:
    """Return the shares of resizing and of decoding, and the first batch again."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        batches = list(islice(batches_anew(workload), LOADED))
    finally:
        profiler.disable()
    statistics: Any = pstats.Stats(profiler)
    total = statistics.total_tt or 1.0
    shares = (
        _share_of(statistics, RESIZING, total),
        _share_of(statistics, DECODING, total),
    )
    return shares, batches[0] if batches else None


def _share_of(statistics: Any, words: tuple[str, ...], total: float) -> float:
    """Return the largest share of a function whose name has one of the words."""
    seconds = [
        cumulative
        for (_, _, name), (_, _, _, cumulative, _) in statistics.stats.items()
        if any(word in name.lower() for word in words)
    ]
    return min(1.0, max(seconds, default=0.0) / total)


def _are_equal(first: Any, second: Any) -> bool:
    ones = [leaf for leaf in tree_leaves(first) if isinstance(leaf, Tensor)]
    others = [leaf for leaf in tree_leaves(second) if isinstance(leaf, Tensor)]
    if len(ones) != len(others):
        return False
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


class _Audit:
    """Notes files that are opened, while it is on; Python cannot take a hook away."""

    def __init__(self) -> None:
        self.opened: dict[Path, int] | None = None
        self._is_installed = False

    def install(self) -> None:
        if not self._is_installed:
            sys.addaudithook(self._note)
            self._is_installed = True

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or self.opened is None:
            return
        path, mode = arguments[:2]
        is_read = not isinstance(mode, str) or mode.startswith("r")
        if not is_read or not isinstance(path, str | bytes | os.PathLike):
            return
        opened = self.opened
        self.opened = None  # asking for the size must not be noted itself
        file = Path(os.fsdecode(path))
        if file.suffix not in _CODE and file.is_file():
            opened[file] = file.stat().st_size
        self.opened = opened


#: Files that imports open.
_CODE = (".py", ".pyc", ".so", ".pyi")
_AUDIT = _Audit()


@contextmanager
def _opened_files_into(opened: dict[Path, int]) -> Iterator[None]:
    _AUDIT.install()
    _AUDIT.opened = opened
    try:
        yield
    finally:
        _AUDIT.opened = None
