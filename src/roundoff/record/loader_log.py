"""Notes what data loaders give: their settings, the order of samples, the first batches."""

from __future__ import annotations

import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from roundoff.record.model_facts import is_plain

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
_LONGEST_TRANSFORM = 1000
#: Epochs whose order is noted.
MOST_EPOCHS = 32
#: Values of an array that are noted each.
_FEW = 8
#: Batches that workers may be asked for before a loader gives its first.
MOST_AHEAD = 1024
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
        self._epochs: dict[str, int] = {}

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
        epoch = self._epochs.get(name or "", 0)
        if name is not None and epoch < MOST_EPOCHS:
            self._epochs[name] = epoch + 1
            # what was fetched ahead is of this iteration, and not seen: see _indexing
            iteration = self._iterators.get(iterator) or _Iteration(name)
            iteration.name = name
            iteration.epoch = epoch
            self._iterators[iterator] = iteration
        return iterator

    def _indexing(self, original: Any, iterator: Any) -> Any:
        indexes = original(iterator)
        iteration = self._iterators.get(iterator)
        if iteration is None and len(self._iterators) < MOST_LOADERS:
            # workers are given indexes before __iter__ returns
            iteration = self._iterators[iterator] = _Iteration("")
        if iteration is not None:
            if iteration.name or len(iteration.ahead) < MOST_AHEAD:
                iteration.ahead.append(indexes)
            if len(iteration.indexes) < FIRST_BATCHES:
                iteration.indexes.append(_numbers(indexes))
        return indexes

    def _giving(self, original: Any, iterator: Any) -> Any:
        try:
            batch = original(iterator)
        except StopIteration:
            ended = self._iterators.get(iterator)
            if ended is not None and ended.epoch:
                self._guarded(lambda: self._note_order(ended))
            raise
        iteration = self._iterators.get(iterator)
        if iteration is not None and iteration.name:
            self._guarded(lambda: self._note(iteration, batch))
        return batch

    def _note(self, iteration: _Iteration, batch: Any) -> None:
        if iteration.follow_order():
            self._note_order(iteration)
        number = self._given.get(iteration.name, 0)
        if number >= FIRST_BATCHES:
            return
        self._given[iteration.name] = number + 1
        place = iteration.given
        iteration.given += 1
        is_known = place < len(iteration.indexes)
        indexes = iteration.indexes[place] if is_known else ()
        self._add_batch(iteration.name, number, indexes, batch)

    def _note_order(self, iteration: _Iteration) -> None:
        """Note the order of a later epoch, as far as it went."""
        if not iteration.ordered:
            return
        name = f"order of epoch {iteration.epoch + 1}"
        self._add("data", iteration.name, name, iteration.order.hexdigest()[:12])

    def _describe(self, loader: Any, name: str) -> None:
        for setting, value in loader_settings(loader).items():
            self._add("data", name, setting, value)


class _Iteration:
    """One pass through a loader.

    Attributes:
        name: of the loader; empty until it is known.
        indexes: of its first batches.
        given: how many batches it has given.
        epoch: how many passes through the loader came before.
        ahead: indexes of batches that are not given yet.
        order: a hash of the indexes that were given.
        ordered: of how many batches.
    """

    __slots__ = ("ahead", "epoch", "given", "indexes", "name", "order", "ordered")

    def __init__(self, name: str) -> None:
        self.name = name
        self.indexes: list[tuple[int, ...]] = []
        self.given = 0
        self.epoch = 0
        self.ahead: deque[Any] = deque()
        self.order = xxhash.xxh3_64()
        self.ordered = 0

    def follow_order(self) -> bool:
        """Take the indexes of the batch that is given; return whether to note them: in
        a later epoch, at a power of two of batches."""
        if not self.ahead:
            return False
        indexes = _numbers(self.ahead.popleft())
        if not self.epoch or not indexes:
            return False
        self.order.update(str(indexes).encode())
        self.ordered += 1
        return self.ordered & (self.ordered - 1) == 0


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
    for name, value in vars(sampler).items():
        if isinstance(value, Tensor | np.ndarray):
            settings[f"sampler's {name}"] = _array(value)
    settings |= _data_set_settings(loader.dataset)
    transform = _transform(loader.dataset)
    if transform:
        settings["transform"] = transform
    collate = getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__)
    settings["collate function"] = collate
    return settings


def _data_set_settings(dataset: Any) -> dict[str, Any]:
    """Return the plain attributes of a data set, and which samples a subset takes."""
    settings: dict[str, Any] = {}
    for name, value in getattr(dataset, "__dict__", {}).items():
        if name.startswith("_") or not is_plain(value):
            continue
        settings[f"data set's {name}"] = value
    indices = getattr(dataset, "indices", None)
    if isinstance(indices, list | tuple | range | Tensor | np.ndarray):
        chosen = [int(each) for each in indices]
        shown = ", ".join(map(str, chosen[:4]))
        digest = xxhash.xxh3_64_hexdigest(str(chosen).encode())[:8]
        settings["samples of the subset"] = f"{len(chosen)}: {shown} … ({digest})"
        settings.pop("data set's indices", None)
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
    return described(transform)[:_LONGEST_TRANSFORM]


def described(thing: Any, depth: int = 3) -> str:
    """Return an object in its own words, or by class and plain attributes.

    >>> described(print), described([1, print])
    ('print', '[1, print]')
    """
    if is_plain(thing):
        return repr(thing)
    if isinstance(thing, list | tuple):
        return f"[{', '.join(described(each, depth - 1) for each in thing)}]"
    if isinstance(thing, Tensor | np.ndarray):
        return _array(thing)
    unbound: Any = object.__repr__
    if type(thing).__repr__ is not unbound and not callable_by_name(thing):
        return _ADDRESS.sub("", " ".join(repr(thing).split()))
    kind = str(getattr(thing, "__name__", type(thing).__name__))
    attributes = getattr(thing, "__dict__", {})
    if callable_by_name(thing) or not attributes or depth < 1:
        return kind
    words = ", ".join(
        f"{name}={described(value, depth - 1)}"
        for name, value in attributes.items()
        if not name.startswith("_")
    )
    return f"{kind}({words})"


def callable_by_name(thing: Any) -> bool:
    """Return True for functions and classes, which their names tell."""
    return hasattr(thing, "__name__")


def _array(values: Any) -> str:
    """Return a few values; of more their number, mean, and a short hash."""
    flat = torch.as_tensor(values).detach().cpu().reshape(-1)
    if not flat.numel() or flat.is_complex():
        return f"{flat.numel()} values"
    wide = flat.to(torch.float64)
    if len(wide) <= _FEW:
        return f"[{', '.join(f'{value:.6g}' for value in wide.tolist())}]"
    digest = xxhash.xxh3_64_hexdigest(wide.numpy().tobytes())[:8]
    return f"{flat.numel()} values of mean {float(wide.mean()):.6g} ({digest})"


def _numbers(indexes: Any) -> tuple[int, ...]:
    if isinstance(indexes, int):
        return (indexes,)
    if not isinstance(indexes, list | tuple):
        return ()
    return tuple(i for i in indexes[:MOST_INDEXES] if isinstance(i, int))
