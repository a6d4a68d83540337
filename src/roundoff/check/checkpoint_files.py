"""Checkpoints as they lie on disk, one tensor at a time.

A ``.safetensors`` file; a ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` file of torch, of
which tensors alone are read; a folder of several of them with an index or without, as
Hugging Face writes it; a folder of Megatron's, with ``mp_rank_*`` in it or in the
iteration that it names as its latest.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from roundoff.errors import RunError
from roundoff.files import is_url
from roundoff.foreign import check_memory, inside, parse_json, read_text, regular

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
SUFFIXES = (".safetensors", *_TORCH)
_LATEST = "latest_checkpointed_iteration.txt"
_MEGATRON = ("model_optim_rng.pt", "model_rng.pt")
#: Levels of dictionaries in a file of torch.
_DEEPEST = 12


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint by name; each is read when it is asked for."""

    where: str
    readers: Mapping[str, Callable[[], Tensor]]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor.

        Raises ``RunError`` where the file is damaged, or the tensor larger than memory.
        """
        try:
            tensor = self.readers[name]()
            check_memory(tensor.nbytes, "the tensor")
            return tensor
        except (
            SafetensorError,
            OSError,
            MemoryError,
            RuntimeError,
            ValueError,
        ) as error:
            raise _unreadable(self.where, f"{name}: {error}") from error


def is_checkpoint(place: str | Path) -> bool:
    """Return True for a file or folder that is a checkpoint and no run.

    A file that is not there is one by its name.
    """
    path = Path(place)
    if not path.is_dir():
        return path.suffix in SUFFIXES and not is_url(place)
    return not (path / "run.json").exists() and bool(_files(path))


def read_checkpoint(place: str | Path) -> Checkpoint:
    """Open a checkpoint. Raises ``RunError`` where none is there, or it is damaged."""
    path = Path(place)
    if not path.exists():
        raise RunError("no such file", where=str(path), expected="a checkpoint")
    files = _files(path) if path.is_dir() else [("", path)]
    readers: dict[str, Callable[[], Tensor]] = {}
    for prefix, file in files:
        for name, reader in _readers(file):
            readers[f"{prefix}{name}"] = reader
    if not readers:
        raise RunError(
            "no tensors in this checkpoint",
            where=str(path),
            expected="a file of safetensors or torch, or a folder of them",
        )
    return Checkpoint(str(path), readers)


def _files(folder: Path) -> Sequence[tuple[str, Path]]:
    """Return the files of a folder, each with what stands before its names."""
    indexes = sorted(folder.glob("*.index.json"))
    if indexes:
        return [("", file) for file in _of_index(indexes[0])]
    latest = folder / _LATEST
    if latest.is_file():
        folder = _of_latest(latest)
    ranks = sorted(folder.glob("mp_rank_*"))
    if ranks:
        return _of_ranks(ranks)
    tensors = sorted(folder.glob("*.safetensors"))
    suffixed = (file for suffix in _TORCH for file in folder.glob(f"*{suffix}"))
    files = tensors or sorted(suffixed)
    return [("", file) for file in files if file.is_file()]


def _of_ranks(folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return Megatron's files of each rank; names begin with the rank."""
    return [
        (f"{folder.name}/", folder / name)
        for folder in folders
        for name in _MEGATRON
        if (folder / name).is_file()
    ]


def _of_index(index: Path) -> list[Path]:
    try:
        names = parse_json(read_text(index))["weight_map"].values()
        files = [inside(index.parent, str(name)) for name in dict.fromkeys(names)]
        missing = [file for file in files if file is None or not file.is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {str(error)[:200]}"
        raise _unreadable(str(index), got) from error
    if missing:
        raise _unreadable(str(index), f"{len(missing)} of its files are not there")
    return [file for file in files if file is not None]


def _of_latest(latest: Path) -> Path:
    """Return the folder of the iteration that Megatron names as its latest."""
    try:
        text = read_text(latest).strip()
        name = text if text == "release" else f"iter_{int(text):07d}"
    except (OSError, ValueError) as error:
        raise _unreadable(str(latest), str(error)) from error
    return latest.parent / name


def _readers(file: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    if file.suffix == ".safetensors":
        yield from _of_safetensors(file)
    else:
        yield from _of_torch(file)


def _of_safetensors(file: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    def reader(name: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            with safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
                return tensor

        return read

    try:
        with safe_open(regular(file), framework="pt") as opened:
            names = list(opened.keys())
    except (SafetensorError, OSError, MemoryError, RuntimeError) as error:
        # the last where the file is larger than what can be mapped
        raise _unreadable(str(file), str(error)) from error
    for name in names:
        yield name, reader(name)


def _of_torch(file: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    try:
        # of Megatron's arguments nothing is called
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = _loaded(file)
    except Exception as error:  # a damaged pickle may raise anything
        got = str(error).partition("\n")[0][:200]
        raise _unreadable(str(file), got) from error
    for name, tensor in _tensors(content, "", 0):
        yield name, lambda tensor=tensor: tensor  # type: ignore[misc]


def _loaded(file: Path) -> Any:
    """Return what the file holds, its tensors mapped from it where torch can."""
    try:
        return torch.load(
            regular(file), map_location="cpu", weights_only=True, mmap=True
        )
    except RuntimeError:  # the format before zip files
        check_memory(file.stat().st_size, "the file")
        return torch.load(file, map_location="cpu", weights_only=True)


def _tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif depth < _DEEPEST and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}.{key}" if name else str(key), depth + 1)
    elif depth < _DEEPEST and isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _tensors(inner, f"{name}.{place}", depth + 1)


def _unreadable(where: str, got: str) -> RunError:
    return RunError("the checkpoint cannot be read", where=where, got=got)
