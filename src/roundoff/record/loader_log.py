"""Notes what data loaders give: their settings, the order of samples, the first batches."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

#: Batches of each loader, and loaders, that are noted.
FIRST_BATCHES = 8
MOST_LOADERS = 8
#: Indexes of a batch that are noted.
MOST_INDEXES = 4096
#: Settings of a sampler that choose its samples.
_SAMPLER = (
    "num_replicas",
    "rank",
    "seed",
    "shuffle",
    "replacement",
    "num_samples",
    "drop_last",
    "batch_size",
)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Add = Callable[[str, str, str, Any], None]
AddBatch = Callable[[str, int, tuple[int, ...], Any], None]


class LoaderLog:
    """Watches the iterations of ``torch.utils.data.DataLoader``.

    Args:
        add: notes a setting: group, of what, name and value.
        add_batch: notes a batch: source, number, indexes and values.
        guarded: does what must never stop the program.
    """

    def __init__(
        self,
        add: Add,
        add_batch: AddBatch,
        guarded: Callable[[Callable[[], None]], None],
    ) -> None:
        self._guarded = guarded
        self._add = add
        self._add_batch = add_batch
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._iterators: weakref.WeakKeyDictionary[Any, _Iteration] = (
            weakref.WeakKeyDictionary()
        )
        self._given: dict[str, int] = {}

    def changes(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yield what is put in place of methods."""
        yield DataLoader, "__iter__", self._iterating
        yield _BaseDataLoaderIter, "_next_index", self._indexing
        yield _BaseDataLoaderIter, "__next__", self._giving

    def _iterating(self, original: Any, loader: Any) -> Any:
        name = self._names.get(loader)
        if name is None and len(self._names) < MOST_LOADERS:
            name = self._names[loader] = f"loader {len(self._names)}"
            self._guarded(
                lambda: self._describe(loader, f"loader {len(self._names) - 1}")
            )
        iterator = original(loader)
        if name is not None and self._given.get(name, 0) < FIRST_BATCHES:
            # what was fetched ahead is of this iteration, and not seen: see _indexing
            iteration = self._iterators.get(iterator) or _Iteration(name)
            iteration.name = name
            self._iterators[iterator] = iteration
        return iterator

    def _indexing(self, original: Any, iterator: Any) -> Any:
        indexes = original(iterator)
        iteration = self._iterators.get(iterator)
        if iteration is None and len(self._iterators) < MOST_LOADERS:
            # workers are given indexes before __iter__ returns
            iteration = self._iterators[iterator] = _Iteration("")
        if iteration is not None and len(iteration.indexes) < FIRST_BATCHES:
            iteration.indexes.append(_numbers(indexes))
        return indexes

    def _giving(self, original: Any, iterator: Any) -> Any:
        batch = original(iterator)
        iteration = self._iterators.get(iterator)
        if iteration is not None and iteration.name:
            self._guarded(lambda: self._note(iteration, batch))
        return batch

    def _note(self, iteration: _Iteration, batch: Any) -> None:
        number = self._given.get(iteration.name, 0)
        if number >= FIRST_BATCHES:
            return
        self._given[iteration.name] = number + 1
        place = iteration.given
        iteration.given += 1
        is_known = place < len(iteration.indexes)
        indexes = iteration.indexes[place] if is_known else ()
        self._add_batch(iteration.name, number, indexes, batch)

    def _describe(self, loader: Any, name: str) -> None:
        for setting, value in loader_settings(loader).items():
            self._add("data", name, setting, value)


class _Iteration:
    """One pass through a loader.

    Attributes:
        name: of the loader; empty until it is known.
        indexes: of its first batches.
        given: how many batches it has given.
    """

    __slots__ = ("given", "indexes", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.indexes: list[tuple[int, ...]] = []
        self.given = 0


def loader_settings(loader: Any) -> dict[str, Any]:
    """Return what a loader says of itself; what it does not say is left out."""
    sampler = loader.sampler
    settings: dict[str, Any] = {
        "batch size": loader.batch_size,
        "drop_last": loader.drop_last,
        "sampler": type(sampler).__name__,
        "data set": type(loader.dataset).__name__,
        "workers": loader.num_workers,
    }
    if loader.batch_size is None and loader.batch_sampler is not None:
        settings["batch size"] = getattr(loader.batch_sampler, "batch_size", None)
        settings["batch sampler"] = type(loader.batch_sampler).__name__
    settings["samples"] = _length(loader.dataset)
    settings["batches of an epoch"] = _length(loader)
    for name in _SAMPLER:
        value = getattr(sampler, name, None)
        if isinstance(value, bool | int | float | str):
            settings[f"sampler's {name}"] = value
    if "shuffle" not in vars(sampler):
        settings["shuffle"] = type(sampler).__name__ in ("RandomSampler",)
    for holder in (loader, sampler):
        generator = getattr(holder, "generator", None)
        if generator is not None:
            settings["seed of the order"] = generator.initial_seed()
    transform = _transform(loader.dataset)
    if transform:
        settings["transform"] = transform
    collate = getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__)
    settings["collate function"] = collate
    return settings


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError, ValueError):
        return None


def _transform(dataset: Any) -> str:
    """Return a data set's ``transform`` in its own words, without addresses."""
    for _ in range(4):  # a subset of a subset
        transform = getattr(dataset, "transform", None)
        if transform is not None:
            break
        dataset = getattr(dataset, "dataset", None)
    else:
        return ""
    if transform is None:
        return ""
    plain: Any = object.__repr__
    if type(transform).__repr__ is plain or not hasattr(transform, "__dict__"):
        return str(getattr(transform, "__name__", type(transform).__name__))
    return _ADDRESS.sub("", " ".join(repr(transform).split()))[:1000]


def _numbers(indexes: Any) -> tuple[int, ...]:
    if isinstance(indexes, int):
        return (indexes,)
    if not isinstance(indexes, list | tuple):
        return ()
    return tuple(i for i in indexes[:MOST_INDEXES] if isinstance(i, int))
